"""The world as a training step sees it: who is left, one agreement over all of them, repair, and the cross group."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import NoReturn

from recover.job.grid import Grid
from recover.job.spec import JobSpec
from recover.world.calls import LEFT, Call, CollectiveCallError, agreements_at, conflict, explain, position
from recover.world.carriers.base import DataCarrier
from recover.world.carriers.worker import Work
from recover.world.census import Census, left_behind
from recover.world.cross_group import CrossGroup
from recover.world.fabrics.base import DeclaredDeadError, NotAdmittedError
from recover.world.interfaces import Parts
from recover.world.links import Links
from recover.world.liveness.board import CALL, ENDED, POSITION, STEP
from recover.world.membership import ExcludedError, Membership, Phase
from recover.world.rank_exit import End
from recover.world.slot_notes import blamed
from recover.world.watchdog import HangWatchdog
from recover.world.watcher import Watcher, end_declared_dead

LINGER = 5.0  # seconds; longer than it takes a rank that an agreement has forgotten to give itself up
TOLD_AGAIN = (
    1.0  # seconds between two looks at what is told of ranks on other hosts: longer than that is late
)
CALLS_ELSEWHERE = 2.0  # seconds in one call after which this rank looks at the calls of other hosts
CALL_PATIENCE = 5.0  # seconds for a rank in a wrong call to come to its next agreement
MATE_PATIENCE = 2.0  # seconds; a death is noticed within 60 ms, on busy cores later


class World:
    """All ranks of the job, of which any may die at any moment. Get it from `recover.init()`."""

    def __init__(self, job: JobSpec, grid: Grid, parts: Parts) -> None:
        self.job = job
        self.grid = grid
        self.rank = parts.fabric.rank
        self.replica = grid.replica(self.rank)
        self.shard = grid.shard(self.rank)
        self.board = parts.liveness
        self.hooks = parts.hooks
        self.notes = parts.notes
        self.worker = parts.worker
        self.closing: list[Callable[[], object]] = []  # what must be done before anybody may leave
        self.noticed_at: float | None = None  # when this rank first knew of a death that is not repaired yet
        self._fabric, self._own, self._rows_told = parts.fabric, parts.own, parts.rows_told
        self._membership: Membership[DataCarrier] = Membership(
            parts.fabric,
            grid,
            parts.carriers,
            lambda *place: self.hooks(*place),
            parts.own.log,
            job.joining,
        )
        self._cross: CrossGroup | None = None
        self.evicted: dict[int, str] = {}  # replicas that the others went on without, and why
        self.arrivals: tuple[int, ...] = ()  # replicas that were let in, and do not hold the state yet
        self.steps_made = (
            0  # every `recover.Step` of the script: only the state of a single one can be passed on
        )
        self.hooks.coming = self._coming
        # Works of past epochs that failed, with their buffers. When a repair is closed nobody is inside them any more,
        # and what was in transit then has come in once all have been through the next agreement.
        self._given_up: list[Work] = []
        self._drop = parts.drop
        self._stepped = 0  # the last step that this rank went through to its end
        self._waiting = 0  # how many calls deep this rank is in a wait for others
        self._has_agreed = self._in_step = False
        self._code = parts.code
        self._call = 0  # the collective call that this rank is in, or that has failed and is to be repaired
        self._in_call = False
        self._last_position = 0
        self._seen_calls: dict[int, int] = {}  # the others' at this position, when they last changed
        self._seen_calls_at = self._called_at = self._read_rows_at = 0.0
        self._rows: Mapping[int, Sequence[int]] = {}  # of other hosts, as last read
        self._hangs = HangWatchdog(
            grid, job.hang_limit, lambda step: blamed(parts.notes, step), parts.own.log
        )
        self._links = Links(self.rank, self.board, self.worker, job.link_timeout, parts.rows_told or dict)
        self._watcher = Watcher(
            parts,
            grid,
            self._hangs,
            self._on_death,
            self._waits,
            self._look_at_links,
            self._look_at_calls,
        )
        parts.watch(self._watcher)
        if job.joining:
            self.last_census = Census(0, self.members, (), {}, 0, 0.0)
        else:
            # Start-up is the first pass of the repair loop.
            self.last_census = self.repair(os.urandom(16))
        if self._code is not None and not job.joining:
            self._code.publish(first=self.rank == self.members[0])
        # A word that members alone know, different in every job.
        self.token = job.token or self.last_census.records[self.members[0]].hex()
        parts.own.on_success(self._close)
        parts.own.on_raise(self._look_for_a_dead_mate)

    @property
    def outside(self) -> bool:
        """Whether this rank was started to join a world that is at work, and has not done so yet."""
        return self._cross is None

    @property
    def members(self) -> tuple[int, ...]:
        """The living ranks, as last agreed; to one that is outside, those of its own replica."""
        return self._membership.members

    @property
    def replicas(self) -> tuple[int, ...]:
        """The living replicas, as last agreed."""
        return self.grid.replicas_of(self.members)

    @property
    def epoch(self) -> int:
        """The world epoch: 1 after start-up, one more at every repair."""
        return self._membership.epoch

    @property
    def cross(self) -> CrossGroup:
        """This rank's cross-replica group in this epoch: the same shard in every living replica."""
        if self._cross is None:
            raise RuntimeError(
                f"rank {self.rank} was started to join a job at work, and is no member before its first step: it has "
                "no group with other replicas yet; build with recover.Step, or run without --return: a "
                "DistributedDataParallel of your own, on backend 'ulfm', cannot be joined"
            )
        return self._cross

    def agree(self, word: int = 1, phase: Phase | None = None) -> int | None:
        """The bitwise AND of everyone's word, the same on all survivors: the only commit point there is.

        None if somebody died: then every survivor gets None, and must call `repair`. Outside of a step, and of other
        collective calls, it is one itself: `repair` raises CollectiveCallError if not all replicas have made it.
        """
        if phase is None and not self._in_call:
            with self._announced(Call.AGREE):
                return self.agree(word, Phase.AGREE)
        phase = phase or Phase.VOTE
        with self._waits_here():
            self.cross.drain()
            with self._fabric.lock:
                agreed = self._membership.agree(word, phase)
        if agreed is None and self.noticed_at is None:
            self.noticed_at = time.time()
        if agreed is not None:
            self._drop(self._given_up)
            self._given_up = []
        self._has_agreed = True
        if agreed and agreed == word and not self._in_step:
            self.board.accomplish(self.rank)  # inside a step only its commit is
        return agreed

    @property
    def asking(self) -> tuple[int, ...]:
        """The replicas that this rank sees asking to join. Others may see them later, or earlier."""
        return self.grid.replicas_of(self._fabric.asking()) if self.steps_made < 2 else ()

    @contextmanager
    def call(
        self, call: Call, lost: Callable[[tuple[int, ...], float], object] = lambda *_: None
    ) -> Iterator[None]:
        """A collective call of the API: when this is entered, all replicas have come to the same one.

        Raises CollectiveCallError on all of them if some are in another one. `lost` is told of ranks that died
        meanwhile, and of how long the repair took. Inside of another call this does nothing.
        """
        if self._in_call or self.outside:
            yield
            return
        with self._announced(call):
            while self.agree(call.word, Phase.CALL) != call.word:
                census = self.repair()
                lost(census.lost, census.seconds)
            yield

    def join(self, record: bytes) -> Census:
        """Ask the members to take this rank in, wait until they do, and be one of them. It may take for ever.

        They admit whole replicas, in a repair of which this is the end; `record` is this rank's part of its census.
        """
        self.hooks.beside("ask")
        if self._code is not None and (why := self._code.differs()):
            self._own.die(End.REFUSED, why)
        try:
            self._fabric.ask()
        except NotAdmittedError as error:
            self._own.die(End.UNNEEDED, str(error))
        except DeclaredDeadError as error:
            end_declared_dead(self._own, error)
        return self.repair(record)

    def repair(
        self,
        record: bytes = b"",
        evict: frozenset[int] = frozenset(),
        admit: bool = False,
        reasons: Mapping[int, str] = MappingProxyType({}),
    ) -> Census:
        """Agree on who is left and exchange one record each; afterwards `cross` is a new group.

        A rank that the others go on without (it lost a mate of its replica, or is in `evict`) does not return from
        this: it leaves in a way that they see. `admit`: those whom all members see asking become members, too.
        `reasons`: why replicas in `evict` are evicted, for the logs of all. Raises CollectiveCallError, on all members,
        if they have come here from different collective calls.
        """
        self.evicted |= reasons
        for replica, why in reasons.items():
            self._own.log(f"{self._in_full(replica)} is evicted: {why}")
        before = [self._cross]
        if self._cross is not None:
            self._cross.break_off()
            self._cross.drain()
            self.board.repair(self.rank)
        with self._waits_here(), self._fabric.lock:
            try:
                census = self._membership.repair(
                    record, evict, admit, reasons.get(self.replica, ""), self._call
                )
            except ExcludedError as excluded:
                if excluded.orphan and (told := self._told_by_the_lost()):
                    self._die_of_a_call(told)
                how = End.ORPHAN if excluded.orphan else End.EXCLUDED
                self._own.die(how, str(excluded))
            assert self._membership.carrier is not None
            self._cross = CrossGroup(self._membership.carrier, self.worker, self._reduced)
        self._drop(before)
        self._given_up += self.worker.take_failed()
        self.last_census = census
        self.noticed_at = None
        self._refuse_different_calls(census)
        return census

    def _in_full(self, replica: int) -> str:
        """A replica of several ranks, with its ranks; of one rank, this rank."""
        size = self.grid.replica_size
        first, last = replica * size, replica * size + size - 1
        return f"rank {first}" if size == 1 else f"replica {replica} (ranks {first}-{last})"

    def let_go(self, why: str) -> None:
        """Nobody waits for data of others any more: this rank comes to its next agreement. From any thread."""
        if self._cross is not None:
            self._cross.break_off(why)

    def stop_watching(self) -> None:
        """The world is lost and all ranks end: one that saves its state must not leave because a mate has ended."""
        self._watcher.rest()

    def linger(self) -> None:
        """Before this rank ends by something that all will find alike: until they hold what it has just learnt.

        Otherwise its end could come between an agreement's result and those who have not got it yet; they would decide
        anew, without it. One that was forgotten gives itself up only when nobody is silent: who is stopped is fenced
        first.
        """
        with self._waits_here():
            self._fabric.linger(LINGER + self._hangs.stopped_limit)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Inside, this rank owes the others its part of a step: there is a limit to how long it may do nothing."""
        started, epoch = self._fabric.now(), self.epoch
        self._enter_call(Call.STEP.at(number))
        self._in_step = True
        self.board.in_step(self.rank, number)
        self._own.in_step(True)
        try:
            yield
            self._stepped = number
            if self._code is not None:
                self._code.publish(first=self.rank == self.members[0])
            self._own.in_step(False)
            if (
                self.epoch == epoch
            ):  # one that somebody was lost in, or waited for in vain, says nothing of the next
                self._hangs.committed(self._fabric.now() - started)
        finally:
            self._in_step = False
            self._leave_call()
            self.board.in_step(self.rank, 0)
            self.board.compute(self.rank, ())

    @contextmanager
    def _announced(self, call: Call) -> Iterator[None]:
        self._enter_call(call.at(self._stepped))
        try:
            yield
        finally:
            self._leave_call()

    def _enter_call(self, call: int) -> None:
        """Calls that end without an agreement (a step that is left early) count between two agreements."""
        before, agreements = self._last_position, self._fabric.agreements
        here = before + 1 if before and agreements_at(before) == agreements else position(agreements, 0)
        self._call, self._last_position, self._in_call = call, here, True
        self._called_at = self._fabric.now()
        self.board.announce(self.rank, call, here)

    def _leave_call(self) -> None:
        """Its name stays: if its agreement has failed, the repair that follows must know where this rank comes from."""
        self._in_call = False
        self.board.announce(self.rank, 0, 0)

    def _refuse_different_calls(self, census: Census) -> None:
        """From the census, and from what the lost have left: so all members raise the same."""
        told = self._told_by_the_lost() if census.lost else ""
        if conflict(census.calls.values()):
            told = explain(census.calls, self.grid)
        if not self._in_call:
            self._call = 0
        if told:
            self.linger()
            self._own.in_step(True)  # all raise it: it is not the fault of this rank alone
            raise CollectiveCallError(told)

    def _told_by_the_lost(self) -> str:
        """Why a rank has ended that could not come to an agreement because of a call that not all made."""
        return next((note.why for note in self.notes.read(LEFT)), "")

    def _die_of_a_call(self, why: str) -> NoReturn:
        """Where nothing can be raised, or nobody would hear of it."""
        kind = CollectiveCallError.__name__
        first, _, _ = why.partition("\n")
        self._own.die(
            End.RAISED,
            f"{kind}: {why}",
            f"{kind}: {first}",
            {"kind": kind, "place": "", "ordinary": True},
        )

    def _look_at_calls(self, now: float) -> None:
        """By the watcher. Another call at the position of this rank's is a mistake that all must learn of: whoever
        waits for data is freed, comes to its next agreement, and the census of the repair has all calls.

        A rank that does not come there, because it waits inside its replica for a rank that is in another call, ends,
        and leaves the reason for the others.
        """
        calls = {rank: call for rank, call in self._calls_beside(now).items() if rank in self.members}
        if calls != self._seen_calls:
            self._seen_calls, self._seen_calls_at = calls, now
            return  # a second look at the same: the first may have come in the middle of an announcement
        if not conflict(calls.values()):
            return
        if self._fabric.lock.acquire(
            blocking=False
        ):  # else this rank is in an agreement, or on its way there
            try:
                self.let_go("replicas are in different collective calls")
            finally:
                self._fabric.lock.release()
        waits_elsewhere = self.board.entered(self.rank) <= agreements_at(self._last_position)
        if waits_elsewhere and now - self._seen_calls_at > CALL_PATIENCE:
            why = explain(calls, self.grid)
            with suppress(Exception):  # a full disk must not keep it here
                self.notes.leave(LEFT, (), why, self.rank)
            self._die_of_a_call(why)

    def _calls_beside(self, now: float) -> dict[int, int]:
        """The calls at this rank's position, by rank: at once those of this host, later those of others."""
        beside = self.board.calls_beside(self.rank)
        if beside and self._rows_told is not None and now - self._called_at > CALLS_ELSEWHERE:
            if now - self._read_rows_at > TOLD_AGAIN:
                self._rows, self._read_rows_at = self._rows_told(), now
            here = self._last_position
            there = {r: row[CALL] for r, row in self._rows.items() if row[CALL] and row[POSITION] == here}
            beside = there | beside
        return beside

    def _coming(self) -> set[int]:
        let_in = self._fabric.participants - frozenset(self.members)
        return {*self.asking, *self.grid.replicas_of(let_in), *self.arrivals, *[self.replica] * self.outside}

    def _reduced(self) -> None:
        """An operation of the cross group has ended well. In a loop that never agrees, this is all the progress."""
        if not self._has_agreed:
            self.board.accomplish(self.rank)

    @contextmanager
    def _waits_here(self) -> Iterator[None]:
        """Around calls of the fabric, in which this rank waits for others.

        A rank that was declared dead ends here. It must not return into the script, which might write files.
        """
        self._waiting += 1
        try:
            yield
        except DeclaredDeadError as error:
            end_declared_dead(self._own, error)
        finally:
            self._waiting -= 1

    def _waits(self) -> bool:
        """Whether this rank waits for others: in an agreement or a repair, or for a reduction."""
        return bool(self._waiting) or self.worker.busy

    def _on_death(self, failed: frozenset[int]) -> None:
        """Called by the watcher, with the fabric's lock held, so never in the middle of a repair."""
        if self._cross is not None and not failed.isdisjoint(self.members):
            self.noticed_at = self.noticed_at or time.time()
            self._cross.break_off()

    def _look_at_links(self, now: float) -> None:
        """Called by the watcher. Whoever is freed comes to the vote, which fails, and a repair follows."""
        cross = self._cross
        if why := self._links.look(cross, self.epoch, bool(self._waiting), now):
            self._own.log(f"gave up a reduction: {why}")
            assert cross is not None
            cross.break_off(why)

    def _look_for_a_dead_mate(self, error: BaseException) -> None:
        """Gloo and NCCL raise when a mate dies. Give the watcher a moment to see it and end this rank as an orphan."""
        deadline = self._fabric.now() + MATE_PATIENCE
        while self.grid.replica_size > 1 and self._fabric.now() < deadline:
            self._fabric.pause(0.01)
            if self._fabric.failed() & self.grid.mates(self.rank):
                self._fabric.pause(MATE_PATIENCE)  # the watcher ends this rank now

    def _close(self) -> None:
        """The closing agreement: nobody leaves before all survivors are through, whoever dies meanwhile."""
        if self.outside:
            return  # it was never one of them, and nobody waits for it
        while self._finish() is None:
            census = self.repair()
            inside = sorted(rank for rank, record in census.records.items() if record)
            if inside and self.rank not in (behind := left_behind(census.records, self.grid.ranks)):
                why = "its script and those of the others have ended after different steps"
                self.repair(evict=behind, reasons=dict.fromkeys(self.grid.replicas_of(behind), why))
            elif inside:
                raise RuntimeError(
                    f"the script has ended on rank {self.rank} after step {self._stepped}, and rank(s) "
                    f"{', '.join(map(str, inside))} are inside a step that waits for it; let all replicas take the "
                    "same steps (`step.stop_agreed` and what else a committed step tells is the same on all)"
                )
        self._watcher.rest()
        with self._waits_here():  # one that hangs here is fenced, or it would be left behind
            self._fabric.linger(LINGER + self._hangs.stopped_limit)

    def _finish(self) -> int | None:
        """What is left to do falls, after a death, to another."""
        for act in self.closing:
            act()
        return self._end()

    def _end(self) -> int | None:
        """One closing agreement. Who waits for this rank inside a step is freed, and comes to it by way of its vote."""
        with self._announced(Call.END), self._waits_here():
            self.board.in_step(self.rank, ENDED)
            peers, mine = set(self.members) - {self.rank}, self.board.entered(self.rank)
            while late := [rank for rank in peers if self.board.on_its_way(rank, mine)]:
                if any(self.board.step(rank) not in (0, self._stepped) for rank in late):
                    self.cross.break_off("the script has ended on a replica")
                self._fabric.pause(0.01)
            with self._freeing_those_elsewhere():
                agreed = self.agree(Call.END.word, Phase.CALL)
        return agreed if agreed == Call.END.word else None

    @contextmanager
    def _freeing_those_elsewhere(self) -> Iterator[None]:
        """The same for ranks of other hosts, on whose boards nobody can look: what is told of them lags, so that they
        must be seen in the same step twice."""
        told, cross, through = self._rows_told, self.cross, threading.Event()

        def look() -> None:
            before = set[tuple[int, int]]()
            while told is not None and not through.wait(TOLD_AGAIN):
                inside = {
                    (rank, row[STEP])
                    for rank, row in told().items()
                    if row[STEP] not in (0, ENDED, self._stepped)
                }
                if any(rank in self.members for rank, _ in before & inside):
                    cross.break_off("the script has ended on a replica")
                before = inside

        if told is not None and not all(map(self.board.is_here, self.members)):
            threading.Thread(target=look, name="recover-end", daemon=True).start()
        try:
            yield
        finally:
            through.set()
