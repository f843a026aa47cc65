"""Votes and censuses on one rank: the other ranks are scripted, so that rare records can be tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from recover.gradients.exponents import HEADROOM, NOT_FINITE, Exponents
from recover.gradients.ledger import LedgerError
from recover.gradients.module_gradients import OwnedGradients
from recover.gradients.reduction import make_sum
from recover.gradients.replica_interface import PLAIN
from recover.gradients.running_buffers import RunningBuffers
from recover.job.grid import Grid
from recover.policy import PolicyDecision, RestoreMode, Role, Share, SlotSet, get_policy
from recover.step.difference import UNKNOWN
from recover.step.errors import StateDivergedError
from recover.step.record import Record
from recover.step.totals import SAMPLES
from recover.step.transaction import FRUITLESS, Transaction
from recover.step.vote import VoteWord
from recover.world.census import Census, left_behind
from recover.world.hooks import NoHooks

Reply = Callable[[Record], Record | None]  # from this rank's record to another rank's; None: it has died


class Cross:
    """Reductions with other replicas that have equal sums, but other samples; or reductions that fail."""

    ends_cleanly = True

    def __init__(self, world: World) -> None:
        self._world = world

    def all_reduce(self, source: Any, out: Any = None) -> SimpleNamespace:
        target = source if out is None else out
        target[:] = source * len(self._world.replicas)
        if len(source) > SAMPLES + 2 * self._world.grid.replicas:  # the totals, with a sample of each
            for slot in range(self._world.brought):
                target[SAMPLES + slot] = slot + 1
        return SimpleNamespace(ok=self._world.carries, refused=False, behind=lambda: None)

    def all_max(self, row: Any) -> SimpleNamespace:
        """Take the maximum with the others' row: the codes of their largest values (loss, weight, bias), the digest of
        their exponents, and the negated digest."""
        theirs = self._world.others_digest or row[-4:-2].tolist()
        negated = [-part for part in theirs]
        row[:] = np.maximum(row, [*self._world.others_maxima, *theirs, *negated])
        return SimpleNamespace(ok=self._world.carries_maxima, refused=False, behind=lambda: None)

    def drain(self) -> None:
        pass


class World:
    """Rank 0 of a grid whose other ranks vote and answer as the test says."""

    def __init__(self, grid: Grid, replies: dict[int, Reply], agreed: Sequence[int | None] = ()) -> None:
        self.grid, self.rank, self.replica, self.shard, self.epoch = grid, 0, 0, 0, 1
        self.members: tuple[int, ...] = tuple(range(grid.ranks))
        self.replies, self.agreed = replies, list(agreed)
        self.brought, self.carries, self.carries_maxima = grid.replicas, True, True
        self.others_maxima, self.others_digest = [0, 0, 0], list[int]()
        self.evicted: list[frozenset[int]] = []
        self.leaving = frozenset[int]()  # ranks that leave in the next repair
        self.reasons: list[dict[int, str]] = []
        self.cross, self.hooks, self.noticed_at = Cross(self), NoHooks(), None
        self.board = SimpleNamespace(come_to_vote=lambda rank: None)
        self.notes = SimpleNamespace(read=lambda step: ())
        self.outside, self.asking, self.arrivals, self.steps_made = False, (), (), 0

    @property
    def replicas(self) -> tuple[int, ...]:
        return self.grid.replicas_of(self.members)

    def linger(self) -> None:
        pass

    def agree(self, word: int) -> int | None:
        return self.agreed.pop(0) if self.agreed else word

    def repair(
        self,
        record: bytes,
        evict: frozenset[int] = frozenset(),
        reasons: Mapping[int, str] | None = None,
        leave: frozenset[int] = frozenset(),
    ) -> Census:
        leave |= self.leaving
        self.evicted.append(evict := evict | leave)
        self.reasons.append(dict(reasons or {}))
        mine, before = Record.from_bytes(record), self.members
        told = {rank: reply(mine) for rank, reply in self.replies.items() if rank in before}
        dead = {self.grid.replica(rank) for rank, theirs in told.items() if theirs is None}
        self.members = tuple(r for r in before if r not in evict and self.grid.replica(r) not in dead)
        self.epoch += 1
        records = {0: record}
        for rank in self.members[1:]:
            theirs = told[rank]
            records[rank] = theirs.to_bytes() if theirs is not None and theirs.step else b""
        gone = set(before) - set(self.members)
        lost, left = tuple(sorted(gone - leave)), tuple(sorted(gone & leave))
        return Census(self.epoch, self.members, lost, records, 1, 0.0, left=left)


def like_me(replica: int, batch: int = 3, **facts: Any) -> Reply:
    """The record of another replica that has run its slot; its other fields equal those of this rank."""

    def reply(mine: Record) -> Record:
        share = get_policy("balanced", batch).layout(range(batch), batch).share(replica)
        return replace(mine, holding=share.holding(), **facts)

    return reply


def died(mine: Record) -> None:
    return None


def begun(world: World, reduction: str = "fast", bits: int = 64, **options: Any) -> Transaction:
    """A step of one microbatch per replica, run and posted. `options` go to the transaction."""
    torch.manual_seed(0)
    model, batch = torch.nn.Linear(2, 2), world.grid.replicas
    gradients = OwnedGradients(model.parameters(), 1, make_sum(reduction, batch, bits))
    moving, policy = RunningBuffers(model, (), gradients.sum, PLAIN), get_policy("balanced", batch)
    transaction = Transaction(world, gradients, policy, batch, PLAIN, moving, **options)  # type: ignore[arg-type]
    transaction.begin(1, 77)
    (slot,) = transaction.share.run
    gradients.expect(transaction.post, transaction.share.run)
    model(torch.ones(1, 2)).sum().backward()
    gradients.collect()
    transaction.attempt.finish_slot(slot, slot, 1.0, 1.0)
    return transaction


@pytest.mark.guarantee(
    "Work kept after a death",
    "A step commits unchanged only if every survivor has the whole sum, and a stop request survives that "
    "commit.",
)
def test_step_commits_unchanged_only_if_every_survivor_has_the_whole_sum() -> None:
    for theirs in (True, False):
        world = World(Grid(3, 1), {1: like_me(1, complete=theirs), 2: died}, agreed=[None])
        transaction = begun(world)
        assert not transaction.vote()
        assert transaction.recover() is theirs
        assert transaction.incidents[0].complete is theirs


@pytest.mark.guarantee(
    "Work kept after a death",
    "A step with deaths is summed again with `nccl`, where the abort of a peer may look like a complete sum.",
)
@pytest.mark.parametrize("dead", [0, 1, 2])
def test_step_with_deaths_is_summed_again_where_an_abort_may_look_complete(dead: int) -> None:
    """NCCL's sums may look so: a dead rank may have aborted before it died, without telling the others."""
    replies: dict[int, Reply] = {rank: died if rank <= dead else like_me(rank, 4) for rank in (1, 2, 3)}
    world = World(Grid(4, 1), replies, agreed=[None])
    world.cross.ends_cleanly = False
    transaction = begun(world)
    assert not transaction.vote()
    assert transaction.recover() is (dead == 0)
    assert transaction.incidents[0].complete is (dead == 0)
    assert transaction.incidents[0].extra_microbatches == dead


