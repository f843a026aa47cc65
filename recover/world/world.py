"""The world as a training step sees it: the living ranks, agreements, repair, and the cross-replica
group."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any, NoReturn

from recover.job.authentication import Authenticator
from recover.job.grid import Grid
from recover.job.spec import JobSpec
from recover.world.calls import LEFT, Call, CollectiveCallError, agreements_at, conflict, explain, position
from recover.world.carriers.base import DataCarrier
from recover.world.carriers.worker import Work
from recover.world.census import Census, is_arrival, left_behind
from recover.world.commands import AGREE, Command, CommandChannel, operation
from recover.world.cross_group import CrossGroup
from recover.world.fabrics.base import DeclaredDeadError, NotAdmittedError, WorldLostError
from recover.world.interfaces import WorldParts
from recover.world.links import Links
from recover.world.liveness.board import CALL, ENDED, POSITION, STEP, can_go_on
from recover.world.membership import ExcludedError, Membership, Phase
from recover.world.rank_exit import End
from recover.world.slot_notes import blamed
from recover.world.watchdog import HangWatchdog
from recover.world.watcher import Watcher, end_declared_dead

LINGER = 5.0  # seconds; longer than a rank that an agreement has forgotten takes to end itself
# Seconds between two reads of the rows of other hosts, which are older than the interval at which
# agents write them.
REMOTE_INTERVAL = 1.0
REMOTE_CALLS_AFTER = 2.0  # seconds in one call after which this rank reads the calls of other hosts
CALL_PATIENCE = 5.0  # seconds for a rank in a wrong call to come to its next agreement
MATE_PATIENCE = 2.0  # seconds; a death is noticed within 60 ms, on busy cores later


class World:
    """All ranks of the job, of which any may die at any moment. Get it from `recover.init()`."""

    def __init__(self, job: JobSpec, grid: Grid, parts: WorldParts) -> None:
        self.job = job
        self.grid = grid
        self.rank = parts.fabric.rank
        self.replica = grid.replica(self.rank)
        self.shard = grid.shard(self.rank)
        self.board = parts.liveness
        self.hooks = parts.hooks
        self.notes = parts.notes
        self.worker = parts.worker
        self.closing: list[Callable[[], object]] = []  # called before the closing agreement
        self.noticed_at: float | None = (
            None  # when this rank noticed the first death that is not repaired yet
        )
        self._fabric, self._own, self._remote_rows = parts.fabric, parts.own, parts.remote_rows
        self._membership: Membership[DataCarrier] = Membership(
            parts.fabric,
            grid,
            parts.carriers,
            lambda *place: self.hooks(*place),
            parts.own.log,
            job.joining,
        )
        self._cross: CrossGroup | None = None
        self.evicted: dict[int, str] = {}  # evicted replicas, and why
        # Replicas in the group that do not hold the state yet, as of the last census, and the commands to them.
        self.arrivals: tuple[int, ...] = ()
        self._commands: CommandChannel | None = None
        # How many `recover.Step` the script has made: only the state of a single one can be handed
        # to a joining rank.
        self.steps_made = 0
        self.hooks.coming = self._coming
        # Failed operations of past epochs, with their buffers. After the closing agreement of a
        # repair no rank is inside them any more; data that were in transit then have arrived once
        # all ranks have been through the next agreement.
        self._given_up: list[Work] = []
        self._drop, self._carriers = parts.drop, parts.carriers
        self._stepped = 0  # the last step that this rank has completed
        self._waiting = 0  # depth of nested calls in which this rank waits for others
        self.has_agreed = False  # this rank has called `agree`
        self._in_step = False
        self._code = parts.code
        self._call = (
            0  # the collective call that this rank is in, or whose agreement failed and awaits a repair
        )
        self._in_call = False
        self._last_position = 0
        self._seen_calls: dict[
            int, int
        ] = {}  # the calls of all ranks at this position, when they last changed
        self._seen_calls_at = self._called_at = self._read_rows_at = 0.0
        self._rows: Mapping[int, Sequence[int]] = {}  # of other hosts, as last read
        self._hangs = HangWatchdog(
            grid, job.hang_limit, lambda step: blamed(parts.notes, step), parts.own.log
        )
        self._links = Links(self.rank, self.board, self.worker, job.link_timeout, parts.remote_rows or dict)
        if parts.carriers.writes_remotely:
            self.board.write_remotely(self.rank)
        self._watcher = Watcher(
            parts,
            grid,
            self._hangs,
            self._membership.deaths,
            self._on_death,
            self._waits,
            self._look_at_links,
            self._look_at_calls,
        )
        parts.watch(self._watcher)
        if job.joining:
            self.last_census = Census(0, self.members, (), {}, 0, 0.0)
        else:
            # Start-up is the first round of a repair.
            self.last_census = self.repair(os.urandom(16))
        if self._code is not None and not job.joining:
            self._code.publish(first=self.rank == self.members[0])
        # A secret of the members, different in every job.
        self.token = job.token or self.last_census.records[self.members[0]].hex()
        parts.own.on_success(self._close)
        parts.own.on_raise(self._await_orphaned)
        self.board.enter_world(self.rank)

    @property
    def outside(self) -> bool:
        """Whether this rank was started to join a running job, and is no member yet."""
        return self._cross is None or self.replica in self.arrivals

    @property
    def members(self) -> tuple[int, ...]:
        """The living ranks that hold the state, as last agreed.

        Before it is admitted, a joining rank sees the ranks of its own replica.
        """
        if not self.arrivals:
            return self._membership.members
        return tuple(
            rank for rank in self._membership.members if self.grid.replica(rank) not in self.arrivals
        )

    @property
    def takers(self) -> tuple[int, ...]:
        """The ranks of this rank's cross-replica group that do not hold the state yet."""
        return tuple(rank for rank in self.cross.peers if self.grid.replica(rank) in self.arrivals)

    @property
    def coordinator(self) -> int:
        """The rank of this rank's cross-replica group that sends commands to joining ranks: the
        lowest one that holds the state."""
        return min(rank for rank in self.cross.peers if self.grid.replica(rank) not in self.arrivals)

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
        """The bitwise AND of all members' words, the same on all survivors.

        This is the only commit point.

        None after a death: then every survivor gets None, and must call `repair`. Outside of a step
        and of other collective calls, this is a collective call: `repair` raises
        CollectiveCallError if not all replicas made it.
        """
        if phase is None and not self._in_call:
            with self._announced(Call.AGREE):
                return self.agree(word, Phase.AGREE)
        phase = phase or Phase.VOTE
        with self._waits_here():
            self.tell({"do": AGREE, "phase": phase})
            self.cross.drain()
            with self._fabric.lock:
                agreed = self._membership.agree(word, phase)
        if agreed is None and self.noticed_at is None:
            self.noticed_at = time.time()
        if agreed is not None:
            self._drop(self._given_up)
            self._given_up = []
        self.has_agreed = True
        if agreed and agreed == word and not self._in_step:
            self.board.accomplish(self.rank)  # inside a step only the commit counts as progress
        return agreed

    def tell(self, command: Command) -> bool:
        """Send a command to the joining ranks of this rank's group, if there are any and this rank
        is their coordinator. Returns whether that is so. An error breaks the group, and shows at
        the next agreement."""
        if not self.arrivals or self._commands is None or self.rank != self.coordinator:
            return False
        self._commands.tell(command)
        return True

    def listen(self) -> Command | None:
        """For a joining rank in the group: wait for a command. None if this rank must go to a repair."""
        return None if self._commands is None else self._commands.listen()

    def agree_as_told(self, command: Command, word: int) -> int | None:
        """For a joining rank: take part in an agreement of the members. If it ends the job, this rank
        is not needed any more, and ends."""
        phase = Phase(command["phase"])
        agreed = self.agree(word, phase)
        if phase is Phase.CALL and agreed == Call.END.word:
            self._own.die(End.UNNEEDED, "the job has come to its end before this rank held the state")
        return agreed

    def complete_arrivals(self) -> None:
        """The members have agreed that the joining ranks hold the state: make these ranks members."""
        if self.outside:
            self.board.hold_state(self.rank)
        self.arrivals = ()

    def _announce(self, name: str, data: Any = None, root: int = 0) -> None:
        """Announce an operation of the group. Inside a step, joining ranks know it from the attempt."""
        if self.arrivals and not self._in_step:
            self.tell(operation(name, data, root))

    @property
    def asking(self) -> tuple[int, ...]:
        """The replicas that this rank sees asking to join.

        Other ranks may see them earlier or later.
        """
        return self.grid.replicas_of(self._fabric.asking())

    @contextmanager
    def call(
        self, call: Call, lost: Callable[[tuple[int, ...], float], object] = lambda *_: None
    ) -> Iterator[None]:
        """Make a collective call of the API. The body runs once all replicas have come to the same call.

        Raises CollectiveCallError on all replicas if some are in another call. `lost` is called
        with the ranks that died meanwhile, and the seconds of the repair. Inside another collective
        call this does nothing.
        """
        if self._in_call or self.outside:
            yield
            return
        with self._announced(call):
            while self.agree(call.word, Phase.CALL) != call.word:
                census = self.repair()
                lost(census.lost, census.seconds)
            yield

    def warm_up(self) -> None:
        """For a joining rank, before it asks: prepare what would take time in the repair that admits it."""
        self._carriers.warm_up()

    def join(self, record: bytes) -> Census:
        """Ask the members to admit this rank, and wait for it without a limit.

        Members admit whole replicas, in a repair that this rank then completes with them. `record`:
        this rank's record in its census.
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
        leave: frozenset[int] = frozenset(),
    ) -> Census:
        """Agree on the surviving members and exchange one record each.

        Afterwards `cross` is a new group.

        A rank that is excluded (its replica lost a rank, or it is in `evict`) does not return: it
        ends in a way that the others notice. `admit`: admit ranks that all members see asking.
        `reasons`: why replicas in `evict` are evicted, for all logs. `leave`: ranks that leave on
        notice, in whole replicas, as far as this rank knows: they end as if their scripts had
        succeeded. Raises CollectiveCallError on all members if they come from different collective
        calls.
        """
        self.evicted |= reasons
        for replica, why in reasons.items():
            self._own.log(f"{self._replica_name(replica)} is evicted: {why}")
        for replica in self.grid.replicas_of(leave):
            self._own.log(f"{self._replica_name(replica)} leaves on notice")
        before = [self._cross]
        if self._cross is not None:
            if admit:
                self._cross.retire()  # between two steps, so no operation is under way
            else:
                self._cross.abort_operations()
            self._cross.drain()
            self.board.repair(self.rank)
        with self._waits_here(), self._fabric.lock:
            try:
                census = self._membership.repair(
                    record,
                    evict,
                    admit,
                    reasons.get(self.replica, ""),
                    self._call,
                    leave,
                )
            except (ExcludedError, DeclaredDeadError) as excluded:
                # DeclaredDeadError: another rank of this replica left first, and this rank counts
                # as dead with it.
                if self._membership.leaves:
                    self._own.leave(
                        "before it held the state" if self.outside else f"after step {self._stepped}"
                    )
                if isinstance(excluded, DeclaredDeadError):
                    raise
                if excluded.orphan and (note := self._note_of_a_lost_rank()):
                    self._die_of_different_calls(note)
                how = End.ORPHAN if excluded.orphan else End.EXCLUDED
                self._own.die(how, str(excluded))
            assert self._membership.carrier is not None
            self._cross = CrossGroup(self._membership.carrier, self.worker, self._reduced, self._announce)
        if before[0] is not None:
            before[0].abort_operations()
        self._drop(before)
        self._take_in(census)
        self._given_up += self.worker.take_failed()
        self.last_census = census
        self.noticed_at = None
        self._refuse_different_calls(census)
        return census

    def _take_in(self, census: Census) -> None:
        """Learn from the census which replicas of the new group do not hold the state."""
        came = [rank for rank, record in census.records.items() if is_arrival(record)]
        self.arrivals, self._commands = self.grid.replicas_of(came), None
        if self.takers and len(self.takers) < len(self.cross.peers):
            authenticator = Authenticator(self.token, "commands")
            self._commands = CommandChannel(
                self.cross, self.coordinator, self.takers, authenticator, census.epoch
            )

    def _replica_name(self, replica: int) -> str:
        """The name of a replica for the log: with its ranks, if it has several."""
        size = self.grid.replica_size
        first, last = replica * size, replica * size + size - 1
        return f"rank {first}" if size == 1 else f"replica {replica} (ranks {first}-{last})"

    def abort_collectives(self, why: str) -> None:
        """Abort the collectives under way, so that this rank comes to its next agreement.

        Any thread may call this.
        """
        if self._cross is not None:
            self._cross.abort_operations(why)

    def stop_watching(self) -> None:
        """Stop reacting to deaths.

        The world is lost and all ranks end: a rank that saves its state must not end early.
        """
        self._watcher.ignore_deaths()

    def linger(self) -> None:
        """Wait until the others hold the result of the last agreement, before this rank ends
        because of it.

        Otherwise it could die while others have not received that result; they would decide the
        agreement again, without it. A rank that was forgotten ends itself only when no rank is
        silent, since a stopped rank is fenced first: hence the stopped limit is added.
        """
        with self._waits_here():
            self._fabric.linger(LINGER + self._hangs.stopped_limit)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Mark a step: inside, the others wait for this rank, so the hang limit applies to it."""
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
            # The duration of a step with a repair says nothing about the next one.
            if self.epoch == epoch:
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
        """Announce a call and its position.

        Calls that end without an agreement are numbered between two agreements.
        """
        before, agreements = self._last_position, self._fabric.agreements
        here = before + 1 if before and agreements_at(before) == agreements else position(agreements, 0)
        self._call, self._last_position, self._in_call = call, here, True
        self._called_at = self._fabric.now()
        self.board.announce(self.rank, call, here)

    def _leave_call(self) -> None:
        """End the announcement.

        `_call` stays: if its agreement failed, the census of the repair reports it.
        """
        self._in_call = False
        self.board.announce(self.rank, 0, 0)

    def _refuse_different_calls(self, census: Census) -> None:
        """Judge from the census, and from notes of lost ranks: so all members raise the same error."""
        error = self._note_of_a_lost_rank() if census.lost else ""
        if conflict(census.calls.values()):
            error = explain(census.calls, self.grid)
        if not self._in_call:
            self._call = 0
        if error:
            self.linger()
            self._own.in_step(True)  # all members raise it: it is not the fault of this rank alone
            raise CollectiveCallError(error)

    def _note_of_a_lost_rank(self) -> str:
        """The note of a rank that ended because it could not come to an agreement: not all replicas
        made its call."""
        return next((note.why for note in self.notes.read(LEFT)), "")

    def _die_of_different_calls(self, why: str) -> NoReturn:
        """End this rank with a CollectiveCallError, where it cannot be raised in the main thread."""
        kind = CollectiveCallError.__name__
        first, _, _ = why.partition("\n")
        self._own.die(
            End.RAISED,
            f"{kind}: {why}",
            f"{kind}: {first}",
            {"kind": kind, "place": "", "ordinary": True},
        )

    def _look_at_calls(self, now: float) -> None:
        """Called by the watcher.

        Find ranks that are in another call at the position of this rank's call.

        All members must learn of that mistake: ranks that wait for data are woken, come to their
        next agreement, and the census of the repair has all calls. A rank that cannot come there,
        because it waits inside its replica for a rank in another call, ends and leaves a note with
        the reason.
        """
        calls = {rank: call for rank, call in self._calls_at_position(now).items() if rank in self.members}
        if calls != self._seen_calls:
            self._seen_calls, self._seen_calls_at = calls, now
            return  # compare again: this read may have hit the middle of an announcement
        if not conflict(calls.values()):
            return
        # If the lock is taken, this rank is in an agreement, or about to enter one.
        if self._fabric.lock.acquire(blocking=False):
            try:
                self.abort_collectives("replicas are in different collective calls")
            finally:
                self._fabric.lock.release()
        waits_elsewhere = self.board.entered(self.rank) <= agreements_at(self._last_position)
        if waits_elsewhere and now - self._seen_calls_at > CALL_PATIENCE:
            why = explain(calls, self.grid)
            with suppress(Exception):  # a full disk must not keep this rank alive
                self.notes.leave(LEFT, (), why, self.rank)
            self._die_of_different_calls(why)

    def _calls_at_position(self, now: float) -> dict[int, int]:
        """The calls at this rank's position, by rank: of this host at once, of other hosts after a
        while."""
        calls = self.board.calls_beside(self.rank)
        if calls and self._remote_rows is not None and now - self._called_at > REMOTE_CALLS_AFTER:
            if now - self._read_rows_at > REMOTE_INTERVAL:
                self._rows, self._read_rows_at = self._remote_rows(), now
            here = self._last_position
            remote = {r: row[CALL] for r, row in self._rows.items() if row[CALL] and row[POSITION] == here}
            calls = remote | calls
        return calls

    def _coming(self) -> set[int]:
        let_in = self._fabric.participants - frozenset(self._membership.members)
        return {*self.asking, *self.grid.replicas_of(let_in), *self.arrivals, *[self.replica] * self.outside}

    def _reduced(self) -> None:
        """An operation of the cross group has succeeded.

        In a loop that never agrees, only this shows progress.
        """
        if not self.has_agreed:
            self.board.accomplish(self.rank)

    @contextmanager
    def _waits_here(self) -> Iterator[None]:
        """Around calls of the fabric, in which this rank waits for others.

        A rank that was declared dead ends here. It must not return into the script, which might
        write files.
        """
        self._waiting += 1
        try:
            yield
        except DeclaredDeadError as error:
            end_declared_dead(self._own, error)
        except WorldLostError:
            # Etcd may have stopped answering a rank that was declared dead meanwhile. Such a rank must
            # not take the world for lost, or it would save a state that the others have left behind.
            try:
                self._fabric.failed()
            except DeclaredDeadError as error:
                end_declared_dead(self._own, error)
            raise
        finally:
            self._waiting -= 1

    def _waits(self) -> bool:
        """Whether this rank waits for others, in an agreement, a repair or a reduction, and may end those
        that hang.

        A joining rank may not while no replica of this host runs that holds the state: it could end the last
        one, which may only be stopped for a while. Its agent knows of all hosts (`HangDetector`).
        """
        waits = bool(self._waiting) or self.worker.busy
        return waits and (not self.outside or can_go_on(self.board.living(), self.grid))

    def _on_death(self, failed: frozenset[int]) -> None:
        """Abort the collectives because members have died, and remember when.

        Called by the watcher, which holds the fabric's lock, so never in the middle of a repair.
        """
        if self._cross is not None and not failed.isdisjoint(self._membership.members):
            self.noticed_at = self.noticed_at or time.time()
            self._cross.abort_operations()

    def _look_at_links(self, now: float) -> None:
        """Abort the collectives if a link of the group is broken. Called by the watcher.

        Ranks that are woken come to the vote, which fails, and a repair follows.
        """
        cross = self._cross
        if why := self._links.look(cross, self.epoch, bool(self._waiting), now):
            self._own.log(f"gave up a reduction: {why}")
            assert cross is not None
            cross.abort_operations(why)

    def _await_orphaned(self, error: BaseException) -> None:
        """Wait for the watcher to end this rank as an orphan, before it dies of `error`.

        Gloo and NCCL raise when a rank of this replica dies.
        """
        deadline = self._fabric.now() + MATE_PATIENCE
        while self.grid.replica_size > 1 and self._fabric.now() < deadline:
            self._fabric.pause(0.01)
            try:
                lost = self._fabric.failed() & self.grid.replica_peers(self.rank)
            except DeclaredDeadError as declared:
                # An orphan that ended as if it had raised would put the blame on its slot.
                end_declared_dead(self._own, declared)
            if lost:
                self._fabric.pause(MATE_PATIENCE)  # the watcher ends this rank meanwhile

    def _close(self) -> None:
        """Run the closing agreement: no rank leaves before all survivors have ended their scripts,
        also if ranks die meanwhile."""
        if self.outside:
            return  # this rank was never a member, and no rank waits for it
        while self._finish() is None:
            census = self.repair()
            inside = sorted(
                rank for rank, record in census.records.items() if record and not is_arrival(record)
            )
            if inside and self.rank not in (behind := left_behind(census.records, self.grid.ranks)):
                why = "its script and those of the others have ended after different steps"
                self.repair(evict=behind, reasons=dict.fromkeys(self.grid.replicas_of(behind), why))
            elif inside:
                raise RuntimeError(
                    f"the script has ended on rank {self.rank} after step {self._stepped}, and rank(s) "
                    f"{', '.join(map(str, inside))} are inside a step that waits for it; let all replicas take the "
                    "same steps (`step.stop_agreed` and what else a committed step tells is the same on all)"
                )
        self._watcher.ignore_deaths()
        with self._waits_here():  # a rank that hangs here is fenced, or it would be left running
            self._fabric.linger(LINGER + self._hangs.stopped_limit)

    def _finish(self) -> int | None:
        """Run the closing actions, which after a death fall to another rank, then the closing
        agreement."""
        for act in self.closing:
            act()
        return self._end()

    def _end(self) -> int | None:
        """Run one closing agreement.

        Ranks that wait for this one inside a step are woken, and come to it by their vote.
        """
        with self._announced(Call.END), self._waits_here():
            self.board.in_step(self.rank, ENDED)
            peers, mine = set(self.members) - {self.rank}, self.board.entered(self.rank)
            while late := [rank for rank in peers if self.board.on_its_way(rank, mine)]:
                if any(self.board.step(rank) not in (0, self._stepped) for rank in late):
                    self.cross.abort_operations("the script has ended on a replica")
                self._fabric.pause(0.01)
            with self._waking_other_hosts():
                agreed = self.agree(Call.END.word, Phase.CALL)
        return agreed if agreed == Call.END.word else None

    @contextmanager
    def _waking_other_hosts(self) -> Iterator[None]:
        """Wake ranks of other hosts that wait for this rank inside a step.

        Their rows lag, so a rank must be seen in the same step twice.
        """
        rows, cross, through = self._remote_rows, self.cross, threading.Event()

        def look() -> None:
            before = set[tuple[int, int]]()
            while rows is not None and not through.wait(REMOTE_INTERVAL):
                inside = {
                    (rank, row[STEP])
                    for rank, row in rows().items()
                    if row[STEP] not in (0, ENDED, self._stepped)
                }
                if any(rank in self.members for rank, _ in before & inside):
                    cross.abort_operations("the script has ended on a replica")
                before = inside

        if rows is not None and not all(map(self.board.is_here, self.members)):
            threading.Thread(target=look, name="recover-end", daemon=True).start()
        try:
            yield
        finally:
            through.set()
