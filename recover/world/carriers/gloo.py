"""The `gloo` carrier: torch's gloo over sockets that belong to the epoch.

It makes no MPI communicator, so nothing can crash in one. Its weakness is that a waiter whose own peers live
never hears of a death elsewhere, and that gloo's own abort does not wake it. So the group's sockets are known here: a
waiter is freed by shutting down duplicates of them. (Closing gloo's own descriptors would crash it.) Even so gloo
forgets a waiter whose message was halfway through when its connection closed: such a one is left behind in gloo, and
its group is kept, because to destroy it would be to wait for it.

Peers find each other by the census, which members alone take part in: there is no store that listens. Gloo's own
listener takes whoever names a small number for a peer, so every connection must show a proof before it is used: that it
knows the job's token, which is never sent, in this epoch.
"""

from __future__ import annotations

import ctypes
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from recover.job.authentication import Authenticator
from recover.job.grid import Grid
from recover.job.process import on_one_host
from recover.job.sockets import notice_loss
from recover.job.spec import LINK_TIMEOUT
from recover.world.carriers.base import Array, DataCarriers
from recover.world.carriers.contract import CarrierError, TookTooLongError, UnreachedError
from recover.world.carriers.host_memory import AllLanes, HostCarrier, Wait
from recover.world.carriers.worker import Worker
from recover.world.fabrics.base import Fabric

PATIENCE = 10.0  # seconds; all members make the group at the same moment, and if one is late they try again
# A slow replica is not a dead one: whoever waits is freed by the watcher, not by gloo's clock.
OPERATION_TIMEOUT = timedelta(hours=12)
LOOK = 0.05  # seconds between two looks at the connections of a group in which this rank waits
# Looks at a broken group without a word of gloo's, after which the wait is given up. They are counted, not timed: a
# process that was stopped for a while has not waited.
LOOKS = 10
CONNECTED = 1  # TCP's own number for a connection that neither side has closed
CALL = 2.0  # seconds that a member's listener may take to answer a call, when a group could not be made
TRAVELLED = struct.Struct("=120x2Q")  # of the kernel's TCP_INFO: bytes that were acknowledged, and received


class GlooCarriers(DataCarriers):
    settle = 0.0  # nothing here minds a death while it is built

    def __init__(
        self,
        fabric: Fabric,
        grid: Grid,
        worker: Worker,
        address: str | None = None,
        link_timeout: float = LINK_TIMEOUT,
        token: str = "",
    ) -> None:
        self._fabric, self._grid, self._worker = fabric, grid, worker
        self._address, self._link_timeout, self._token = address, link_timeout, token
        self._lanes = AllLanes()

    def make(self, members: tuple[int, ...]) -> GlooCarrier:
        _let_go_of_ended()
        return GlooCarrier(
            self._fabric.rank,
            self._grid,
            self._worker,
            members,
            self._lanes,
            self._address,
            self._link_timeout,
            self._token,
        )