@pytest.mark.parametrize("ends_cleanly", [True, False])
def test_sum_that_a_rank_may_have_aborted_before_it_left_is_summed_again(ends_cleanly: bool) -> None:
    """A rank that leaves while it joins reports its own sums in a census that another census follows."""
    world = World(Grid(4, 1), {rank: like_me(rank, 4) for rank in (1, 2, 3)}, agreed=[None])
    world.cross.ends_cleanly, world.leaving = ends_cleanly, frozenset({3})
    transaction = begun(world)
    assert not transaction.vote()
    assert transaction.recover() is ends_cleanly
    assert (transaction.incidents[0].left_ranks, transaction.incidents[0].complete) == ((3,), ends_cleanly)


@pytest.mark.guarantee(
    "Work kept after a death",
    "A step commits unchanged only if every survivor has the whole sum, and a stop request survives that "
    "commit.",
)
def test_stop_request_survives_a_commit_from_the_census() -> None:
    for wish in (False, True):
        world = World(Grid(3, 1), {1: like_me(1, stop=wish), 2: died}, agreed=[None])
        transaction = begun(world)
        transaction.vote()
        assert transaction.recover()
        assert transaction.stop_agreed is wish


@pytest.mark.guarantee(
    "Joining", "A repair for a join begins only after all members have seen the same request."
)
@pytest.mark.parametrize(
    ("mine", "theirs", "asked"), [(3, 3, True), (3, 7, True), (3, 4, False), (3, None, False)]
)
def test_join_request_is_known_after_a_commit_if_all_have_seen_it(
    mine: int, theirs: int | None, asked: bool
) -> None:
    """It is known by an agreement, or from the census; if some member sees another request, or none, no repair
    begins."""
    bits = 0 if theirs is None else 1 << theirs | 1 << 3 * (theirs == 7)
    world = World(Grid(3, 1), {1: like_me(1, asked=bits), 2: died}, agreed=[None])
    world.asking = (mine, 5)
    transaction = begun(world)
    transaction.vote()
    assert transaction.recover()
    assert transaction.asked is asked
    word = VoteWord.COMPLETE | VoteWord.SAME_STATE | VoteWord.FINITE | VoteWord.GO_ON | VoteWord.IN_RANGE
    word |= VoteWord.ASKED * (bits & (1 << mine | 1 << 5))
    world = World(Grid(3, 1), {}, agreed=[word])
    world.asking = (mine, 5)
    transaction = begun(world)
    assert transaction.vote()
    assert transaction.asked is asked


