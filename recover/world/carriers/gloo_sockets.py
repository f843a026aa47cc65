"""The sockets under a gloo group, which gloo itself does not show: found in /proc, duplicated,
watched, shut down.

Gloo's own abort does not wake a thread that waits for a peer. A waiter is woken by shutting down
duplicates of the group's sockets; closing gloo's own descriptors would crash it. Even then gloo
forgets a waiter whose message was halfway through when its connection closed. Its group must never
be destroyed, because destroying it waits for it.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from recover.job.sockets import detect_connection_loss
from recover.world.carriers.contract import CarrierError

_ESTABLISHED = 1  # TCP's number for a connection that neither side has closed
_CARRIED = struct.Struct("=120x2Q")  # of the kernel's TCP_INFO: bytes that were acknowledged, and received


class GroupSockets:
    """Duplicates of the sockets of one group.

    Make it before gloo's device: the sockets that appear afterwards are those of the device.

    `link_timeout`: seconds after which the kernel closes a connection whose peer does not answer.
    """

    def __init__(self, link_timeout: float) -> None:
        self._before, self._link_timeout = open_sockets(), link_timeout
        self._connections: list[socket.socket] = []
        self._lock = threading.Lock()

    def find_listener(self) -> int:
        """The port of the listener that gloo's device has opened."""
        for candidate in self._new_sockets():
            with candidate:
                if candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    return int(candidate.getsockname()[1])
        raise CarrierError("gloo opened no listening socket")

    def find_connections(self, listener: int, ports: set[int]) -> int:
        """Duplicate the sockets that connect this rank to its peers' listeners, at `ports`.

        Returns the number of duplicated sockets.
        """
        found = []
        for candidate in self._new_sockets():
            try:
                mine, theirs = candidate.getsockname()[1], candidate.getpeername()[1]
            except OSError:  # not connected, such as the listener itself, which must never be shut down
                candidate.close()
                continue
            if mine == listener or theirs in ports:
                detect_connection_loss(candidate, self._link_timeout)
                found.append(candidate)
            else:
                candidate.close()
        with self._lock:
            self._connections = found
        return len(found)

    def shut_down(self) -> None:
        """Wake all threads that wait on these connections, here and at the peers."""
        with self._lock:
            for connection in self._connections:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # already closed
                connection.close()
            self._connections = []

    def are_connected(self) -> bool:
        """Whether no connection of the group was closed, at either end."""
        with self._lock:
            return all(map(is_connected, self._connections))

    @property
    def carried(self) -> int:
        with self._lock:
            return sum(map(bytes_carried, self._connections))

    def _new_sockets(self) -> Iterator[socket.socket]:
        """Duplicates of the network sockets that were opened since this object was made."""
        for descriptor, name in open_sockets().items():
            if self._before.get(descriptor) == name:
                continue
            try:
                candidate = socket.socket(fileno=os.dup(descriptor))
            except OSError:
                continue  # closed meanwhile
            if candidate.family in (socket.AF_INET, socket.AF_INET6):
                yield candidate
            else:
                candidate.close()


def open_sockets() -> dict[int, str]:
    """The sockets of this process: descriptor to the kernel's name."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if target.startswith("socket:"):
            found[int(entry)] = target
    return found


def is_connected(connection: socket.socket) -> bool:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED


def bytes_carried(connection: socket.socket) -> int:
    """Bytes that the peer has acknowledged, and bytes received from it; 0 on an old kernel, which
    does not count."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _CARRIED.size)
    return sum(_CARRIED.unpack(info)) if len(info) == _CARRIED.size else 0


def unreached(listeners: Mapping[int, tuple[str, int]], seconds: float) -> dict[int, str]:
    """The ranks whose listener accepts no connection, with address and reason.

    All are tried at once.

    A refused connection counts as reached: the kernel of that host has answered.
    """
    found: dict[int, str] = {}

    def call(rank: int, address: str, port: int) -> None:
        try:
            socket.create_connection((address, port), seconds).close()
        except ConnectionRefusedError:
            pass
        except OSError as error:
            found[rank] = f"{address}:{port} ({error})"

    callers = [
        threading.Thread(target=call, args=[rank, *where], daemon=True) for rank, where in listeners.items()
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    return dict(found)


# Groups with works that gloo may have forgotten. Not even the end of the process may destroy them:
# hence the reference that Python does not count when it clears modules.
_kept: list[tuple[Any, deque[Any]]] = []


def keep_until_ended(group: Any, works: deque[Any]) -> None:
    """Keep a group from being destroyed while one of its works has not ended."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    _kept.append((group, works))


def release_ended() -> None:
    """Release kept groups whose works have all ended."""
    for kept in list(_kept):
        group, works = kept
        if all(work.is_completed() for work in tuple(works)):
            _kept.remove(kept)
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))
