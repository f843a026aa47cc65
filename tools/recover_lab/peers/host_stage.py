"""Hosts for comparisons: emulated by a lab where possible, otherwise groups of processes on this machine.

In a lab a power cut is silent, as with a real host, and a link can be cut. Without a lab, a host is the processes that
were started on it: they are killed together, but the kernel closes their connections, and all share one network.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from recover.launch.hosts.addresses import leads_to
from recover_lab.lab.hosts import Lab, unavailable
from recover_lab.peers.ended import BenchmarkError

SOMEWHERE = ("192.0.2.1", 9)  # an address for documentation: nothing is sent there


class HostPool(Protocol):
    names: list[str]
    emulated: bool  # by namespaces, each with a network of its own

    def address(self, name: str) -> str: ...

    def start(self, name: str, command: Sequence[Any], **options: Any) -> subprocess.Popen[Any]: ...

    def power_cut(self, name: str) -> None: ...

    def cut(self, name: str) -> None: ...

    def cut_between(self, one: str, other: str) -> None: ...


class LabPool:
    emulated = True

    def __init__(self, lab: Lab) -> None:
        self._lab, self.names = lab, [host.name for host in lab]

    def address(self, name: str) -> str:
        return self._lab[name].address

    def start(self, name: str, command: Sequence[Any], **options: Any) -> subprocess.Popen[Any]:
        return self._lab[name].start(list(map(str, command)), **options)

    def power_cut(self, name: str) -> None:
        self._lab[name].power_cut()

    def cut(self, name: str) -> None:
        self._lab[name].cut()

    def cut_between(self, one: str, other: str) -> None:
        self._lab[one].cut_link(self._lab[other])
        self._lab[other].cut_link(self._lab[one])


class LocalPool:
    emulated = False

    def __init__(self, hosts: int, address: str) -> None:
        self.names = [f"h{number + 1}" for number in range(hosts)]
        self._address = address
        self._started: dict[str, list[subprocess.Popen[Any]]] = {name: [] for name in self.names}

    def address(self, name: str) -> str:
        return self._address

    def start(self, name: str, command: Sequence[Any], **options: Any) -> subprocess.Popen[Any]:
        process = subprocess.Popen(list(map(str, command)), start_new_session=True, **options)
        self._started[name].append(process)
        return process

    def power_cut(self, name: str) -> None:
        """Stop all processes before the first is killed, so that none reports the death of another."""
        started, self._started[name] = self._started[name], []
        doomed = [pid for process in started if process.poll() is None for pid in _tree(process.pid)]
        for how in (signal.SIGSTOP, signal.SIGKILL):
            for pid in doomed:
                try:
                    os.kill(pid, how)
                except ProcessLookupError:
                    pass
        for process in started:
            process.wait()

    def cut(self, name: str) -> None:
        raise BenchmarkError("no link can be cut here: hosts share this machine's network")

    def cut_between(self, one: str, other: str) -> None:
        self.cut(one)

    def end(self) -> None:
        for name in self.names:
            self.power_cut(name)


@contextmanager
def open_pool(hosts: int, shared: Path) -> Iterator[HostPool]:
    """Hosts for one run. `shared`: a directory that all of them see."""
    if unavailable() is None:
        with Lab(hosts, shared=[shared]) as lab:
            yield LabPool(lab)
        return
    address = leads_to(*SOMEWHERE)
    if address is None:
        raise BenchmarkError(
            f"no hosts can be made here ({unavailable()}), and this machine has no address but its loopback"
        )
    own = LocalPool(hosts, address)
    try:
        yield own
    finally:
        own.end()


def _tree(root: int) -> list[int]:
    """A process and its descendants, parents first: they might start others."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parent = int(Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended meanwhile
        children.setdefault(parent, []).append(int(name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found