class GlooCarrier(HostCarrier):
    def __init__(
        self,
        rank: int,
        grid: Grid,
        worker: Worker,
        members: tuple[int, ...],
        lanes: AllLanes,
        address: str | None = None,
        link_timeout: float = LINK_TIMEOUT,
        token: str = "",
    ) -> None:
        super().__init__(worker, grid.peers(rank, members), rank, lanes)
        self._before = _sockets()
        self._address, self._link_timeout = address or _own_address(), link_timeout
        self._device = dist.ProcessGroupGloo.create_device(hostname=self._address, lazy_init=False)
        self._listener = _listening_port(self._before)
        self._authenticator = Authenticator(token, "gloo")
        self._nonce = secrets.token_hex(16)  # makes the proofs of this epoch those of no other
        self._meeting = _Meeting()
        self._group: Any = None
        self._error: Exception | None = None
        # On a thread of its own: if a peer dies just now, it is left behind to run into its error in peace.
        self._maker = threading.Thread(target=self._make, name="recover-gloo-connect", daemon=True)
        self._lines: list[socket.socket] = []
        self._lock = threading.Lock()
        self._freed = False
        self._begun: deque[Any] = deque()  # gloo's works that have perhaps not ended

    def offer(self) -> bytes:
        self._maker.start()
        words = self._meeting.own_words(self._maker)
        if words is None:
            raise CarrierError(f"gloo: {self._error}")
        return json.dumps([self._listener, self._nonce, words, self._address]).encode()

    def connect(
        self, offers: Mapping[int, bytes], confirm: Callable[[bool], bool], alarmed: Callable[[], bool]
    ) -> None:
        try:
            told = zip(*(json.loads(offers[rank]) for rank in self.peers), strict=True)
            listeners, nonces, words, addresses = told
        except ValueError:
            self.free()
            raise CarrierError("a member could not offer a carrier") from None
        doors = dict(zip(self.peers, zip(addresses, listeners, strict=True), strict=True))
        self._meeting.open(words)
        self._await(alarmed, doors)
        self._collect(set(listeners))
        if len(self._lines) < self.size - 1:  # there may be more: of strangers, who find no peer to talk to
            found = len(self._lines)
            self.free()
            raise CarrierError(f"gloo has {found} connections, {self.size - 1} were expected")
        # Whoever reads the census sees the nonces; the proof needs the token, too. (Without a launcher of ours there is
        # no token, and members alone take part in the census.)
        epoch = json.dumps([self.peers, nonces])
        self._maker = threading.Thread(
            target=self._introduce, args=[epoch], name="recover-gloo-introduce", daemon=True
        )
        self._maker.start()
        self._await(alarmed, doors)

    def _await(self, alarmed: Callable[[], bool], doors: Mapping[int, tuple[str, int]]) -> None:
        """Until the thread has done its part. Raises CarrierError if it could not, or somebody has died.

        `doors`: the listeners of all members. If it takes too long, those who do not answer there are named.
        """
        others = {rank: door for rank, door in doors.items() if rank != self.peers[self.index]}
        deadline = time.monotonic() + PATIENCE
        while self._maker.is_alive():
            self._maker.join(0.001)
            late = time.monotonic() > deadline
            if self._maker.is_alive() and (late or alarmed()):
                self._collect({port for _, port in doors.values()})
                # Before the group is freed: that hits peers who only wait, and would take it for a fault of theirs.
                unreached = _unreached(others, CALL) if late else {}
                self.free()
                if not late:
                    raise CarrierError("gloo: the group was given up, a member died while it was made")
                why = f"gloo: the group was given up, it took longer than {PATIENCE:g} s"
                if unreached:
                    raise UnreachedError(why, unreached)
                raise TookTooLongError(f"{why}, although all members answer: they wait for others")
        if self._error:
            self.free()
            if unreached := _unreached(others, CALL):
                raise UnreachedError(f"gloo: {self._error}", unreached)
            raise CarrierError(f"gloo: {self._error}")

    def _make(self) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = OPERATION_TIMEOUT
        options._devices = [self._device]
        try:
            self._group = dist.ProcessGroupGloo(self._meeting, self.index, self.size, options)
        except Exception as error:
            self._error = error

    def _introduce(self, epoch: str) -> None:
        """Show every peer what only a member can know, and see the same of it."""
        others = [peer for peer in range(self.size) if peer != self.index]
        shown = {
            peer: torch.frombuffer(self._proof(epoch, self.index, peer), dtype=torch.uint8) for peer in others
        }
        seen = {peer: torch.zeros_like(mine) for peer, mine in shown.items()}
        self._introduced = shown, seen  # as long as the group may write to them
        try:
            works = [self._group.send([shown[peer]], peer, 0) for peer in others]
            works += [self._group.recv([seen[peer]], peer, 0) for peer in others]
            for work in works:
                work.wait()
            for peer in others:
                if not hmac.compare_digest(bytes(seen[peer].tolist()), self._proof(epoch, peer, self.index)):
                    raise CarrierError(f"who is connected in the place of rank {self.peers[peer]} is not it")
        except Exception as error:
            self._error = error

    def _proof(self, epoch: str, sender: int, receiver: int) -> bytearray:
        """The proof that `sender` sends to `receiver`. It is valid for this pair and this epoch only."""
        return bytearray(self._authenticator.mac(epoch, f"{sender} to {receiver}".encode()))

    def _collect(self, ports: set[int]) -> None:
        """Duplicates of the sockets that connect this rank to its peers: by shutting them down it is freed."""
        lines = []
        for descriptor, name in _sockets().items():
            if self._before.get(descriptor) == name:
                continue
            try:
                line = socket.socket(fileno=os.dup(descriptor))
            except OSError:
                continue
            try:
                if line.family not in (socket.AF_INET, socket.AF_INET6):
                    raise OSError("not a network socket")
                mine, theirs = line.getsockname()[1], line.getpeername()[1]
            except OSError:
                line.close()
                continue
            if mine == self._listener or theirs in ports:
                notice_loss(line, self._link_timeout)
                lines.append(line)
            else:
                line.close()
        with self._lock:
            self._lines = lines

    def free(self) -> None:
        self._meeting.cancel()
        with self._lock:
            if not self._freed and self._group is not None:
                _keep_until_ended(self._group, self._begun)
            self._freed = True
            for line in self._lines:
                try:
                    line.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # already gone
                line.close()
            self._lines = []

    @property
    def carried(self) -> int:
        with self._lock:
            return sum(map(_travelled, self._lines))

    def sum(self, source: Array, out: Array) -> None:
        if source is not out:
            out[...] = source
        self.begin_sum(out)()

    def begin_sum(self, piece: Array) -> Wait:
        tensor = torch.from_numpy(piece)
        return self._begin(lambda: self._group.allreduce([tensor]))

    def maximum(self, data: Array) -> None:
        tensor, options = torch.from_numpy(data), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._begin(lambda: self._group.allreduce([tensor], options))()

    def copy_from(self, data: Array, root: int) -> None:
        tensor = torch.from_numpy(data)
        self._begin(lambda: self._group.broadcast(tensor, root))()

    def gather(self, source: Array, out: Array) -> None:
        tensor, rows = torch.from_numpy(source), list(torch.from_numpy(out))
        self._begin(lambda: self._group.allgather([rows], [tensor]))()

    def swap(self, out: Mapping[int, Array], into: Mapping[int, Array]) -> None:
        self._check()
        ended: list[str] = []

        def wait() -> None:
            # For these gloo takes no limit without breaking the group by it; so they are waited for aside.
            try:
                works = [self._group.send([torch.from_numpy(data)], to, 1) for to, data in out.items()]
                works += [self._group.recv([torch.from_numpy(data)], to, 1) for to, data in into.items()]
                for work in works:
                    work.wait()
            except RuntimeError as error:
                ended.append(str(error))

        aside = threading.Thread(target=wait, name="recover-gloo-swap", daemon=True)
        aside.start()

        def through() -> bool:
            aside.join(LOOK)
            return not aside.is_alive()

        self._see(through)
        if ended:
            self._fail(ended[0])

    def meet(self) -> None:
        self._begin(lambda: self._group.barrier())()

    def _begin(self, operation: Callable[[], Any]) -> Wait:
        self._check()
        while self._begun and self._begun[0].is_completed():
            self._begun.popleft()
        try:
            work = operation()
        except RuntimeError as error:
            self._fail(str(error))
        self._begun.append(work)
        return lambda: self._wait(work)

    def _wait(self, work: Any) -> None:
        def through() -> bool:
            try:
                work.wait(timedelta(seconds=LOOK))
            except RuntimeError:
                pass  # the limit, or an error that comes again below
            return bool(work.is_completed())

        self._see(through)
        try:
            work.wait()
        except RuntimeError as error:
            self._fail(str(error))

    def _see(self, through: Callable[[], bool]) -> None:
        """Until gloo is `through`, which takes a look at a time to tell. Raises CarrierError if it will never be."""
        looks = 0
        while not through():
            looks = looks + 1 if self._broken() else 0
            if looks == LOOKS:
                self._fail("a connection was closed in the middle of a message")

    def _broken(self) -> bool:
        """Whether this rank or a peer has closed a connection of the group."""
        with self._lock:
            return self._freed or not all(map(_is_connected, self._lines))

    def _check(self) -> None:
        if self._freed:
            raise CarrierError("the group was freed after a death")

    def _fail(self, why: str) -> NoReturn:
        self.free()
        raise CarrierError(f"gloo: {why}")