def overflow(world: World, code: int = 60) -> Transaction:
    """A step in which another replica has a gradient that is too large."""
    world.others_maxima = [0, code, 0]
    return begun(world, "reproducible")


@pytest.mark.guarantee(
    "The trajectory",
    "The vote finds an overflow wherever it arose, and the repeated step keeps nothing of the first attempt.",
)
def test_overflow_repeats_the_step_on_a_new_layout_with_larger_exponents() -> None:
    world = World(Grid(3, 1), {})
    transaction = overflow(world)
    given_up: list[str] = []
    attempts = transaction.attempts(lambda slots: [[s] for s in slots], False, lambda: given_up.append("all"))
    transaction.begin(1, 77)
    exponents = transaction.gradients.sum.exponents
    assert exponents is not None
    before = exponents.current.tolist()
    for slots, _, _ in attempts:
        assert not transaction.gradients.largest.any(), "sums of the attempt before are still there"
        if not transaction.share.run:
            continue
        transaction.gradients.expect(None, transaction.share.run)
        transaction.gradients.collect()
        transaction.attempt.finish_slot(slots[0], slots[0], 1.0, 1.0)
    assert given_up == ["all"]
    assert exponents.current.tolist() == [before[0], 60 + HEADROOM, before[2]]
    assert transaction.maxima.reruns == 1
    assert transaction.finite


@pytest.mark.guarantee(
    "The trajectory",
    "A finite gradient or loss never ends a run, overflows keep the bits through the death of their owner, "
    "and a NaN skips the step.",
)
def test_nonfinite_value_skips_the_step_before_any_overflow() -> None:
    world = World(Grid(3, 1), {})
    transaction = overflow(world, NOT_FINITE)
    assert transaction.vote()
    assert not transaction.finite
    assert transaction.maxima.reruns == 0


@pytest.mark.guarantee(
    "The trajectory", "Survivors of the owner of the largest value never commit an inexact sum."
)
@pytest.mark.parametrize("owner_died", [False, True])
def test_overflow_is_never_decided_in_a_repair(owner_died: bool) -> None:
    """The survivors hold a complete sum that is not exact. They complete the batch on the old grid, and the next
    complete vote finds the overflow again."""
    world = World(Grid(3, 1), {1: like_me(1), 2: died}, agreed=[None])
    transaction = overflow(world)
    exponents = transaction.gradients.sum.exponents
    assert exponents is not None
    before = exponents.current.tolist()
    assert not transaction.vote()
    if owner_died:
        world.others_maxima = [0, 3, 3]
    assert not transaction.recover(), "a sum that is not exact was committed"
    assert transaction.share.run or transaction.share.kept
    assert exponents.current.tolist() == before


def test_replicas_that_sum_with_different_exponents_are_detected() -> None:
    """Higher and lower digests are detected, by the maxima of a digest and of its negative."""
    mine = begun(World(Grid(3, 1), {}), "reproducible").gradients.sum.exponents
    assert mine is not None
    for place in range(2):
        for change in (-1, 1):
            world = World(Grid(3, 1), {})
            world.others_digest = mine.digest
            world.others_digest[place] += change
            with pytest.raises(LedgerError, match="different exponents"):
                begun(world, "reproducible").vote()


def test_replicas_that_sum_with_other_words_are_detected() -> None:
    for bits in (32, 64):
        world = World(Grid(3, 1), {})
        world.others_digest = Exponents(3, ["0", "1"], 96 - bits).digest
        with pytest.raises(LedgerError, match="different exponents"):
            begun(world, "reproducible", bits).vote()


