"""Verified gradients: the slots that are computed twice, their fingerprints, and the verdict where these differ."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from lone_world import World
from recover_lab.simulate.detection import detection, steps_to_detection
from recover_lab.simulate.scenario import parse_scenario

import recover
from recover.gradients.bucket_layout import cut
from recover.gradients.gradient_hash import GradientHash, weighted_sum
from recover.gradients.module_gradients import OwnedGradients
from recover.job.grid import Grid
from recover.launch.hosts.slots import HostSlots
from recover.policy import Layout, get_policy
from recover.step.operations import OperationRecorder, not_deterministic
from recover.step.totals import Totals
from recover.step.transaction import Transaction
from recover.step.verification import CheckKind, Evidence, GradientVerdict, Verification, judge, plan_checks
from recover.train.config import parse
from recover.world.rank_exit import End


def layout(replicas: int, batch: int) -> Layout:
    return get_policy("balanced", replicas).layout(range(replicas), batch)


@pytest.mark.guarantee(
    "Verified gradients", "With verify=K and W replicas, each replica is checked every W/K steps."
)
@pytest.mark.parametrize(
    ("replicas", "batch", "count"), [(4, 16, 1), (3, 8, 1), (5, 5, 2), (2, 3, 3), (6, 4, 1)]
)
def test_checks_reach_every_replica_in_turn_and_shadows_rotate(replicas: int, batch: int, count: int) -> None:
    plan = layout(replicas, batch)
    owners = [share.replica for share in plan.shares if share.run]
    pairs: Counter[tuple[int, int]] = Counter()
    for step in range(1, 400):
        checks = plan_checks(plan, count, 7, step)
        assert len({check.slot for check in checks}) == len(checks) == count
        for check in checks:
            assert check.slot in plan.share(check.owner).run
            assert check.owner != check.shadow
            pairs[check.owner, check.shadow] += 1
    assert {owner for owner, _ in pairs} == set(owners)
    assert set(pairs) == {(a, b) for a in owners for b in range(replicas) if a != b}
    for first in range(1, 300):
        window = range(first, first - (-len(owners) // count))
        checked = {check.owner for step in window for check in plan_checks(plan, count, 7, step)}
        assert checked == set(owners), f"from step {first} on"


def test_checked_slots_follow_from_the_seed_and_cover_the_batch() -> None:
    plan = layout(4, 16)
    slots = [plan_checks(plan, 1, 3, step)[0].slot for step in range(1, 300)]
    assert slots == [plan_checks(plan, 1, 3, step)[0].slot for step in range(1, 300)]
    assert slots != [plan_checks(plan, 1, 4, step)[0].slot for step in range(1, 300)]
    assert set(slots) == set(range(16))


def test_lone_replica_checks_itself_and_a_resting_one_checks_nothing() -> None:
    (check,) = plan_checks(layout(1, 4), 1, 0, 5)
    assert (check.owner, check.shadow) == (0, 0)
    resting = layout(2, 4).with_resting([2])
    shadows = {check.shadow for step in range(20) for check in plan_checks(resting, 1, 0, step, [2])}
    assert shadows == {0, 1}


# Evidence by rank: the results of slot 5, in the order in which they were computed.
def evidence(
    *results: list[int], seen: tuple[int, int, int, int] | None = None, ops: bool = False
) -> dict[int, Evidence]:
    return {
        rank: Evidence(
            {5: own} if own else {}, {5: seen} if seen else {}, [], [] if ops else None, f"h{rank}"
        )
        for rank, own in enumerate(results)
    }


def verdict(given: dict[int, Evidence], size: int = 1) -> GradientVerdict:
    ranks = max(given) + 1
    again = {rank: Evidence.from_bytes(one.to_bytes()) for rank, one in given.items()}
    assert again == given
    return judge(Grid(-(-ranks // size), size), given)


@pytest.mark.guarantee(
    "Verified gradients",
    "A replica that does not reproduce its own result is evicted; if both do, a third replica decides; three results "
    "evict nobody.",
)
def test_verdict_follows_from_the_results_of_pair_and_third() -> None:
    assert verdict(evidence([1], [1], [])) == GradientVerdict()
    assert verdict(evidence([1], [2], [])).recompute == {5: (0, 1)}
    assert set(verdict(evidence([1, 3], [2, 2], [])).evicted) == {0}
    assert set(verdict(evidence([1, 1], [2, 3])).evicted) == {1}  # two replicas suffice here
    assert set(verdict(evidence([1, 4], [2, 3], [])).evicted) == {0, 1}
    assert verdict(evidence([1, 1], [2, 2], [], [])).recompute == {5: (2,)}
    assert set(verdict(evidence([1, 1], [2, 2], [1])).evicted) == {1}
    assert set(verdict(evidence([1, 1], [2, 2], [2])).evicted) == {0}
    named = verdict(evidence([1, 1], [2, 2], [3], []))
    assert (named.kind, named.recompute, named.evicted) == (CheckKind.OPERATIONS, {5: (0, 1, 2)}, {})
    off = verdict(evidence([1, 1], [2, 2], [3], [], ops=True))
    assert off.off
    assert not off.evicted
    assert not off.recompute
    assert off.settled == {5}
    assert verdict(evidence([1, 1], [2, 2])).error  # both are stable, and there is no third


def test_verdict_after_a_death_in_the_pair_trusts_no_one_unchecked() -> None:
    """The totals have shown a mismatch with replica 3, which has died: the other replica of the pair may have
    erred."""
    seen = (3, 0, 9, 1)
    assert verdict(evidence([1], [], [], seen=seen)).recompute == {5: (0,)}
    assert set(verdict(evidence([1, 2], [], [], seen=seen)).evicted) == {0}
    assert verdict(evidence([1, 1], [], [], seen=seen)).recompute == {5: (1,)}
    assert verdict(evidence([1, 1], [1], [], seen=seen)) == GradientVerdict(settled=frozenset([5]))
    assert set(verdict(evidence([1, 1], [9], [], seen=seen)).evicted) == {0}
    assert verdict(evidence([1, 1], seen=(1, 0, 9, 1))) == GradientVerdict(
        settled=frozenset([5])
    )  # the replica is alone
    assert verdict(evidence([1], [], seen=(3, 0, 1, 1))) == GradientVerdict()  # there was no mismatch


def test_living_replica_speaks_for_itself_not_the_totals() -> None:
    """An aborted sum may look finished on some carriers: its result for a living replica does not count."""
    assert verdict(evidence([1], [1], [], seen=(0, 1, 7, 8))) == GradientVerdict()


@pytest.mark.guarantee(
    "Verified gradients", "In a replica of several ranks, the replica and the ranks that differ are named."
)
def test_ranks_of_a_replica_are_judged_together_and_named() -> None:
    given = evidence([1, 1], [4, 5], [1, 1], [6, 6])
    found = verdict(given, size=2)
    assert set(found.evicted) == {0}
    assert "(rank 1 on h0, h1)" in found.evicted[0]
    assert verdict(evidence([1], [4], [1], [6]), size=2).recompute == {5: (0, 1)}


def test_lone_replica_that_differs_from_itself_ends_the_run() -> None:
    assert verdict(evidence([1, 1])) == GradientVerdict()
    assert "no replica is left" in verdict(evidence([1, 2])).error


def start(*results: list[int], ops: list[str] | None = None) -> GradientVerdict:
    given = {rank: Evidence(start=own, operations=ops) for rank, own in enumerate(results)}
    return judge(Grid(len(results), 1), given)


@pytest.mark.guarantee(
    "Verified gradients",
    "Where kernels are not deterministic, verify is refused in the first step with the names of operations.",
)
def test_start_check_tells_kernels_from_a_device_that_errs() -> None:
    assert start([1, 1, 1], [1, 1, 1]) == GradientVerdict()
    assert start([1, 1, 2], [1, 1, 1]).kind is CheckKind.OPERATIONS
    assert "aten.sort" in start([1, 1, 2], [1, 1, 1], ops=["aten.sort"]).error
    assert set(start([1, 1, 2], [1, 1, 1], ops=[]).evicted) == {0}
    assert "none was found" in start([1, 1, 2], [3, 1, 1], ops=[]).error
    assert set(start([1, 1, 1], [2, 2, 2], [1, 1, 1]).evicted) == {1}
    assert "no majority" in start([1, 1, 1], [2, 2, 2]).error


def test_settled_slots_are_not_judged_again() -> None:
    given = evidence([1, 1], [2, 3], [])
    assert judge(Grid(3, 1), given, settled={5}) == GradientVerdict()


@pytest.mark.guarantee("Verified gradients", "After a death, slots without a pair are counted as unverified.")
def test_slots_without_a_pair_are_counted_as_unverified() -> None:
    checks = Verification(2, 0, host="h")
    checks.begin(3, layout(3, 6), 0)
    assert checks.commit([(7, 7), (8, None)]) == (1, 1)
    owner, shadow = checks.checks[0].owner, checks.checks[0].shadow
    assert checks.passed == {owner: 3, shadow: 3}
    assert checks.since_passed(owner) == "its last passed check was in step 3, -1 steps were committed since"


@given(some.lists(some.tuples(*[some.none() | some.integers(0, 2**64 - 1)] * 2), min_size=1, max_size=3))
def test_fingerprints_pass_the_totals_without_loss(pairs: list[tuple[int | None, int | None]]) -> None:
    totals = Totals(4, [0, 1], 0, len(pairs))
    totals.begin(1)
    totals.say_checks([(number, *pair) for number, pair in enumerate(pairs)], 5)
    totals.agreed[:] = totals._own
    assert totals.checked() == pairs
    assert totals.same_start()


@given(some.data())
def test_any_flipped_bit_changes_the_fingerprint(data: some.DataObject) -> None:
    shape = data.draw(some.lists(some.integers(1, 5), min_size=0, max_size=3))
    dtype, bits = data.draw(
        some.sampled_from(
            [(torch.float32, torch.int32), (torch.float64, torch.int64), (torch.bfloat16, torch.int16)]
        )
    )
    values = torch.randn(shape, generator=torch.Generator().manual_seed(data.draw(some.integers(0, 99)))).to(
        dtype
    )
    before = weighted_sum(values, ())
    flat = values.view(-1).view(bits)
    at, highest = data.draw(some.integers(0, flat.numel() - 1)), 8 * flat.itemsize - 1
    for bit in range(highest + 1):
        flip = 1 << bit if bit < highest else torch.iinfo(bits).min
        flat[at] ^= flip
        assert weighted_sum(values, ()) != before
        flat[at] ^= flip


def test_swapped_values_and_parameters_change_the_fingerprint() -> None:
    values = torch.randn(4, 3)
    assert (
        len({int(weighted_sum(each, ())) for each in (values, values.flip(0), values.flip(1), values.t())})
        == 4
    )
    names = {}
    one, two = (torch.nn.Parameter(torch.zeros(4, 3)) for _ in range(2))
    names = {one: "one", two: "two"}
    sums = []
    for first, second in ((values, 2 * values), (2 * values, values)):
        whole = GradientHash(names.__getitem__)
        whole.add(one, first)
        whole.add(two, second)
        sums.append(whole.value().value)
    assert sums[0] != sums[1]


@pytest.mark.guarantee(
    "Verified gradients", "The fingerprint of a gradient depends neither on buckets nor on shards."
)
def test_fingerprint_depends_neither_on_shards_nor_on_buckets() -> None:
    values = torch.randn(7, 5, 3)
    parts = weighted_sum(values[:3], (0, 0, 0)) + weighted_sum(values[3:, :2], (3, 0, 0))
    assert parts + weighted_sum(values[3:, 2:], (3, 2, 0)) == weighted_sum(values, ())
    found = set()
    for bucket_mb in (25.0, 0.0001):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
        shapes = {parameter: str(parameter.shape) for parameter in model.parameters()}
        gradients = OwnedGradients(model.parameters(), bucket_mb, names=shapes.copy)
        assert len(gradients.buckets) == len(cut(gradients.parameters, int(bucket_mb * 2**20 / 4)))
        fingerprint = gradients.check(counts=False)
        gradients.expect(None)
        model(torch.ones(2, 8)).sum().backward()
        gradients.collect()
        found.add(fingerprint.value().value)
        assert not any(gradients.usage), "what is only compared is not in the local sums"
    assert len(found) == 1


def test_operations_with_other_results_from_the_same_inputs_are_named() -> None:
    calls = []
    for number in range(2):
        weights = torch.ones(3, requires_grad=True)
        with OperationRecorder() as recorder:
            torch.manual_seed(number)
            (torch.nn.functional.dropout(weights, 0.5) * 2).sum().backward()
            torch.rand(3)
        calls.append(recorder.calls)
    assert not_deterministic(calls[0], calls[0]) == []
    assert "aten.rand.default" in not_deterministic(*calls)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"verify": -1}, "give 0"),
        ({"verify": 5}, "global_batch=4"),
        ({"verify": 1, "samples": "partitioned"}, "samples='exact'"),
        ({"verify": 1, "gradients": object()}, "drop-in DDP and FSDP1"),
    ],
)
def test_verify_is_refused_where_it_cannot_hold(arguments: dict[str, object], error: str) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=error):
        recover.Step(World(), model, optimizer, 4, **arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="whole number"):
        recover.Step(World(), model, optimizer, 4, verify=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ({"samples": "partitioned", "policy": "static"}, "samples=exact"),
        ({"verify": "99"}, "more than the"),
        ({"compile": "true"}, "compile=true"),
    ],
)
def test_config_refuses_verify_with_what_it_cannot_check(words: dict[str, str], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        parse({"replicas": "2", "accum": "2", "verify": "1", **words})


@pytest.mark.guarantee(
    "Verified gradients",
    "The slot of a replica that computed a wrong gradient is not used again until an operator clears it.",
)
def test_slot_of_a_wrong_gradient_is_set_aside_until_its_mark_is_removed(tmp_path: Path) -> None:
    marks = tmp_path / "set-aside" / "node7"
    why = "rank 1 was evicted: its gradient of slot 3 is wrong"
    slots = HostSlots(2, delay=0, forgive=0, marks=marks)
    slots.take(1, 0)
    told = slots.leave(1, f'{{"end": "{End.EXCLUDED}", "detail": "{why}"}}', 1, 10)
    assert "node7-1" in told
    assert why in told
    assert slots.free(1000) == [0]
    again = HostSlots(2, delay=0, forgive=0, marks=marks)
    assert again.free(1000) == [0], "the next launch knows it, too"
    assert again.take(0, 1000) == ""
    warning = again.take(1, 1000)
    assert why in warning, "a launch that begins on it says so"
    assert f"remove {marks}-1" in warning
    (tmp_path / "set-aside" / "node7-1").unlink()
    assert slots.free(1000) == [0, 1]
    slots.take(1, 1000)
    assert slots.leave(1, f'{{"end": "{End.EXCLUDED}", "detail": "its parameters differ"}}', 1, 1010) == ""


def test_verified_slot_is_a_round_of_its_own() -> None:
    """In a round the gradient of one microbatch cannot be told from that of the next."""
    checks = Verification(1, 0)
    share = layout(2, 8).share(0)
    checks.begin(2, layout(2, 8), 0)
    (check,) = checks.checks
    assert check.owner == 0
    transaction = SimpleNamespace(share=share, verification=checks)

    def cut(slots: list[int]) -> list[list[int]]:
        return [slots] if slots else []

    rest = [slot for slot in share.run if slot != check.slot]
    assert Transaction._pieces(transaction, cut, overlap=False) == [rest, [check.slot]]  # type: ignore[arg-type]
    assert Transaction._pieces(transaction, cut, overlap=True) == [list(share.run)]  # type: ignore[arg-type]


def test_time_to_detection_grows_with_replicas_and_falls_with_slots() -> None:
    """A replica is in 2K of W pairs; each pair shows an error with the probability that the device errs."""
    for replicas, slots, errs in ((16, 1, 0.2), (16, 4, 0.1), (64, 2, 0.2)):
        expected = replicas / (2 * slots * errs)
        assert fmean(steps_to_detection(replicas, slots, errs)) == pytest.approx(expected, rel=0.25, abs=1)
    assert max(steps_to_detection(8, 1, 1.0)) <= 8
    assert set(steps_to_detection(2, 1, 1.0)) == {1}
    found = detection(parse_scenario({"verify.slots": 1, "verify.errs": 0.1}))
    assert found is not None
    assert "verify=1" in found.sentence()
    assert detection(parse_scenario({})) is None