# Groups with works that gloo may have forgotten. Not even the end of the process may destroy them.
_kept: list[tuple[Any, deque[Any]]] = []


def _keep_until_ended(group: Any, works: deque[Any]) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    _kept.append((group, works))


def _let_go_of_ended() -> None:
    for kept in list(_kept):
        group, works = kept
        if all(work.is_completed() for work in tuple(works)):
            _kept.remove(kept)
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))


def _is_connected(line: socket.socket) -> bool:
    return line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == CONNECTED


def _travelled(line: socket.socket) -> int:
    """Bytes that the other end has acknowledged, and that have come from there."""
    told = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TRAVELLED.size)
    # Of an old kernel nothing is known.
    return sum(TRAVELLED.unpack(told)) if len(told) == TRAVELLED.size else 0


def _unreached(doors: Mapping[int, tuple[str, int]], seconds: float) -> dict[int, str]:
    """The peers whose listener accepts no connection, by number, with address and reason. All are tried at once.

    A door that is closed by now is answered by the kernel behind it: the way there is good.
    """
    found: dict[int, str] = {}

    def call(rank: int, address: str, port: int) -> None:
        try:
            socket.create_connection((address, port), seconds).close()
        except ConnectionRefusedError:
            pass
        except OSError as error:
            found[rank] = f"{address}:{port} ({error})"

    callers = [threading.Thread(target=call, args=[rank, *door], daemon=True) for rank, door in doors.items()]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    return dict(found)


