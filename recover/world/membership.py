"""Membership: one agreement over the whole world, and the repair that follows when it fails.

No communicator is made here. Membership is agreed on the original one. A repair is a sequence of
rounds, and a round has these phases: acknowledge the known deaths and agree on the bitmap of living
ranks (members), exchange one row each by messages among those (census), build the carrier of the
new epoch (carrier), and agree that all of it worked (closing). If a phase fails, the next round
begins. Start-up is the first round of a repair. A member whose carrier cannot be made or built says
so in the census; a member that fails in several rounds while no rank dies is excluded.

A rank that asks to join is admitted by the agreement on the bitmap, in a repair that is entered for
that. It takes part from the next agreement on, so the round that admits it is followed by a round
with it.

Every decision that leads a rank into or out of a collective phase comes from an agreement, never
from the local knowledge of the rank: two survivors may know different deaths, but they are never in
different phases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Generic, NoReturn, TypeVar

from recover.job.grid import Grid
from recover.world.carriers.contract import Carrier, Carriers, TookTooLongError, UnreachedError
from recover.world.census import Census, Row, broken_links, pack, unpack
from recover.world.deaths import KnownDeaths
from recover.world.fabrics.base import WORD_BITS as FABRIC_BITS
from recover.world.fabrics.base import Fabric, FabricError, Transfer, WorldLostError
from recover.world.failing_members import FAILURES, Failing, failing_members
from recover.world.rank_exit import UNFIT

TAG_BITS = 5
WORD_BITS = FABRIC_BITS - TAG_BITS
POLL = 0.0002  # seconds between two polls of a message
CENSUS_LIMIT = 30.0  # seconds for messages of a few bytes, between ranks that are all in the census
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 2.0  # seconds from one round to the next over the same members
FRUITLESS = 8  # rounds over the same members, whatever they failed by
# The reason for a rank that was excluded although no rank wanted to evict it: its lease ran out, or
# its connection was lost.
UNSEEN = "the others have counted it as dead"
FENCE_AFTER = 3.0  # seconds after which an excluded rank that still lives is killed


C = TypeVar("C", bound=Carrier)


class Phase(IntEnum):
    """The purpose of an agreement, as a tag in its word. The AND of any two tags is no tag.

    If all ranks that held the result of an agreement die, the survivors decide it again. A rank
    that died after it contributed to the next agreement may then be counted in this one. The AND of
    different tags shows that, and the agreement fails.
    """

    VOTE = 0b00011
    MEMBERS = 0b00101
    CENSUS = 0b01001
    CARRIER = 0b00110
    CLOSING = 0b01010
    CALL = 0b01100
    AGREE = 0b10001


class ExcludedError(Exception):
    """The survivors have agreed to continue without this rank, which must not act any more."""

    def __init__(
        self, rank: int, members: tuple[int, ...], orphan: bool, reason: str, whole: str = ""
    ) -> None:
        """`whole`: the replica of the rank and its other ranks, as part of a sentence."""
        self.orphan = orphan
        why = "lost another rank of its replica" if orphan else f"was evicted: {reason}"
        super().__init__(f"rank {rank}{'' if orphan else whole} {why}; the members are now {list(members)}")


class NoCarrierError(WorldLostError, RuntimeError):
    """The repair fails although no rank dies, and too many replicas fail to continue without them."""


@dataclass(frozen=True)
class Retry:
    """Outcome of a round: it failed, and the next one begins.

    Without `rows`: the members change, no rank has failed.
    """

    why: str = ""
    rows: Mapping[int, Row] | None = None


@dataclass(frozen=True)
class Exclude:
    """Outcome of a round: the census shows ranks that the next round excludes. `reasons`: by replica, for
    broken links."""

    ranks: frozenset[int]
    why: str
    reasons: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """Outcome of a round: the members, their rows, and a carrier that works on all of them."""

    rows: Mapping[int, Row]


@dataclass
class _Repair(Generic[C]):
    """A repair under way, as far as one rank has come with it."""

    record: bytes
    evict: frozenset[int]
    leave: frozenset[int]  # ranks that leave on notice, as far as this rank knows
    admit: bool
    reason: str  # why this rank is in `evict`
    call: int
    mine: Row  # this rank's row of the next census
    members: tuple[int, ...] = ()  # of the last round
    carrier: C | None = None  # of the round under way
    rounds: int = 0
    fruitless: int = 0  # rounds over the same members
    left: frozenset[int] = frozenset()  # ranks that leave on notice, by a census
    unreached: dict[int, str] = field(
        default_factory=dict
    )  # replicas excluded because of broken links, and why


class Membership(Generic[C]):
    """One rank's view of the membership.

    It changes by agreement only, so it is equal on all members.
    """

    def __init__(
        self,
        fabric: Fabric,
        grid: Grid,
        carriers: Carriers[C],
        probe: Callable[[str, object], None],
        report: Callable[[str], None] = lambda text: None,
        joining: bool = False,
    ) -> None:
        self.fabric = fabric
        self.grid = grid
        self.epoch = 0
        self._joining = joining  # this rank has been no member so far
        mine = grid.replica_peers(fabric.rank) | {fabric.rank}
        self.members: tuple[int, ...] = tuple(sorted(mine if joining else range(grid.ranks)))
        self.carrier: C | None = None
        self.deaths = KnownDeaths(fabric)
        self._carriers = carriers
        self._probe = probe
        self._report = report
        self._reason = ""  # why this rank would be excluded, in the repair under way
        self.leaves = False  # this rank leaves on notice, in the repair under way

    def agree(self, word: int, phase: Phase = Phase.VOTE) -> int | None:
        """Return the AND of the members' words, or None after a death: then all members must call
        `repair`.

        None as well if some members vote while others are in another call, or at the end of their
        scripts.
        """
        if not 0 <= word < 1 << WORD_BITS:
            raise ValueError(
                f"an agreement carries {WORD_BITS} bits; {word} does not fit: agree in several calls"
            )
        self._forget_late_notices()
        return self._agree(phase, word)

    def _agree(self, phase: Phase, word: int, admit: frozenset[int] = frozenset()) -> int | None:
        """Run one agreement on `word`.

        None if it failed, or counted a rank that was in another phase.
        """
        agreed = self.fabric.agree(int(word) << TAG_BITS | phase, admit)
        if agreed is None or agreed & (1 << TAG_BITS) - 1 != phase:
            return None
        return agreed >> TAG_BITS

    def repair(
        self,
        record: bytes,
        evict: frozenset[int] = frozenset(),
        admit: bool = False,
        reason: str = "",
        call: int = 0,
        leave: frozenset[int] = frozenset(),
    ) -> Census:
        """Agree on the surviving members, exchange one record each, build the carrier of the next
        epoch.

        All survivors enter after the same failed agreement; a rank that was admitted enters, too.
        Ranks in `evict` are excluded even if they live. They, ranks whose replica lost a rank, and
        ranks whose carriers fail in several rounds, get `ExcludedError`. `admit`: admit ranks that
        all members see asking. `reason`: why this rank is in `evict`. `call`: the collective call
        that this rank is in. `leave`: ranks that leave on notice, in whole replicas, as far as this
        rank knows: the census reports these ranks to all members. They get `ExcludedError`, too.
        """
        started = self.fabric.now()
        repair = _Repair[C](record, evict, leave, admit, reason, call, Row(b"", record))
        while True:
            repair.rounds += 1
            began = self.fabric.now()
            outcome = self._run_round(repair)
            if isinstance(outcome, Done):
                return self._enter_epoch(repair, outcome.rows, started)
            if isinstance(outcome, Exclude):
                self._fail_round(repair, f"ranks {sorted(outcome.ranks)} {outcome.why}, and are excluded")
                repair.evict |= outcome.ranks
                repair.unreached |= outcome.reasons
            elif outcome.rows is not None:
                self._fail_round(repair, outcome.why)
                self._back_off(repair.members, repair.fruitless, outcome.rows, began)

    def _run_round(self, repair: _Repair[C]) -> Retry | Exclude | Done:
        """The phases of one round, in the order in which all members run them.

        Each phase ends with an agreement, so all members return the same kind of outcome.
        """
        if not self._members_phase(repair):
            return Retry()
        rows = self._census_phase(repair)
        if not isinstance(rows, Mapping):
            return rows
        return self._carrier_phase(repair, rows)

    def _members_phase(self, repair: _Repair[C]) -> bool:
        """Agree on the members of this round.

        False after a death, and after others were admitted.
        """
        mine = repair.mine
        if mine.own + mine.built + mine.waited >= FAILURES:
            repair.reason = f"{UNFIT} {FAILURES} rounds of a repair ({mine.trouble})"
        self._reason = repair.unreached.get(self.grid.replica(self.fabric.rank), repair.reason)
        self.leaves = self.fabric.rank in repair.left
        self._probe("repair", "members")
        participants = self.fabric.participants
        members = self._agree_on_members(repair.evict, repair.admit)
        if members is None:
            return False
        if repair.admit and self.fabric.participants - participants:
            # Admitted ranks take part from the next agreement on, and begin with the first phase of
            # a round.
            repair.admit = False
            return False
        if members != repair.members:
            # Failures over other members say nothing about these.
            repair.members, repair.fruitless = members, 0
            repair.mine = self._first_row(repair)
        repair.fruitless += 1
        return True

    def _census_phase(self, repair: _Repair[C]) -> Mapping[int, Row] | Retry | Exclude:
        """Make a carrier, and exchange the rows.

        A rank without a carrier takes part, or the others would wait.
        """
        repair.carrier, repair.mine = self._prepare(repair.members, repair.mine)
        self._probe("repair", "census")
        rows = self._take_census(repair.members, repair.mine)
        if not self._agree(Phase.CENSUS, rows is not None):
            return Retry("the census was not completed everywhere", rows or {self.fabric.rank: repair.mine})
        assert rows is not None
        if leaving := {rank for row in rows.values() for rank in row.leaving}.intersection(rows):
            repair.left |= leaving
            return Exclude(frozenset(leaving), "leave on notice")
        if (failing := self._failing_members(rows)).ranks:
            why = "do not reach others" if failing.reasons else "failed repeatedly"
            return Exclude(failing.ranks, why, failing.reasons)
        if not all(row.can_build for row in rows.values()):
            return Retry("a carrier could not be made everywhere", rows)
        return rows

    def _carrier_phase(self, repair: _Repair[C], rows: Mapping[int, Row]) -> Retry | Done:
        """Build the carrier, and agree that it was built everywhere."""
        assert repair.carrier is not None
        self._probe("repair", "carrier")
        offers = {rank: row.offer for rank, row in rows.items()}
        built, repair.mine = self._build(repair.carrier, offers, repair.members, repair.mine)
        self._probe("repair", "closing")
        if not self._close(built):
            return Retry("the carrier was not built everywhere", {**rows, self.fabric.rank: repair.mine})
        return Done(rows)

    def _enter_epoch(self, repair: _Repair[C], rows: Mapping[int, Row], started: float) -> Census:
        # A joining rank has counted no epochs: the members' count holds.
        self.epoch = max(row.epoch for row in rows.values()) + 1
        self.members, self.carrier = repair.members, repair.carrier
        self._joining = False
        before = {rank for row in rows.values() for rank in row.before}
        gone = before - set(self.members)
        return Census(
            epoch=self.epoch,
            members=self.members,
            lost=tuple(sorted(gone - repair.left)),
            left=tuple(sorted(gone & repair.left)),
            joined=tuple(sorted(set(self.members) - before)),
            records={rank: row.record for rank, row in rows.items()},
            calls={rank: row.call for rank, row in rows.items() if row.call},
            rounds=repair.rounds,
            seconds=self.fabric.now() - started,
            unreached=repair.unreached,
        )

    def _forget_late_notices(self) -> None:
        """Acknowledge late notices of ranks that are excluded already: they must not fail the next
        agreement."""
        if gone := self.fabric.failed() - frozenset(self.members):
            self.fabric.acknowledge(only=gone)

    def _agree_on_members(self, evict: frozenset[int], admit: bool) -> tuple[int, ...] | None:
        """The agreed bitmap, reduced to whole replicas; None if the agreement failed because of a
        further death."""
        self._settle()
        dead = self.fabric.acknowledge()
        everyone = sorted(self.fabric.participants)
        alive: list[int] = []
        for first in range(0, len(everyone), WORD_BITS):
            chunk = everyone[first : first + WORD_BITS]
            word = sum(1 << i for i, rank in enumerate(chunk) if rank not in dead and rank not in evict)
            # An admitted rank begins with the first part of a bitmap, so it is admitted by the last
            # part of this one.
            asking = self.fabric.asking() if admit and chunk[-1] == everyone[-1] else frozenset()
            # The list of a rank may lag; the AND is the same for all, and has no rank that any
            # member misses.
            agreed = self._agree(Phase.MEMBERS, word, asking)
            if agreed is None:
                return None
            alive += [rank for i, rank in enumerate(chunk) if agreed >> i & 1]
        members = self.grid.whole(alive)
        if self.fabric.rank not in members:
            peers = self.grid.replica_peers(self.fabric.rank)
            whole = (
                f", of replica {self.grid.replica(self.fabric.rank)} with rank{'s' if len(peers) > 1 else ''} "
                f"{', '.join(map(str, sorted(peers)))},"
            )
            orphan, reason = self.fabric.rank in alive, self._reason or UNSEEN
            raise ExcludedError(self.fabric.rank, members, orphan, reason, whole if peers else "")
        return members

    def _failing_members(self, rows: Mapping[int, Row]) -> Failing:
        failing = failing_members(rows, self.grid)
        if failing.hopeless:
            self._end(failing.hopeless, rows)
        return failing

    def _back_off(
        self, members: tuple[int, ...], fruitless: int, rows: Mapping[int, Row], began: float
    ) -> None:
        """Pause before another round over the same members, unless the last one, which began at `began`,
        took longer: a failure without a death may pass by itself."""
        passed = self.fabric.now() - began
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 5 ** (fruitless - 1)) - passed
        if pause > 0 and not self._alarmed(members):
            self.fabric.pause(pause)
        if fruitless >= FRUITLESS:
            self._end(f"{fruitless} rounds came to nothing", rows)

    def _end(self, what: str, rows: Mapping[int, Row]) -> NoReturn:
        """Raise NoCarrierError. All members come here after the same agreement."""
        said = [f"ranks {low} and {high} do not reach each other" for low, high in sorted(broken_links(rows))]
        said += [f"rank {rank}: {row.trouble}" for rank, row in sorted(rows.items()) if row.trouble]
        # If this rank left before the others hold the result of that agreement, they would decide
        # it again without it.
        self.fabric.linger(FENCE_AFTER)
        raise NoCarrierError(
            f"the world cannot be repaired: nobody died, and {what}; fix what the ranks report: "
            f"{'; '.join(said) or 'nothing (see their logs)'}"
        )

    def _settle(self) -> None:
        """Wait until no further death is expected, where the carrier cannot stand one while it is
        built."""
        settle = self._carriers.settle
        while settle and self.epoch and not self.deaths.have_settled(settle):
            self.fabric.pause(0.001)

    def _first_row(self, repair: _Repair[C]) -> Row:
        # One member reports the epoch before: a joining rank cannot know it.
        tells = not self._joining and self.fabric.rank == min(set(self.members) & set(repair.members))
        return Row(
            b"",
            repair.record,
            epoch=self.epoch,
            before=self.members if tells else (),
            leaving=tuple(sorted(repair.leave)),
            call=repair.call,
        )

    def _take_census(self, members: tuple[int, ...], mine: Row) -> dict[int, Row] | None:
        """Send all rows to the lowest member, and the table back.

        None if a member died meanwhile.
        """
        if not self._await_excluded_dead(members):
            return None
        # The number of agreements is the same on all members, so as a tag it distinguishes new
        # messages from old ones.
        me, root, tag = self.fabric.rank, members[0], 2 * self.fabric.agreements
        row = mine.to_bytes(me)
        try:
            if me != root:
                self._complete([self.fabric.send(row, root, tag)], members)
                (table,) = self._complete([self.fabric.receive_as_all(root, tag + 1)], members)
            else:
                others = self._complete([self.fabric.receive(m, tag) for m in members[1:]], members)
                table = pack([row, *others])
                self._complete(self.fabric.send_to_all(table, members[1:], tag + 1), members)
        except FabricError as error:
            self._report(f"the census failed here: {error}")
            return None
        return dict(map(Row.from_bytes, unpack(table)))

    def _await_excluded_dead(self, members: tuple[int, ...]) -> bool:
        """Wait until all excluded ranks are dead, and acknowledge their deaths.

        False if a member has died.

        A dead rank cannot act any more. The wait goes on even after a member has died: the next
        agreement would otherwise wait for an excluded rank that lives.
        """
        gone = self.fabric.participants - frozenset(members)
        deadline = self.fabric.now() + FENCE_AFTER
        while gone - self.fabric.failed():
            if self.fabric.now() > deadline:
                for rank in gone - self.fabric.failed():
                    self.fabric.fence(rank)
                deadline += FENCE_AFTER
            self.fabric.pause(0.001)
        self.fabric.acknowledge(only=gone)
        return not self._alarmed(members)

    def _complete(self, transfers: Sequence[Transfer], members: tuple[int, ...]) -> list[bytes]:
        """Wait until all messages have arrived.

        Raises FabricError as soon as a member is known to be dead.
        """
        pending = list(transfers)
        deadline = self.fabric.now() + CENSUS_LIMIT
        while pending := [transfer for transfer in pending if not transfer.done()]:
            if self._alarmed(members):
                raise FabricError("a member died during the census")
            if self.fabric.now() > deadline:  # an error at the other end, without a death
                raise FabricError(f"a message of the census did not come within {CENSUS_LIMIT:g} s")
            self.fabric.pause(POLL)
        return [transfer.data for transfer in transfers]

    def _prepare(self, members: tuple[int, ...], mine: Row) -> tuple[C | None, Row]:
        """Make a carrier for these members, not connected yet.

        None if that failed; the row says so.
        """
        carrier = None
        try:
            carrier = self._carriers.make(members)
            return carrier, replace(mine, offer=carrier.offer(), can_build=True)
        # Errors of any kind are caught: this rank takes part in the census all the same, or the
        # others would wait for it.
        except Exception as error:
            trouble = f"no carrier could be made: {type(error).__name__}: {error}"
            self._report(trouble)
            if carrier is not None:
                carrier.free()
            return None, replace(mine, offer=b"", can_build=False, own=mine.own + 1, trouble=trouble)

    def _fail_round(self, repair: _Repair[C], why: str) -> None:
        """Free the carrier of a failed round and log the reason, since a lasting cause fails round
        after round."""
        self._report(f"repair, after agreement {self.fabric.agreements}: {why}; once more")
        if repair.carrier is not None:
            repair.carrier.free()
            repair.carrier = None

    def _build(
        self, carrier: C, offers: Mapping[int, bytes], members: tuple[int, ...], mine: Row
    ) -> tuple[bool, Row]:
        """Build the carrier: whether that worked, and this rank's row.

        A carrier that failed is not freed here. Peers may have built theirs already; freeing would
        break those, and the census could not tell which rank failed.
        """
        try:
            carrier.build(
                offers, lambda ok: bool(self._agree(Phase.CARRIER, ok)), lambda: self._alarmed(members)
            )
        except Exception as error:
            trouble = f"the carrier failed here: {type(error).__name__}: {error}"
            self._report(trouble)
            if isinstance(error, TookTooLongError):
                return False, replace(mine, waited=mine.waited + 1, trouble=trouble, unreached=())
            unreached = error.ranks if isinstance(error, UnreachedError) else ()
            return False, replace(mine, built=mine.built + 1, trouble=trouble, unreached=unreached)
        return True, mine

    def _close(self, built: bool) -> bool:
        """Agree that the carrier was built everywhere.

        Otherwise one member may continue where another retries.
        """
        return bool(self._agree(Phase.CLOSING, built))

    def _alarmed(self, members: tuple[int, ...]) -> bool:
        return not self.fabric.failed().isdisjoint(members)
