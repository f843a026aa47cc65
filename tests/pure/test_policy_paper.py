"""The paper's numbers (section 4.3, appendix E), its two broken cases corrected, and spares in use."""

import ast
import sys
from pathlib import Path

import pytest

import recover.policy
from recover.policy import (
    AdaptiveWorldPolicy,
    BalancedWorldPolicy,
    FailureEvent,
    Holding,
    Layout,
    PolicyDecision,
    RestoreMode,
    Role,
    SlotSet,
    StaticWorldPolicy,
    get_policy,
)

static = StaticWorldPolicy()


def shape(layout: Layout) -> tuple[int, ...]:
    """(accumulation, majors, minors, remainder, major-spares, minor-spares)"""
    roles = layout.roles()
    return (
        layout.accum,
        roles[Role.MAJOR],
        roles[Role.MINOR],
        layout.remainder,
        roles[Role.MAJOR_SPARE],
        roles[Role.MINOR_SPARE],
    )


def lose(census: tuple[Holding, ...], batch: int, *roles: Role) -> PolicyDecision:
    left = list(census)
    for role in roles:
        left.remove(next(holding for holding in reversed(left) if holding.role is role))
    return static.respond(FailureEvent(left, batch))


def promoted(before: tuple[Holding, ...], decision: PolicyDecision) -> list[Role]:
    living = {holding.replica: holding for holding in before}
    return [
        living[share.replica].role
        for share in decision.shares
        if share.counts and share.kept and not living[share.replica].counts
    ]


# 32 replicas x 8, as in section 4.3 and appendix E


def test_paper_all_are_majors_before_the_first_loss() -> None:
    layout = static.layout(range(32), 256)
    assert shape(layout) == (8, 32, 0, 0, 0, 0)
    assert layout.committed == 256


@pytest.mark.guarantee("The batch", "The policy reproduces every number that the paper gives.")
def test_paper_loss_of_one_major_gives_eight_extra_and_23_boundary_minors() -> None:
    decision = lose(static.layout(range(32), 256).holdings(), 256, Role.MAJOR)
    assert decision.boundary
    assert decision.restore is RestoreMode.NON_BLOCKING
    assert (decision.rounds, decision.full) == (1, 8)
    totals = sorted(len(share.kept) + len(share.run) for share in decision.shares)
    assert totals == [8] * 23 + [9] * 8
    roles = [share.role for share in decision.shares]
    assert (roles.count(Role.MAJOR), roles.count(Role.BOUNDARY_MINOR)) == (8, 23)
    assert (decision.committed, decision.discarded) == (256, 0)


@pytest.mark.guarantee("The batch", "The policy reproduces every number that the paper gives.")
def test_paper_next_layout_has_28_majors_one_minor_and_two_spares() -> None:
    layout = static.layout(range(31), 256)
    assert shape(layout) == (9, 28, 1, 4, 1, 1)
    # The paper's r_29 is the minor and its r_31 the minor-spare, counting from one.
    assert layout.share(28).role is Role.MINOR
    assert layout.share(30).role is Role.MINOR_SPARE
    assert layout.committed == 256


@pytest.mark.guarantee("The batch", "The policy reproduces every number that the paper gives.")
def test_paper_lost_minor_is_replaced_by_the_minor_spare() -> None:
    before = static.layout(range(31), 256).holdings()
    decision = lose(before, 256, Role.MINOR)
    assert not decision.boundary
    assert decision.restore is RestoreMode.BLOCKING
    assert promoted(before, decision) == [Role.MINOR_SPARE]
    assert decision.share(30).role is Role.MINOR
    assert (decision.rounds, decision.committed, decision.discarded) == (0, 256, 0)
    assert shape(static.layout(decision.replicas, 256)) == (9, 28, 1, 4, 1, 0)


def test_major_spare_replaces_a_lost_major_without_extra_work() -> None:
    before = static.layout(range(31), 256).holdings()
    decision = lose(before, 256, Role.MAJOR)
    assert promoted(before, decision) == [Role.MAJOR_SPARE]
    assert (decision.rounds, decision.committed) == (0, 256)


# Where the paper's rule does not reach B


@pytest.mark.guarantee("The batch", "The policy commits B where the rule of the paper misses it.")
def test_loss_of_two_majors_at_31_uses_both_spares_and_five_extra() -> None:
    """The paper promotes one spare and is 9 short. 18 are missing: spares hold 9 + 4, and 5 are run."""
    before = static.layout(range(31), 256).holdings()
    decision = lose(before, 256, Role.MAJOR, Role.MAJOR)
    assert sorted(promoted(before, decision)) == [Role.MAJOR_SPARE, Role.MINOR_SPARE]
    assert (decision.rounds, decision.full) == (1, 5)
    assert (decision.committed, decision.discarded) == (256, 0)