def test_attempt_is_incomplete_without_its_maxima() -> None:
    world = World(Grid(3, 1), {1: like_me(1), 2: like_me(2)})
    world.carries_maxima = False
    transaction = begun(world, "reproducible")
    assert not transaction.vote()


@pytest.mark.guarantee("State and samples", "Drift in any shard evicts the whole replica.")
@pytest.mark.parametrize("shard", [0, 1, 2])
def test_drift_in_any_shard_evicts_the_whole_replica(shard: int) -> None:
    grid = Grid(3, 3)
    drifted = grid.replica_size + shard  # a rank of replica 1

    def reply(rank: int) -> Reply:
        return like_me(grid.replica(rank), **({"fingerprint": 78} if rank == drifted else {}))

    world = World(grid, {rank: reply(rank) for rank in range(1, grid.ranks)}, agreed=[VoteWord.COMPLETE])
    transaction = begun(world)
    transaction.vote()
    assert not transaction.recover()
    assert world.evicted == [frozenset(), frozenset(), frozenset({3, 4, 5})], "why is found out before"
    assert world.reasons[-1] == {1: f"{UNKNOWN} (on rank {drifted})"}
    assert world.replicas == (0, 2)
    assert transaction.incidents[0].evicted == (1,)
    assert transaction.incidents[0].reasons == {1: f"{UNKNOWN} (on rank {drifted})"}


def test_drift_without_a_majority_names_the_replicas_of_each_state() -> None:
    world = World(Grid(2, 1), {1: like_me(1, 2, fingerprint=78)}, agreed=[VoteWord.COMPLETE])
    transaction = begun(world)
    transaction.vote()
    with pytest.raises(
        StateDivergedError, match="before step 1 replica 0 and replica 1 hold different"
    ) as told:
        transaction.recover()
    assert told.value.states == ((0,), (1,))


def test_a_replica_whose_script_has_ended_is_evicted() -> None:
    world = World(Grid(3, 1), {1: like_me(1, step=0), 2: like_me(2)}, agreed=[None])
    transaction = begun(world)
    transaction.vote()
    assert not transaction.recover()
    assert world.evicted == [frozenset(), frozenset({1})]


@pytest.mark.guarantee(
    "The trajectory", "A step commits only if its sum holds as many samples as the plan says."
)
@pytest.mark.parametrize("brought", [2, 4])
def test_sum_of_more_or_fewer_samples_than_planned_is_not_committed(brought: int) -> None:
    world = World(Grid(3, 1), {})
    world.brought = brought
    transaction = begun(world)
    with pytest.raises(LedgerError, match=f"holds {brought} samples, and 3 were planned"):
        transaction.vote()


@pytest.mark.guarantee(
    "The trajectory", "A step commits only if its sum holds as many samples as the plan says."
)
@pytest.mark.parametrize("brought", [2, 4])
def test_sum_of_other_samples_does_not_commit_from_the_census(brought: int) -> None:
    """Where a death fails the vote, the records alone decide: a rank whose sum is not B records it as incomplete."""
    world = World(Grid(3, 1), {1: like_me(1), 2: died}, agreed=[None])
    world.brought = brought
    transaction = begun(world)
    assert not transaction.vote()
    assert not transaction.recover(), f"a step of {brought} samples was committed, and 3 were planned"
    assert transaction.incidents[0].extra_microbatches == 1


@pytest.mark.guarantee("The trajectory", "Losses and weights of discarded microbatches do not count.")
def test_losses_and_weights_of_discarded_microbatches_do_not_count() -> None:
    """A replica that has to discard its sum, as a spare that is dealt extra microbatches, begins with an empty one."""
    world = World(Grid(3, 1), {1: like_me(1, complete=False), 2: died}, agreed=[None])
    transaction = begun(world)
    afresh = (
        Share(0, Role.MAJOR, True, SlotSet(), SlotSet.span(0, 1)),
        Share(1, Role.MAJOR, True, SlotSet.span(1, 2), SlotSet.span(2, 3)),
    )
    decision = PolicyDecision(afresh, RestoreMode.NON_BLOCKING, discarded=1)
    transaction.policy = SimpleNamespace(respond=lambda event: decision)  # type: ignore[assignment]
    assert not transaction.vote()
    assert not transaction.recover()
    transaction.gradients.expect(transaction.post, transaction.share.run)
    torch.stack([parameter.sum() for parameter in transaction.gradients.parameters]).sum().backward()
    transaction.gradients.collect()
    transaction.attempt.finish_slot(0, 0, 3.0, 0.5)
    assert transaction.vote()
    assert (transaction.totals.loss, transaction.totals.weight) == (2 * 1.5, 2 * 0.5), "of two equal replicas"
    assert transaction.attempt.contributed == [0]


