"""The `gloo` carrier: torch's gloo over sockets that belong to the epoch.

It makes no MPI communicator, so nothing can crash in one. Its weakness is that a waiter whose own
peers live never hears of a death elsewhere; `gloo_sockets.py` wakes it.

Peers find each other by the census, in which members alone take part: there is no store that
listens. Gloo's listener accepts any connection that names a small number as a peer, so every
connection must carry a proof before it is used: that its other end knows the job's token, which is
never sent, in this epoch.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from enum import Enum, auto
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from recover.job.authentication import Authenticator
from recover.job.grid import Grid
from recover.job.process import on_one_host
from recover.job.spec import LINK_TIMEOUT
from recover.world.carriers.base import Array, DataCarriers
from recover.world.carriers.contract import CarrierError, TookTooLongError, UnreachedError
from recover.world.carriers.gloo_sockets import GroupSockets, keep_until_ended, release_ended, unreached
from recover.world.carriers.host_memory import HostCarrier, StagingByDevice, Wait
from recover.world.carriers.worker import Worker
from recover.world.fabrics.base import Fabric

PATIENCE = 10.0  # seconds; all members make the group at the same moment, and if one is late they try again
# A slow replica is not a dead one: a waiter is woken by the watcher, not by gloo's clock.
OPERATION_TIMEOUT = timedelta(hours=12)
LOOK = 0.05  # seconds between two checks of the connections of a group in which this rank waits
# Checks of a broken group without an error of gloo's, after which the wait is given up. They are
# counted, not timed: a process that was stopped for a while has not waited.
LOOKS = 10
CALL = 1.5  # seconds that a member's listener may take to accept a connection, when a group could not be made
PROBE = 1.0  # seconds after which a rank looks whether all members answer: a broken link is not waited for


class _State(Enum):
    """States of a carrier. FREED is final, and can be entered from all others by any thread."""

    NEW = auto()  # gloo's device listens, and nothing is sent
    CONNECTING = auto()  # gloo makes the group, and waits for the addresses of the peers
    PROVING = auto()  # all peers are connected, and prove to each other that they are members
    READY = auto()
    FREED = auto()


class _Task:
    """A function on a thread of its own.

    If a peer dies meanwhile, the thread is left behind to run into its error.
    """

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self.error: Exception | None = None
        # The thread drops the function at its end. Kept here, it would make a cycle with the carrier,
        # whose sockets and threads would stay until the next garbage collection.
        self._thread = threading.Thread(target=self._run, args=[function], name=name, daemon=True)
        self._thread.start()

    def wait(self, seconds: float = 0.0) -> bool:
        """Wait until the thread ends. Returns whether it has ended; `error` is then its exception, if any."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:
            error.__traceback__ = error.__context__ = error.__cause__ = None  # they refer to the carrier
            self.error = error