@pytest.mark.guarantee("The batch", "The policy commits B where the rule of the paper misses it.")
def test_loss_of_a_minor_at_21_uses_extra_microbatches_not_a_major_spare() -> None:
    """The paper lets every spare enter at a boundary, which gives 260: the spare's 13 do not fit into the 9
    missing."""
    layout = static.layout(range(21), 256)
    assert shape(layout) == (13, 19, 1, 9, 1, 0)
    decision = lose(layout.holdings(), 256, Role.MINOR)
    assert promoted(layout.holdings(), decision) == []
    assert (decision.rounds, decision.full) == (1, 9)
    assert (decision.committed, decision.discarded) == (256, 13)
    # The spare is not needed for the extra round, so it stays in reserve with its sum ...
    reserve = decision.share(20)
    assert (reserve.role, reserve.counts, len(reserve.kept), len(reserve.run)) == (
        Role.MAJOR_SPARE,
        False,
        13,
        0,
    )
    # ... and replaces a major that is lost in that very round.
    again = lose(decision.holdings(), 256, Role.MAJOR)
    assert again.share(20).counts
    assert (again.rounds, again.full, again.committed) == (1, 1, 256)


# Spares, role by role


def test_layout_6x2_at_five_has_a_major_spare_that_replaces_a_major() -> None:
    layout = static.layout(range(5), 12)
    assert shape(layout) == (3, 4, 0, 0, 1, 0)
    decision = lose(layout.holdings(), 12, Role.MAJOR)
    assert promoted(layout.holdings(), decision) == [Role.MAJOR_SPARE]
    assert (decision.rounds, decision.committed) == (0, 12)


def test_layout_7x2_at_six_has_a_minor_and_a_major_spare_only() -> None:
    layout = static.layout(range(6), 14)
    assert shape(layout) == (3, 4, 1, 2, 1, 0)
    major = lose(layout.holdings(), 14, Role.MAJOR)
    assert (promoted(layout.holdings(), major), major.rounds) == ([Role.MAJOR_SPARE], 0)
    minor = lose(layout.holdings(), 14, Role.MINOR)
    assert (promoted(layout.holdings(), minor), minor.rounds, minor.full) == ([], 1, 2)
    both = lose(layout.holdings(), 14, Role.MAJOR, Role.MINOR)
    assert (promoted(layout.holdings(), both), both.rounds, both.full) == ([Role.MAJOR_SPARE], 1, 2)
    assert {major.committed, minor.committed, both.committed} == {14}


def test_layout_7x1_at_six_covers_the_loss_of_a_major_and_the_minor() -> None:
    layout = static.layout(range(6), 7)
    assert shape(layout) == (2, 3, 1, 1, 1, 1)
    decision = lose(layout.holdings(), 7, Role.MAJOR, Role.MINOR)
    assert sorted(promoted(layout.holdings(), decision)) == [Role.MAJOR_SPARE, Role.MINOR_SPARE]
    assert (decision.rounds, decision.committed) == (0, 7)


@pytest.mark.parametrize(
    "dead", [(Role.MAJOR_SPARE,), (Role.MINOR_SPARE,), (Role.MAJOR_SPARE, Role.MINOR_SPARE)]
)
def test_dead_spare_needs_no_promotion_extra_work_or_reduction(dead: tuple[Role, ...]) -> None:
    before = static.layout(range(31), 256).holdings()
    decision = lose(before, 256, *dead)
    assert decision.restore is RestoreMode.SKIP
    assert promoted(before, decision) == []
    assert (decision.rounds, decision.committed, decision.discarded) == (0, 256, 0)
    assert decision.holdings() == tuple(h for h in before if h.replica in decision.replicas)


def test_single_fitting_spare_is_preferred_to_several() -> None:
    sizes = {1: 4, 2: 5, 3: 9, 4: 9}
    hands = SlotSet.span(20, 60).deal(sizes.values())
    spares = [
        Holding(replica, Role.MAJOR_SPARE, hand, False) for replica, hand in zip(sizes, hands, strict=True)
    ]
    decision = static.respond(FailureEvent([major(0, 0, 11), *spares], 20))
    assert [share.replica for share in decision.shares if share.counts] == [0, 3]
    assert decision.rounds == 0