@pytest.mark.guarantee(
    "The trajectory",
    "A step commits only if every bucket was posted in this attempt with exactly the slots that the replica "
    "owes.",
)
def test_share_missing_from_a_bucket_blocks_the_vote() -> None:
    transaction = begun(World(Grid(3, 1), {}))
    transaction.gradients.buckets[-1].posted = None
    with pytest.raises(LedgerError, match="was not handed to the reduction"):
        transaction.vote()


def test_rank_that_left_a_step_runs_its_share_again_unless_reassigned() -> None:
    """A repair after the rank left has found no rank inside of the step, whatever the repair was for: then all begin
    the step again."""
    for inside, outside, brings in ((0, 0, 1), (1, 0, 0), (0, 1, 1), (1, 1, 1)):
        world = World(Grid(3, 1), {})
        transaction = begun(world)
        world.epoch += inside
        transaction.leave()
        world.epoch += outside
        transaction.begin(1, 77)
        assert len(transaction.share.run) == brings, (inside, outside)


def take(transaction: Transaction) -> None:
    while not transaction.vote():
        transaction.recover()
        transaction.gradients.post_all(transaction.post)


@pytest.mark.guarantee(
    "Work kept after a death", "A loss before a step was left is reported when the step commits."
)
def test_loss_before_a_step_was_left_is_reported_when_it_commits() -> None:
    world = World(Grid(3, 1), {1: like_me(1, complete=False), 2: died}, agreed=[None])
    transaction = begun(world)
    assert not transaction.vote()
    assert not transaction.recover()
    transaction.leave()
    transaction.begin(1, 77)
    assert [incident.dead_ranks for incident in transaction.incidents] == [(2,)]
    transaction.begin(2, 78)
    assert transaction.incidents == []


@pytest.mark.guarantee("Membership", "Repairs without losses are bounded.")
def test_repairs_without_losses_are_bounded() -> None:
    """This holds in a step, and in the comparison after the last step."""
    for last in (False, True):
        world = World(Grid(3, 1), {1: like_me(1), 2: like_me(2)})
        world.carries = False
        transaction = begun(world)
        with pytest.raises(RuntimeError, match="repairs in a row in which nobody was lost"):
            transaction.confirm(2, 77) if last else take(transaction)
        assert len(world.evicted) == FRUITLESS + 1


@pytest.mark.guarantee(
    "Joining", "A joined replica that counts its own steps does not keep the others from ending."
)
@pytest.mark.parametrize(
    ("ended", "inside", "behind"),
    [
        ((), (0, 1), ()),
        ((0, 1), (), ()),
        ((0,), (1, 2), (0,)),  # a script that ended early
        ((0,), (1, 4), (0,)),  # a replica that joined later is not at fault
        ((4,), (0, 1), (4,)),
        ((0, 1), (4,), (4,)),  # a joined replica would take more steps than planned
        ((0, 4), (5, 6), (5, 6)),
        ((4,), (5,), (4,)),  # no original replica is left
    ],
)
def test_scripts_that_end_apart_evict_the_same_replicas_everywhere(
    ended: tuple[int, ...], inside: tuple[int, ...], behind: tuple[int, ...]
) -> None:
    records = dict.fromkeys(ended, b"") | dict.fromkeys(inside, b"in a step")
    assert left_behind(records, 3) == set(behind)


def test_joined_replica_runs_nothing_in_its_first_step() -> None:
    """The layout of that step is made for the others. Afterwards the replica is a member like them; without others, it
    runs all slots."""
    world = World(Grid(3, 1), {})
    transaction = begun(world)
    transaction.adopt_step(4)
    transaction.members_joined((0, 2), as_joining=False)
    for step, expected in ((4, {0: 0, 1: 3, 2: 0}), (5, {0: 1, 1: 1, 2: 1})):
        transaction.begin(step, 77)
        assert {share.replica: len(share.run) for share in transaction.layout.shares} == expected
    world.members = (0, 2)
    transaction.begin(4, 77)
    assert {share.replica: len(share.run) for share in transaction.layout.shares} == {0: 2, 2: 1}