class GlooCarriers(DataCarriers):
    settle = 0.0  # a death while a group is built does no harm

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
        self._staging = StagingByDevice()

    def make(self, members: tuple[int, ...]) -> GlooCarrier:
        release_ended()
        return GlooCarrier(
            self._fabric.rank,
            self._grid,
            self._worker,
            members,
            self._staging,
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
        staging: StagingByDevice,
        address: str | None = None,
        link_timeout: float = LINK_TIMEOUT,
        token: str = "",
    ) -> None:
        super().__init__(worker, grid.peers(rank, members), rank, staging)
        self._address = address or _own_address()
        self._sockets = GroupSockets(link_timeout)
        self._device = dist.ProcessGroupGloo.create_device(hostname=self._address, lazy_init=False)
        self._listener = self._sockets.find_listener()
        self._authenticator = Authenticator(token, "gloo")
        self._nonce = secrets.token_hex(16)  # makes the proofs of this epoch valid in no other
        self._meeting = _Meeting()
        self._group: Any = None
        self._lock = threading.Lock()
        self._state = _State.NEW
        self._begun: deque[Any] = deque()  # gloo's works that may not have ended

    def offer(self) -> bytes:
        self._enter(_State.CONNECTING)
        self._task = _Task("recover-gloo-connect", self._make)
        words = self._meeting.own_words(self._task)
        if words is None:
            raise CarrierError(f"gloo: {self._task.error}")
        return json.dumps([self._listener, self._nonce, words, self._address]).encode()

    def connect(
        self, offers: Mapping[int, bytes], confirm: Callable[[bool], bool], alarmed: Callable[[], bool]
    ) -> None:
        try:
            told = zip(*(json.loads(offers[rank]) for rank in self.peers), strict=True)
            ports, nonces, words, addresses = told
        except ValueError:
            self.free()
            raise CarrierError("a member could not offer a carrier") from None
        listeners = dict(zip(self.peers, zip(addresses, ports, strict=True), strict=True))
        self._meeting.open(words)
        self._await(alarmed, listeners)
        found = self._sockets.find_connections(self._listener, set(ports))
        # There may be more connections than peers: strangers connect, too, and gloo gives them no
        # peer to talk to.
        if found < self.size - 1:
            self.free()
            raise CarrierError(f"gloo has {found} connections, {self.size - 1} were expected")
        self._enter(_State.PROVING)
        # A process that reads the census sees the nonces; the proof needs the token, too. (Without
        # a launcher of ours there is no token, and members alone take part in the census.)
        epoch = json.dumps([self.peers, nonces])
        self._task = _Task("recover-gloo-introduce", lambda: self._introduce(epoch))
        self._await(alarmed, listeners)
        self._enter(_State.READY)

    def _enter(self, state: _State) -> None:
        with self._lock:
            if self._state is not _State.FREED:
                self._state = state

    def _await(self, alarmed: Callable[[], bool], listeners: Mapping[int, tuple[str, int]]) -> None:
        """Wait for the task under way.

        Raises CarrierError if it failed, took too long, or a member died.

        `listeners`: those of all members. If the task takes too long, the error names the members
        that do not answer there.
        """
        others = {rank: where for rank, where in listeners.items() if rank != self.peers[self.index]}
        ports = {port for _, port in listeners.values()}
        began, probed = time.monotonic(), False
        while not self._task.wait(0.001):
            waited = time.monotonic() - began
            if waited > PATIENCE or alarmed():
                self._give_up(waited > PATIENCE, others, ports)
            if waited > PROBE and not probed:
                probed = True
                if silent := unreached(others, CALL):
                    self._abandon(ports)
                    raise UnreachedError("gloo: the group was given up", silent)
        if error := self._task.error:
            self.free()
            if silent := unreached(others, CALL):
                raise UnreachedError(f"gloo: {error}", silent)
            raise CarrierError(f"gloo: {error}")

    def _give_up(self, late: bool, others: Mapping[int, tuple[str, int]], ports: set[int]) -> NoReturn:
        # Before the group is freed: freeing breaks it for peers that only wait, and they would
        # report a failure.
        silent = unreached(others, CALL) if late else {}
        self._abandon(ports)
        if not late:
            raise CarrierError("gloo: the group was given up, a member died while it was made")
        why = f"gloo: the group was given up, it took longer than {PATIENCE:g} s"
        if silent:
            raise UnreachedError(why, silent)
        raise TookTooLongError(f"{why}, although all members answer: they wait for others")

    def _abandon(self, ports: set[int]) -> None:
        """Free a group that is not complete, and close the connections that it has: members that are
        connected to this rank, and to all others, would wait for it until their own limit."""
        self._sockets.find_connections(self._listener, ports)
        self.free()

    def _make(self) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = OPERATION_TIMEOUT
        options._devices = [self._device]
        self._group = dist.ProcessGroupGloo(self._meeting, self.index, self.size, options)

    def _introduce(self, epoch: str) -> None:
        """Send every peer a proof that only a member can make, and check the proof of each peer."""
        others = [peer for peer in range(self.size) if peer != self.index]
        shown = {
            peer: torch.frombuffer(self._proof(epoch, self.index, peer), dtype=torch.uint8) for peer in others
        }
        seen = {peer: torch.zeros_like(mine) for peer, mine in shown.items()}
        self._introduced = shown, seen  # kept: gloo may write to them for as long as the group exists
        works = [self._group.send([shown[peer]], peer, 0) for peer in others]
        works += [self._group.recv([seen[peer]], peer, 0) for peer in others]
        for work in works:
            work.wait()
        for peer in others:
            if not hmac.compare_digest(bytes(seen[peer].tolist()), self._proof(epoch, peer, self.index)):
                raise CarrierError(
                    f"the process that is connected as rank {self.peers[peer]} is not that rank"
                )

    def _proof(self, epoch: str, sender: int, receiver: int) -> bytearray:
        """The proof that `sender` sends to `receiver`.

        It is valid for this pair and this epoch only.
        """
        return bytearray(self._authenticator.mac(epoch, f"{sender} to {receiver}".encode()))

    def free(self) -> None:
        self._meeting.cancel()
        with self._lock:
            if self._state is not _State.FREED and self._group is not None:
                keep_until_ended(self._group, self._begun)
            self._state = _State.FREED
        self._sockets.shut_down()

    @property
    def carried(self) -> int:
        return self._sockets.carried

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
            # A wait with a limit would break the group for sends and receives, so another thread
            # waits for them without one.
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
                pass  # the limit, or an error that is raised again below
            return bool(work.is_completed())

        self._see(through)
        try:
            work.wait()
        except RuntimeError as error:
            self._fail(str(error))

    def _see(self, through: Callable[[], bool]) -> None:
        """Wait until `through()`, which takes LOOK seconds.

        Raises CarrierError if that will never happen.
        """
        looks = 0
        while not through():
            looks = looks + 1 if self._broken() else 0
            if looks == LOOKS:
                self._fail("a connection was closed in the middle of a message")

    def _broken(self) -> bool:
        """Whether this rank or a peer has closed a connection of the group."""
        return self._state is _State.FREED or not self._sockets.are_connected()

    def _check(self) -> None:
        if self._state is _State.FREED:
            raise CarrierError("the group was freed after a death")

    def _fail(self, why: str) -> NoReturn:
        self.free()
        raise CarrierError(f"gloo: {why}")


class _Meeting(dist.Store):
    """The store that gloo asks: it takes gloo's own address, and the census brings those of the
    others."""

    def __init__(self) -> None:
        super().__init__()
        self._words: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._asked = self._open = self._cancelled = False

    def own_words(self, task: _Task) -> dict[str, str] | None:
        """The entries that gloo has stored when it first asks for those of the others; None if `task`
        ends before that."""
        with self._changed:
            while not self._asked:
                if task.wait():
                    return None
                self._changed.wait(0.01)
            return {key: word.hex() for key, word in self._words.items()}

    def open(self, words: Sequence[Mapping[str, str]]) -> None:
        """Store the words of all members, and answer gloo."""
        with self._changed:
            for theirs in words:
                self._words.update({key: bytes.fromhex(word) for key, word in theirs.items()})
            self._open = True
            self._changed.notify_all()

    def cancel(self) -> None:
        """Answer gloo with an error."""
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
    """The address at which other ranks reach this one: the loopback if all are on this host."""
    if on_one_host():
        return "127.0.0.1"
    return socket.gethostbyname(socket.gethostname())
