"""Who is left: one agreement over the whole world, and the repair that follows when it fails.

No communicator is made here. Membership is agreed on the original one: acknowledge the known deaths, agree on
the bitmap of who is alive, take the census by messages among those, build the carrier of the new epoch, and
agree that all of it worked; if not, again. Start-up is the first pass of this loop. A member whose carrier cannot be
made or built says so in the census; one that fails again and again, while nobody dies, is left out by the others.

Whoever asks to join is admitted by such a bitmap's agreement, in a repair that is entered for that. From the next
agreement on it takes part like all others: the round is begun anew with it.

Every decision that leads a rank into or out of a collective phase comes from an agreement, never from what the
rank knows by itself: two survivors may know different things, but they are never in different phases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Generic, NoReturn, TypeVar

from recover.job.grid import Grid
from recover.world.carriers.contract import Carrier, Carriers, TookTooLongError, UnreachedError
from recover.world.census import Census, Row, broken_links, pack, unpack
from recover.world.fabrics.base import WORD_BITS as FABRIC_BITS
from recover.world.fabrics.base import Fabric, FabricError, Transfer, WorldLostError
from recover.world.rank_exit import UNFIT

TAG_BITS = 5
WORD_BITS = FABRIC_BITS - TAG_BITS
POLL = 0.0002  # seconds between two looks at a message under way
CENSUS_LIMIT = 30.0  # seconds; messages of a few bytes, between ranks that are all in the census
FAILURES = 3  # of one member, over the same members: then the others go on without it
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 2.0  # seconds between such rounds
FRUITLESS = 8  # rounds over the same members, whatever they failed by
UNSEEN = "the others have counted it as dead"  # a lease that ran out, a connection that was lost
FENCE_AFTER = 3.0  # an excluded rank that is not dead by then is killed by its host's peers


class Phase(IntEnum):
    """What an agreement is about, as a tag in its word: of any two of them the AND is none of them.

    If all who held the result of an agreement die, the survivors decide it anew, while a contribution that a dead one
    made to the next agreement may still be counted in. The tags tell: such an agreement has failed.
    """

    VOTE = 0b00011
    MEMBERS = 0b00101
    CENSUS = 0b01001
    CARRIER = 0b00110
    CLOSING = 0b01010
    CALL = 0b01100
    AGREE = 0b10001


C = TypeVar("C", bound=Carrier)


class ExcludedError(Exception):
    """The survivors have agreed to go on without this rank, which must not act any more."""

    def __init__(
        self, rank: int, members: tuple[int, ...], orphan: bool, reason: str, whole: str = ""
    ) -> None:
        """`whole`: the replica that the rank belongs to, with its other ranks."""
        self.orphan = orphan
        why = "lost a mate of its replica" if orphan else f"was evicted: {reason}"
        super().__init__(f"rank {rank}{'' if orphan else whole} {why}; the members are now {list(members)}")


class NoCarrierError(WorldLostError, RuntimeError):
    """Nobody dies, and still the repair comes to nothing; too many are at fault to go on without them."""


class Membership(Generic[C]):
    """One rank's view of the membership, equal on all members because it changes by agreement only."""

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
        self._joining = joining  # it is no member yet, and nothing was before
        mine = grid.mates(fabric.rank) | {fabric.rank}
        self.members: tuple[int, ...] = tuple(sorted(mine if joining else range(grid.ranks)))
        self.carrier: C | None = None
        self._carriers = carriers
        self._probe = probe
        self._report = report
        self._reason = ""  # why the others would go on without this rank, in the repair under way

    def agree(self, word: int, phase: Phase = Phase.VOTE) -> int | None:
        """The AND of the members' words, or None if somebody has died: then everyone must call `repair`.

        None as well if some vote while others are in another call, or at the end of their scripts.
        """
        if not 0 <= word < 1 << WORD_BITS:
            raise ValueError(
                f"an agreement carries {WORD_BITS} bits; {word} does not fit: agree in several calls"
            )
        self._forget_late_notices()
        return self._agree(phase, word)

    def _agree(self, phase: Phase, word: int, admit: frozenset[int] = frozenset()) -> int | None:
        """One agreement on `word`; None if it failed, or if not everyone counted in was in this phase."""
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
    ) -> Census:
        """Agree on who is left, exchange one record each, build the carrier of the next epoch.

        Entered by all survivors after the same failed agreement. Ranks in `evict` are left out even if they
        live; they, those who lost a mate, and those whose carriers fail again and again, get `ExcludedError`.
        `admit`: whoever all members see asking is admitted, too. One that has been enters here, too. `reason`: why this
        rank is in `evict`. `call`: the collective call that this rank is in.
        """
        started, rounds = self.fabric.now(), 0
        last, mine, fruitless = tuple[int, ...](), Row(b"", record), 0
        while True:
            rounds += 1
            if mine.own + mine.built + mine.waited >= FAILURES:
                reason = f"{UNFIT} {FAILURES} rounds of a repair ({mine.trouble})"
            self._reason = reason
            self._probe("repair", "members")
            participants = self.fabric.participants
            members = self._agree_on_members(evict, admit)
            if members is None:
                continue
            if admit and self.fabric.participants - participants:
                admit = False  # those who are admitted take part from here on: once more, with them
                continue
            if members != last:
                last, mine, fruitless = members, self._first_row(members, record, call), 0
            fruitless += 1
            carrier, mine = self._prepare(members, mine)
            self._probe("repair", "census")
            rows = self._take_census(members, mine)
            if not self._agree(Phase.CENSUS, rows is not None):
                self._give_up(carrier, "the census was not completed everywhere")
                self._think_again(members, fruitless, rows or {self.fabric.rank: mine})
                continue
            assert rows is not None
            if sick := self._sick(rows):
                self._give_up(carrier, f"ranks {sorted(sick)} failed again and again, and are left out")
                evict |= sick
                continue
            if carrier is None or not all(row.can_build for row in rows.values()):
                self._give_up(carrier, "a carrier could not be made everywhere")
                self._think_again(members, fruitless, rows)
                continue
            self._probe("repair", "carrier")
            offers = {rank: row.offer for rank, row in rows.items()}
            built, mine = self._build(carrier, offers, members, mine)
            self._probe("repair", "closing")
            if not self._close(built):
                self._give_up(carrier, "the carrier was not built everywhere")
                self._think_again(members, fruitless, rows | {self.fabric.rank: mine})
                continue
            self.epoch = max(row.epoch for row in rows.values()) + 1
            self.members, self.carrier = members, carrier
            self._joining = False
            before = {rank for row in rows.values() for rank in row.before}
            return Census(
                epoch=self.epoch,
                members=members,
                lost=tuple(sorted(before - set(members))),
                joined=tuple(sorted(set(members) - before)),
                records={rank: row.record for rank, row in rows.items()},
                calls={rank: row.call for rank, row in rows.items() if row.call},
                rounds=rounds,
                seconds=self.fabric.now() - started,
            )

    def _forget_late_notices(self) -> None:
        """A late notice of a rank that is already excluded must not fail the next agreement."""
        if gone := self.fabric.failed() - frozenset(self.members):
            self.fabric.acknowledge(only=gone)

    def _agree_on_members(self, evict: frozenset[int], admit: bool) -> tuple[int, ...] | None:
        """One try. The agreed bitmap, cut down to whole replicas; None if a further death got in the way."""
        self._settle()
        dead = self.fabric.acknowledge()
        everyone = sorted(self.fabric.participants)
        alive: list[int] = []
        for first in range(0, len(everyone), WORD_BITS):
            chunk = everyone[first : first + WORD_BITS]
            word = sum(1 << i for i, rank in enumerate(chunk) if rank not in dead and rank not in evict)
            # Whoever is admitted must find the others at the beginning of a round: so by the last part of this one.
            asking = self.fabric.asking() if admit and chunk[-1] == everyone[-1] else frozenset()
            # Each rank's own list may lag; the AND is the same for all, and holds no rank that anybody misses.
            agreed = self._agree(Phase.MEMBERS, word, asking)
            if agreed is None:
                return None
            alive += [rank for i, rank in enumerate(chunk) if agreed >> i & 1]
        members = self.grid.whole(alive)
        if self.fabric.rank not in members:
            mates = self.grid.mates(self.fabric.rank)
            whole = (
                f", of replica {self.grid.replica(self.fabric.rank)} with rank{'s' if len(mates) > 1 else ''} "
                f"{', '.join(map(str, sorted(mates)))},"
            )
            orphan, reason = self.fabric.rank in alive, self._reason or UNSEEN
            raise ExcludedError(self.fabric.rank, members, orphan, reason, whole if mates else "")
        return members

    def _sick(self, rows: Mapping[int, Row]) -> frozenset[int]:
        """Who has failed again and again while nobody died. From the census: the same on all members.

        Who says that it cannot make a carrier is as good as dead, however many say so. Where one cannot be built, both
        ends of a connection fail, and the fault may be neither's: the worst are left out, but never the many. Those who
        were to join are, before any member: it went without them. Where one replica is an end of all broken links, the
        others reach each other, and go on without that one.
        """
        cannot = frozenset(rank for rank, row in rows.items() if row.own >= FAILURES)
        if cannot:
            if not self.grid.whole(rows.keys() - cannot):
                self._end(f"no replica could make a carrier in {FAILURES} rounds", rows)
            return cannot
        failures = {rank: row.own + row.built for rank, row in rows.items()}
        worst = max(failures.values())
        newcomers = frozenset(rank for rank, row in rows.items() if not row.epoch)
        if newcomers == rows.keys():
            newcomers = frozenset()
        if worst < FAILURES:
            return newcomers if max(row.waited for row in rows.values()) >= FAILURES else frozenset()
        sick = frozenset(rank for rank, count in failures.items() if count == worst)
        if sick & newcomers:
            return sick & newcomers
        if (alone := self._cut_off(rows)) is not None:
            return frozenset(rank for rank in rows if self.grid.replica(rank) == alone)
        if 2 * len(self.grid.replicas_of(sick)) >= len(self.grid.replicas_of(rows)):
            if newcomers:
                return newcomers
            self._end(f"half of the replicas or more failed in {FAILURES} rounds", rows)
        return sick

    def _cut_off(self, rows: Mapping[int, Row]) -> int | None:
        """The replica without which no link between replicas is broken; of several the one with the highest number."""
        pairs = {self.grid.replicas_of(pair) for pair in broken_links(rows)}
        ends = [frozenset(pair) for pair in pairs if len(pair) == 2]
        return max(frozenset[int].intersection(*ends), default=None) if ends else None

    def _think_again(self, members: tuple[int, ...], fruitless: int, rows: Mapping[int, Row]) -> None:
        """Another round over the same members: what has failed without a death gets a moment to pass by itself."""
        if not self._alarmed(members):
            self.fabric.pause(min(LONGEST_PAUSE, FIRST_PAUSE * 5 ** (fruitless - 1)))
        if fruitless >= FRUITLESS:
            self._end(f"{fruitless} rounds came to nothing", rows)

    def _end(self, what: str, rows: Mapping[int, Row]) -> NoReturn:
        """All members come here after the same agreement; who leaves before the others hold its result undoes it."""
        said = [f"ranks {low} and {high} do not reach each other" for low, high in sorted(broken_links(rows))]
        said += [f"rank {rank}: {row.trouble}" for rank, row in sorted(rows.items()) if row.trouble]
        self.fabric.linger(FENCE_AFTER)
        raise NoCarrierError(
            f"the world cannot be repaired: nobody died, and {what}; mend what the ranks say: "
            f"{'; '.join(said) or 'nothing (their logs may tell)'}"
        )

    def _settle(self) -> None:
        """Wait until notices of deaths have stopped coming, where the carrier cannot stand one while it is built."""
        since, known = self.fabric.now(), self.fabric.failed()
        while self.epoch and self.fabric.now() - since < self._carriers.settle:
            self.fabric.pause(0.001)
            if (failed := self.fabric.failed()) != known:
                since, known = self.fabric.now(), failed

    def _first_row(self, members: tuple[int, ...], record: bytes, call: int) -> Row:
        tells = not self._joining and self.fabric.rank == min(set(self.members) & set(members))
        return Row(b"", record, epoch=self.epoch, before=self.members if tells else (), call=call)

    def _take_census(self, members: tuple[int, ...], mine: Row) -> dict[int, Row] | None:
        """Everyone's row to the lowest member, and the whole table back. None if a member died meanwhile."""
        if not self._see_off_the_excluded(members):
            return None
        # All have been through the same agreements, so their number tells old messages from new.
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

    def _see_off_the_excluded(self, members: tuple[int, ...]) -> bool:
        """Wait until all who were left out are dead, so that none of them can act any more, and acknowledge it.

        Whatever else happens meanwhile: the next agreement would wait for one that lives. False if a member has died.
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
        """Drive messages to their end; give up as soon as a member is known dead."""
        pending = list(transfers)
        deadline = self.fabric.now() + CENSUS_LIMIT
        while pending := [transfer for transfer in pending if not transfer.done()]:
            if self._alarmed(members):
                raise FabricError("a member died during the census")
            if self.fabric.now() > deadline:  # an error without a death, at the other end
                raise FabricError(f"a message of the census did not come within {CENSUS_LIMIT:g} s")
            self.fabric.pause(POLL)
        return [transfer.data for transfer in transfers]

    def _prepare(self, members: tuple[int, ...], mine: Row) -> tuple[C | None, Row]:
        """A carrier for these members, not connected yet, and what to say of it. None if it could not be made here."""
        carrier = None
        try:
            carrier = self._carriers.make(members)
            return carrier, replace(mine, offer=carrier.offer(), can_build=True)
        except (
            Exception
        ) as error:  # whatever it is: this rank still takes part, or the others would wait for it
            trouble = f"no carrier could be made: {type(error).__name__}: {error}"
            self._report(trouble)
            if carrier is not None:
                carrier.free()
            return None, replace(mine, offer=b"", can_build=False, own=mine.own + 1, trouble=trouble)

    def _give_up(self, carrier: C | None, why: str) -> None:
        """This round came to nothing; say so, since a cause that stays would lead to round after round."""
        self._report(f"repair, after agreement {self.fabric.agreements}: {why}; once more")
        if carrier is not None:
            carrier.free()

    def _build(
        self, carrier: C, offers: Mapping[int, bytes], members: tuple[int, ...], mine: Row
    ) -> tuple[bool, Row]:
        """Whether it went well, and what to say of it. The carrier is not freed here: others may be through with it,
        and would be hit by that, so that nobody could tell whose fault it was."""
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
        """Whether all of it worked everywhere. Without this, one member may go on where another starts again."""
        return bool(self._agree(Phase.CLOSING, built))

    def _alarmed(self, members: tuple[int, ...]) -> bool:
        return not self.fabric.failed().isdisjoint(members)