class _Meeting(dist.Store):
    """What gloo takes for a store: its address is left here, and the census brings those of the others."""

    def __init__(self) -> None:
        super().__init__()
        self._words: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._asked = self._open = self._cancelled = False

    def own_words(self, maker: threading.Thread) -> dict[str, str] | None:
        """All that gloo has left here when it first asks for others; None if `maker` ends before that."""
        with self._changed:
            while not self._asked:
                if not maker.is_alive():
                    return None
                self._changed.wait(0.01)
            return {key: word.hex() for key, word in self._words.items()}

    def open(self, words: Sequence[Mapping[str, str]]) -> None:
        """The words of all members are there."""
        with self._changed:
            for theirs in words:
                self._words.update({key: bytes.fromhex(word) for key, word in theirs.items()})
            self._open = True
            self._changed.notify_all()

    def cancel(self) -> None:
        """Whoever waits gets an error."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def set(self, key: str, value: Any) -> None:
        with self._changed:
            self._words[key] = bytes(value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._words[key]

    def wait(self, keys: Sequence[str], *_: object) -> None:
        with self._changed:
            self._asked = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._open or self._cancelled)
            if missing := [key for key in keys if key not in self._words]:
                raise RuntimeError(f"no member has offered {', '.join(missing)}")


def _own_address() -> str:
    """Where the other ranks reach this one: the loopback if all are on this host."""
    if on_one_host():
        return "127.0.0.1"
    return socket.gethostbyname(socket.gethostname())


def _sockets() -> dict[int, str]:
    """This process's sockets: descriptor to kernel name."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if target.startswith("socket:"):
            found[int(entry)] = target
    return found


def _listening_port(before: dict[int, str]) -> int:
    """The port of the listener that has appeared since `before`."""
    for descriptor, name in _sockets().items():
        if before.get(descriptor) == name:
            continue
        try:
            with socket.socket(fileno=os.dup(descriptor)) as candidate:
                network = candidate.family in (socket.AF_INET, socket.AF_INET6)
                if network and candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    return int(candidate.getsockname()[1])
        except OSError:
            continue
    raise CarrierError("gloo opened no listening socket")