def test_extra_microbatches_go_to_replicas_with_least_in_hand() -> None:
    """Survivors hold 4, 1, 3 and 2 microbatches, and 3 are missing: the three with the fewest run one each."""
    sizes = {0: 4, 1: 1, 2: 3, 3: 2}
    hands = SlotSet.span(0, 10).deal(sizes.values())
    census = [Holding(replica, Role.MAJOR, hand, True) for replica, hand in zip(sizes, hands, strict=True)]
    decision = static.respond(FailureEvent(census, 13))
    assert [len(share.run) for share in decision.shares] == [0, 1, 1, 1]


def test_spare_that_must_run_extra_rounds_discards_its_sum() -> None:
    """There are two survivors: one that counts, and a spare that is too large to fit; two extra rounds are missing."""
    census = [
        Holding(0, Role.MAJOR, SlotSet.span(0, 7), True),
        Holding(1, Role.MAJOR_SPARE, SlotSet.span(10, 15), False),
    ]
    decision = static.respond(FailureEvent(census, 10))
    assert (decision.rounds, decision.full, decision.committed, decision.discarded) == (2, 1, 10, 5)
    freed = decision.share(1)
    assert (freed.counts, len(freed.kept), len(freed.run)) == (True, 0, 1)


# A replica that rejoins, and the other policies


@pytest.mark.parametrize("policy", [static, BalancedWorldPolicy(), AdaptiveWorldPolicy(32)])
def test_rejoined_replica_restores_the_first_layout(policy: StaticWorldPolicy) -> None:
    assert policy.layout([*range(31), 31], 256) == policy.layout(range(32), 256)
    assert policy.layout([5, 40, 2], 256).replicas == (2, 5, 40)
    assert policy.layout(range(40), 256).committed == 256


def test_more_replicas_than_microbatches_still_commit_the_batch() -> None:
    assert shape(static.layout(range(12), 10)) == (1, 10, 0, 0, 2, 0)
    assert BalancedWorldPolicy().layout(range(12), 10).committed == 10


def test_adaptive_batch_shrinks_with_the_world() -> None:
    policy = AdaptiveWorldPolicy(32)
    before = policy.layout(range(32), 256).holdings()
    decision = policy.respond(FailureEvent(before[:-1], 256))
    assert (decision.committed, decision.boundary, decision.restore) == (248, False, RestoreMode.BLOCKING)
    assert policy.layout(range(31), 256).committed == 248


def test_unknown_policy_is_refused_with_the_list_of_names() -> None:
    assert [get_policy(name, 4).name for name in ("static", "balanced", "adaptive")] == [
        "static",
        "balanced",
        "adaptive",
    ]
    with pytest.raises(ValueError, match=r"'greedy'.*static, balanced, paced or adaptive"):
        get_policy("greedy", 4)


@pytest.mark.parametrize(
    ("replicas", "batch", "why"),
    [([], 8, "at least one"), ([1, 1], 8, "twice"), ([1], 0, "at least one microbatch")],
)
def test_layout_without_replicas_or_batch_is_refused(replicas: list[int], batch: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        static.layout(replicas, batch)


def major(replica: int, start: int, stop: int) -> Holding:
    return Holding(replica, Role.MAJOR, SlotSet.span(start, stop), True)


@pytest.mark.parametrize(
    ("census", "why"),
    [
        ([], "empty"),
        ([major(0, 0, 4), major(0, 0, 3)], "replica 0 is in the census twice"),
        ([major(0, 0, 4), major(1, 4, 5), major(0, 0, 3)], "replica 0 is in the census twice"),
        ([major(0, 0, 4), major(1, 3, 6)], "slots 3 by replicas 0 and 1"),
        ([major(0, 0, 9)], "9 microbatches count already"),
        ([Holding(0, Role.MAJOR_SPARE, SlotSet.span(0, 4), False)], "spares run slots from 8 on"),
    ],
)
def test_impossible_census_is_refused(census: list[Holding], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        FailureEvent(census, 8)


def test_equal_records_of_one_replicas_ranks_are_merged() -> None:
    assert FailureEvent([major(0, 0, 4), major(0, 0, 4)], 8).census == (major(0, 0, 4),)


def test_policy_imports_the_standard_library_only() -> None:
    for path in Path(recover.policy.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert name.startswith("recover.policy") or name.split(".")[0] in sys.stdlib_module_names, (
                    path
                )
