"""Shares by speed: how many microbatches each replica runs, and when that changes."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recover_lab.simulate.race import SystemRunner
from recover_lab.simulate.scenario import parse_scenario
from recover_lab.simulate.slow_nodes import slowness_of

from recover.policy import BalancedWorldPolicy, FailureEvent, PacedWorldPolicy, SlotSet
from recover.policy.paced import GAIN, KNOWN, WINDOW, deal_by_speed
from recover.step.loop.stragglers import WINDOW as STRAGGLING
from recover.step.loop.stragglers import StragglerEviction, Stragglers
from recover.step.position import Position
from recover.step.samples import ExactSamples

FACTORS = st.lists(st.integers(1, 400), min_size=1, max_size=12)


def shares(policy: PacedWorldPolicy, replicas: Sequence[int], batch: int) -> list[int]:
    return [len(share.run) for share in policy.layout(replicas, batch).shares]


def learned(speeds: Sequence[float], batch: int, steps: int = WINDOW, fill: float = 0.0) -> PacedWorldPolicy:
    policy = PacedWorldPolicy(fill)
    for _ in range(steps):
        policy.committed(dict(enumerate(speeds)), range(len(speeds)), batch)
    return policy


def time_of(sizes: Sequence[int], speeds: Sequence[float], fill: float = 0.0) -> float:
    return max(speed * (size + fill) for size, speed in zip(sizes, speeds, strict=True) if size)


@settings(deadline=None, max_examples=300)
@given(factors=FACTORS, slots=st.integers(0, 300), fill=st.sampled_from([0.0, 0.5, 1.0, 3.0]))
def test_next_slot_goes_to_the_replica_that_would_finish_first(
    factors: list[int], slots: int, fill: float
) -> None:
    """The fast algorithm deals as one that deals slot by slot."""
    least = 1 if slots >= len(factors) else 0
    expected = [least] * len(factors)
    for _ in range(slots - sum(expected)):
        first = min(range(len(factors)), key=lambda i: (factors[i] * (expected[i] + 1 + fill), i))
        expected[first] += 1
    assert deal_by_speed(slots, factors, fill, least) == expected


@settings(deadline=None, max_examples=100)
@given(factors=FACTORS, slots=st.integers(1, 40))
def test_every_replica_runs_a_slot_while_there_are_enough(factors: list[int], slots: int) -> None:
    sizes = deal_by_speed(slots, factors, least=1)
    assert sum(sizes) == slots
    idle = [factors[place] for place, size in enumerate(sizes) if not size]
    assert len(idle) == max(0, len(factors) - slots)
    assert not idle or min(idle) >= max(factors[place] for place, size in enumerate(sizes) if size)


@pytest.mark.guarantee(
    "Paced shares", "Replicas of equal speed run the same slots as with the policy `balanced`."
)
@settings(deadline=None, max_examples=100)
@given(replicas=st.integers(1, 64), batch=st.integers(1, 256))
def test_replicas_of_equal_speed_run_what_balanced_deals(replicas: int, batch: int) -> None:
    policy = learned([0.25] * replicas, batch)
    balanced = BalancedWorldPolicy()
    assert policy.layout(range(replicas), batch) == balanced.layout(range(replicas), batch)
    if replicas > 1:
        census = [share.holding() for share in balanced.layout(range(replicas), batch).shares[1:]]
        event = FailureEvent(census, batch)
        assert policy.respond(event) == balanced.respond(event)


@pytest.mark.guarantee(
    "Paced shares", "With one of 8 replicas twice as slow, B=256 takes 1.12 times as long at most."
)
@pytest.mark.parametrize("slow", [1.2, 1.5, 2.0, 3.0, 4.0])
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
def test_slow_replica_costs_little_more_than_the_optimum(slow: float, noise: float) -> None:
    draw, speeds, policy = random.Random(1), [1.0] * 7 + [slow], PacedWorldPolicy()
    for _ in range(4 * WINDOW):
        measured = {replica: speed * (1 + draw.gauss(0, noise)) for replica, speed in enumerate(speeds)}
        policy.committed(measured, range(8), 256)
    sizes = shares(policy, range(8), 256)
    optimum = time_of(deal_by_speed(256, [round(1000 * speed) for speed in speeds], least=1), speeds)
    assert time_of(sizes, speeds) <= 1.04 * optimum
    if slow == 2.0:
        assert time_of(sizes, speeds) / 32 <= 1.12


@pytest.mark.guarantee("Paced shares", "Noise in the speed of equal replicas does not change their shares.")
@pytest.mark.parametrize("seed", range(4))
def test_noise_does_not_change_shares(seed: int) -> None:
    """The noise is five per cent from step to step on each replica; and two of three steps take twice as long on all
    of them."""
    draw, policy = random.Random(seed), PacedWorldPolicy()
    for step in range(1000):
        long = 2.0 if step % 3 else 1.0
        measured = {replica: long * (1 + draw.gauss(0, 0.05)) for replica in range(8)}
        policy.committed(measured, range(8), 256)
        assert shares(policy, range(8), 256) == [32] * 8, step


def test_single_slow_steps_do_not_change_shares() -> None:
    policy = learned([1.0] * 4, 64)
    for step in range(4 * WINDOW):
        policy.committed({0: 9.0 if step % 3 == 0 else 1.0, 1: 1.0, 2: 1.0, 3: 1.0}, range(4), 64)
        assert shares(policy, range(4), 64) == [16] * 4


def test_shares_follow_a_throttled_replica_down_and_up() -> None:
    """Shares change half a window after the change of speed, and the first estimate is corrected once the window has
    settled."""
    policy = learned([1.0] * 4, 64)
    for speed, expected in ((3.0, [20, 19, 19, 6]), (1.0, [16] * 4)):
        for _ in range(KNOWN + WINDOW):
            policy.committed({0: 1.0, 1: 1.0, 2: 1.0, 3: speed}, range(4), 64)
        assert shares(policy, range(4), 64) == expected


def test_estimate_from_few_steps_is_corrected_when_the_window_has_settled() -> None:
    """When shares change, the median is the lowest time of the slow steps, and within the hysteresis of the right
    value."""
    policy = learned([1.0] * 8, 256)
    slow = [1.9] + [2.0] * (2 * WINDOW)
    for speed in slow:
        policy.committed({**dict.fromkeys(range(7), 1.0), 7: speed}, range(8), 256)
    assert shares(policy, range(8), 256)[7] == 17
    assert time_of([34, 18], [1, 2]) < GAIN * time_of([35, 17], [1, 2])  # hysteresis alone would keep 18


def test_replica_without_history_counts_as_typical() -> None:
    policy = learned([0.2, 0.2, 0.8], 39)
    assert shares(policy, [0, 1, 2, 5], 39) == [12, 12, 3, 12]


def test_replica_far_too_slow_keeps_one_slot() -> None:
    """Without a slot its speed would not be measured any more."""
    assert shares(learned([1.0, 1.0, 500.0], 9), range(3), 9) == [4, 4, 1]


def test_pipelines_are_dealt_by_fill_time_and_slots() -> None:
    """A replica with twice the time per slot also fills its pipeline in twice the time."""
    policy = learned([1.0, 2.0], 24, fill=3.0)
    assert shares(policy, [0, 1], 24) == [17, 7]  # 17 + 3 = 2 * (7 + 3); without the fill time it is 16 and 8
    assert shares(learned([1.0, 2.0], 24), [0, 1], 24) == [16, 8]


@pytest.mark.guarantee("Paced shares", "Missing slots are run again by the replicas that finish them first.")
def test_missing_slots_are_dealt_by_speed_after_a_death() -> None:
    policy = learned([1.0, 1.0, 1.0, 4.0], 32)
    layout = policy.layout(range(4), 32)
    census = [share.holding() for share in layout.shares if share.replica != 0]
    decision = policy.respond(FailureEvent(census, 32))
    assert {share.replica: len(share.run) for share in decision.shares} == {1: 5, 2: 4, 3: 1}
    runs = [part for share in decision.shares for part in (share.kept, share.run)]
    assert SlotSet.union(runs) == SlotSet.span(0, 32)


@pytest.mark.guarantee("Paced shares", "All ranks deal the same shares by speed, also ranks that joined.")
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_joined_replica_deals_as_the_others_after_any_history(seed: int) -> None:
    draw = random.Random(seed)
    member, living, batch = PacedWorldPolicy(), list(range(draw.randint(1, 6))), draw.randint(1, 80)
    newcomer: PacedWorldPolicy | None = None
    for step in range(60):
        if draw.random() < 0.05 and len(living) > 1:
            living.remove(draw.choice(living))
        if draw.random() < 0.05:
            living.append(max(living) + 1)
        if step == 30:
            newcomer = PacedWorldPolicy()
            newcomer.load_state_dict(member.state_dict())
        ran = {replica: draw.uniform(0.1, 1.0) for replica in living if draw.random() < 0.9}
        for policy in (member, newcomer) if newcomer else (member,):
            policy.committed(ran, living, batch)
        assert sum(shares(member, living, batch)) == batch
        if newcomer is not None:
            assert newcomer.layout(living, batch) == member.layout(living, batch)
            assert newcomer.state_dict() == member.state_dict()


def test_position_hands_the_history_to_a_joining_replica() -> None:
    member, newcomer = (
        Position(24, ExactSamples(24), Stragglers(), policy)
        for policy in (learned([1.0, 1.0, 3.0], 24), PacedWorldPolicy())
    )
    newcomer.take(member.give())
    assert newcomer.give() == member.give()
    assert member.give()["policy"]["factors"] == {0: 64, 1: 64, 2: 192}
    assert "policy" not in member.state_dict()  # replicas of a resumed run may be on other machines


def straggling(rule: StragglerEviction, steps: int, slow: float, living: int = 4) -> list[int]:
    """Steps after which the last replica would be evicted."""
    stragglers, evicted = Stragglers(eviction=rule), []
    for step in range(1, steps + 1):
        paces = dict.fromkeys(range(living), 0.1) | {living - 1: 0.1 * slow}
        stragglers.committed(paces, step, living)
        if due := stragglers.take_eviction():
            assert list(due) == [living - 1]
            assert "5 times as long" in due[living - 1]
            assert not stragglers.take_eviction()
            evicted.append(step)
    return evicted


@pytest.mark.guarantee(
    "Paced shares",
    "A straggler is evicted only if that was asked for, never two in `straggler.every` steps, and never below "
    "`min_replicas`.",
)
def test_straggler_is_evicted_only_by_the_rule() -> None:
    rule = StragglerEviction(4.0, every=50, min_replicas=2)
    first = STRAGGLING
    assert straggling(rule, 120, 5.0) == [first, first + 50, first + 100]
    assert straggling(rule, 120, 3.9) == []
    assert straggling(rule, 120, 5.0, living=3) == []


def test_postponed_eviction_is_decided_again_after_the_next_step() -> None:
    """Another replica leaves on notice at the same boundary, which postpones the eviction."""
    stragglers = Stragglers(eviction=StragglerEviction(4.0, every=50))
    paces = {0: 0.1, 1: 0.1, 2: 0.5}
    for step in range(1, STRAGGLING + 1):
        stragglers.committed(paces, step, 3)
    stragglers.postpone(stragglers.take_eviction())
    assert not stragglers.take_eviction()
    stragglers.postpone({})
    stragglers.committed(paces, STRAGGLING + 1, 3)
    assert list(stragglers.take_eviction()) == [2]


def test_joined_replica_knows_the_last_eviction() -> None:
    rule = StragglerEviction(4.0, every=50)
    member, newcomer = Stragglers(eviction=rule), Stragglers(eviction=rule)
    paces = {0: 0.1, 1: 0.1, 2: 0.5}
    for step in range(1, STRAGGLING + 1):
        member.committed(paces, step, 3)
    assert member.take_eviction()
    newcomer.load_state_dict(member.state_dict())
    for step in range(STRAGGLING + 1, 2 * STRAGGLING + 1):
        for each in (member, newcomer):
            each.committed(paces, step, 3)
            assert not each.take_eviction()


@pytest.mark.parametrize(
    ("wrong", "remedy"), [({"factor": 1.5}, "2 or more"), ({"factor": 4, "every": 0}, "at least 1")]
)
def test_eviction_rule_refuses_impossible_numbers(wrong: dict[str, float], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        StragglerEviction(**wrong)  # type: ignore[arg-type]


def simulated_days(**changes: object) -> float:
    """Goodput of a simulated cluster of 8 replicas with 32 microbatches each."""
    there = parse_scenario(
        {
            "cluster.nodes": 8,
            "cluster.gpus_per_node": 8,
            "job.replica_gpus": 8,
            "job.accum": 32,
            "job.microbatch_s": 0.5,
            "failures.per_node_day": 1e-6,
            "run.days": 2,
            "run.seeds": 1,
            "reduction.hidden": 1,
            **{key.replace("__", "."): value for key, value in changes.items()},
        }
    )
    return SystemRunner(there).run("recover", 0).parts["productive"]


@pytest.mark.guarantee(
    "Simulated clusters", "The simulation knows shares by speed, on mixed generations and throttled nodes."
)
def test_simulated_slow_nodes_cost_less_with_paced_shares() -> None:
    """In two days, one of eight replicas is of a generation that takes twice as long; or replicas take twice as long
    for some time."""
    calm = simulated_days()
    old = {"stragglers__old_share": 0.125, "stragglers__old_factor": 2.0}
    assert calm / simulated_days(**old) == pytest.approx(2.0, rel=0.01)
    assert calm / simulated_days(**old, job__policy="paced") == pytest.approx(35 / 32, rel=0.01)
    throttled = {"stragglers__per_node_day": 1.0, "stragglers__factor": 2.0, "stragglers__minutes": 120}
    even, paced = simulated_days(**throttled), simulated_days(**throttled, job__policy="paced")
    assert even < 0.9 * calm  # otherwise paced shares could not improve it
    assert calm - paced < 0.35 * (calm - even)
    assert paced < calm


def test_shares_of_a_short_spell_do_not_follow() -> None:
    there = parse_scenario(
        {
            "job.policy": "paced",
            "stragglers.per_node_day": 0.01,
            "stragglers.minutes": 0.001,
            "job.microbatch_s": 1.0,
            "run.days": 1,
        }
    )
    slowness = slowness_of(there, paced=True)
    changes = slowness.spells(there, 0, 86400.0)
    assert {factor for _, factor in changes} == {slowness.calm, slowness.struck}
    assert [at for at, _ in changes] == sorted(at for at, _ in changes)
