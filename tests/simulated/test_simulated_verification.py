"""Verified gradients on a simulated world: devices err, replicas die, and no verified wrong gradient commits."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
import toy
from detection_times import assert_agrees
from simulated_laws import play, shrink
from simulated_schedules import verified_schedule
from simulated_training import BATCH, COMMITTED, Training

import recover
from recover.faults.fault import parse_fault
from recover.faults.probe import Probe
from recover.policy import get_policy
from recover.step.errors import CorruptGradientError
from recover.step.verification import plan_checks


def explore(seeds: range) -> set[str]:
    seen: set[str] = set()
    for seed in seeds:
        schedule = verified_schedule(seed)
        try:
            seen |= set(play(schedule).kinds())
        except AssertionError as wrong:
            raise AssertionError(f"{wrong}\nsmallest: {shrink(schedule)}") from wrong
    return seen


@pytest.mark.guarantee(
    "Verified gradients", "No verified corrupt microbatch commits, whichever replicas die."
)
@pytest.mark.guarantee("Verified gradients", "No healthy replica is evicted because another one errs.")
def test_schedules_of_errors_and_deaths_keep_every_law() -> None:
    seen = explore(range(60))
    assert {
        "verified",
        "evicted for a wrong gradient",
        "evicted for a wrong sum",
        "reduced again",
        "corrupt",
        "at vote",
        "at check",
        "two at once",
    } <= seen


@pytest.mark.soak
def test_ten_thousand_schedules_of_errors_and_deaths_keep_every_law() -> None:
    explore(range(60, 10_000))


def trained(replicas: int, *faults: str, **options: object) -> Training:
    schedule = [parse_fault(fault) for fault in faults]
    training = Training(replicas, options=dict(options), hooks=lambda rank: Probe(rank, 0, schedule))
    training.run()
    return training


def results(training: Training) -> dict[int, COMMITTED]:
    return training.commits[min(training.simulation.finished)]


@pytest.fixture(scope="module")
def calm() -> dict[int, COMMITTED]:
    """A run without errors, and without `verify`."""
    return results(trained(3))


@pytest.mark.parametrize(
    ("replicas", "fault", "why"),
    [
        (3, "3:0:check=corrupt:gradient", "did not reproduce its own result"),  # the owner errs once
        (3, "3:2:check=corrupt:activation", "did not reproduce its own result"),  # the shadow errs once
        (3, "3:0:check=errs:1", "two other replicas have another result"),  # the owner always errs
        (3, "4:0:check=errs:1", "two other replicas have another result"),  # the shadow always errs
        (2, "3:1:check=corrupt:gradient", "did not reproduce its own result"),  # two replicas are enough
        (3, "1:2:check=errs:1", "differs from the majority"),  # a replica errs from the start
    ],
)
def test_replica_that_errs_is_evicted_and_the_step_keeps_its_bits(
    replicas: int, fault: str, why: str, calm: dict[int, COMMITTED]
) -> None:
    """The sums are reproducible: any trace of a wrong gradient in them, or a missing slot, changes their bits."""
    training = trained(replicas, fault, verify=1)
    erring = int(fault.split(":")[1])
    assert set(training.simulation.finished) == set(range(replicas)) - {erring}
    assert results(training) == calm
    assert "its gradient of slot" in training.last_words[erring]
    assert why in training.last_words[erring]
    assert "committed since" in training.last_words[erring]


def test_same_errors_without_verify_are_committed(calm: dict[int, COMMITTED]) -> None:
    training = trained(3, "3:0:backward=corrupt:gradient")
    assert len(training.simulation.finished) == 3
    assert results(training)[2] == calm[2]
    assert results(training)[3] != calm[3]


def test_fast_sums_are_verified_as_well() -> None:
    fault = parse_fault("3:2:check=corrupt:gradient")
    fast = Training(3, options={"verify": 1}, reduction="fast", hooks=lambda rank: Probe(rank, 0, [fault]))
    fast.run()
    assert set(fast.simulation.finished) == {0, 1}


def test_run_without_errors_verifies_a_slot_in_every_step(calm: dict[int, COMMITTED]) -> None:
    counts = []
    for replicas in (1, 2, 4):
        training = Training(
            replicas,
            options={"verify": 1},
            between=lambda rank, step: counts.append((step.verified, step.unverified)),
        )
        training.run()
        assert results(training) == calm
    assert set(counts) == {(1, 0)}


def test_pair_lost_by_a_death_leaves_its_slot_unverified(calm: dict[int, COMMITTED]) -> None:
    counts = {}
    training = Training(
        3,
        options={"verify": 1},
        hooks=lambda rank: Probe(
            rank, 0, [parse_fault("3:2:vote")], fire=lambda _: training.simulation.kill_at_next_call(2)
        ),
        between=lambda rank, step: counts.update({step.index: (step.verified, step.unverified)}),
    )
    training.run()
    assert results(training) == calm
    assert counts == {1: (1, 0), 2: (1, 0), 3: (0, 1), 4: (1, 0), 5: (1, 0), 6: (1, 0)}


def test_three_results_switch_verify_off_and_evict_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    """Each replica always errs, in a layer of its own."""
    off = set()
    training = Training(
        3,
        options={"verify": 1},
        hooks=lambda rank: Probe(rank, 0, [parse_fault(f"2:{rank}:forward=errs:1")]),
        between=lambda rank, step: off.add((step.index, step._engine.transaction.verification.off)),
    )
    training.run()
    assert len(training.simulation.finished) == 3
    assert {why for step, why in off if step == 1} == {""}
    (why,) = {why for step, why in off if step == 6}
    assert "three results" in why


@pytest.mark.parametrize(
    ("replicas", "fault", "error"),
    [
        (2, "3:1:check=errs:1", "no third replica"),
        (1, "3:0:check=corrupt:gradient", "no replica is left"),
    ],
)
def test_undecidable_errors_end_the_run_before_the_commit(replicas: int, fault: str, error: str) -> None:
    with pytest.raises(CorruptGradientError, match=error):
        trained(replicas, fault, verify=1)


class FaultyReducer(Probe):
    """Flips a bit of every reduced sum of its rank, from a step on."""

    def __init__(self, rank: int, since: int) -> None:
        super().__init__(rank, 0, [parse_fault(f"{since}:{rank}:reduced=corrupt:sum")])
        self._fault, self._since = self._mine[0], since

    def __call__(self, location: str, detail: object = None) -> None:
        if location == "reduced" and self.step >= self._since:
            self._mine = [replace(self._fault, step=self.step)]
        super().__call__(location, detail)


@pytest.mark.guarantee(
    "Verified gradients",
    "With reproducible sums, a sum that was added or reduced wrongly never commits: it is reduced again, and a replica "
    "that has added wrongly is evicted.",
)
@pytest.mark.parametrize("bits", [64, 32])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_wrong_reduced_sum_is_reduced_again_and_costs_no_bit(replicas: int, bits: int) -> None:
    """The reduced sum is wrong on one rank, then on all ranks at once: no replica is lost."""
    undisturbed = results(trained(replicas, reduction_bits=bits))
    for ranks in ([replicas - 1], list(range(replicas))):
        counts: dict[tuple[int, int], int] = {}
        faults = [parse_fault(f"3:{rank}:reduced=corrupt:sum") for rank in ranks]
        training = Training(
            replicas,
            options={"verify": 1, "reduction_bits": bits},
            hooks=lambda rank, faults=faults: Probe(rank, 0, faults),
            between=lambda rank, step, counts=counts: counts.update({(rank, step.index): step.wrong_sums}),
        )
        training.run()
        assert results(training) == undisturbed
        assert len(training.simulation.finished) == replicas
        assert {key: count for key, count in counts.items() if count} == {
            (rank, 3): len(ranks) for rank in range(replicas)
        }
        (incident,) = training.incidents
        assert [told.partition(" on ")[0] for told in incident.wrong_sums] == [
            f"rank {rank}" for rank in ranks
        ]


@pytest.mark.parametrize("bits", [64, 32])
def test_replica_whose_local_sum_is_wrong_is_evicted(bits: int) -> None:
    undisturbed = results(trained(3, reduction_bits=bits))
    corrupt = set()
    fault = parse_fault("3:1:bucket=corrupt:gradient")
    training = Training(
        3,
        options={"verify": 1, "reduction_bits": bits},
        hooks=lambda rank: Probe(rank, 0, [fault]),
        between=lambda rank, step: corrupt.add((step.index, step.corrupt, step.wrong_sums)),
    )
    training.run()
    assert results(training) == undisturbed
    assert set(training.simulation.finished) == {0, 2}
    assert (
        "its sum of gradients is wrong: it does not hold what was added to it (rank 1"
        in training.last_words[1]
    )
    assert corrupt == {(index, int(index == 3), 0) for index in range(1, 7)}


def test_replica_whose_reduced_sums_stay_wrong_is_evicted(calm: dict[int, COMMITTED]) -> None:
    training = Training(
        3,
        options={"verify": 1},
        hooks=lambda rank: FaultyReducer(rank, 3) if rank == 1 else Probe(rank),
    )
    training.run()
    assert results(training) == calm
    assert set(training.simulation.finished) == {0, 2}
    assert "it was wrong after 3 reductions, and that of others was right (rank 1" in training.last_words[1]


@pytest.mark.parametrize(("replicas", "erring"), [(3, (0, 1, 2)), (3, (0, 2)), (1, (0,))])
def test_reduced_sums_that_stay_wrong_on_several_end_the_run(replicas: int, erring: tuple[int, ...]) -> None:
    training = Training(
        replicas,
        options={"verify": 1},
        hooks=lambda rank: FaultyReducer(rank, 3) if rank in erring else Probe(rank),
    )
    with pytest.raises(CorruptGradientError, match="were wrong after 3 reductions"):
        training.run()
    assert all(max(committed) == 2 for committed in training.commits.values())


def test_local_sum_of_the_only_replica_ends_the_run_before_the_commit() -> None:
    with pytest.raises(CorruptGradientError, match="no replica is left whose sums are right"):
        trained(1, "3:0:bucket=corrupt:gradient", verify=1)


def test_sums_that_overflow_or_are_not_finite_are_no_errors(calm: dict[int, COMMITTED]) -> None:
    """Such steps run again, or the optimizer is skipped, as without `verify`."""

    def scaled(factor: float) -> tuple[dict[int, COMMITTED], list[tuple[int, int, bool]]]:
        found = []

        def between(rank: int, step: recover.Step) -> None:
            found.append((step.wrong_sums, step.corrupt, step.result.skipped))
            with torch.no_grad():  # the losses of the next steps grow, on all ranks alike
                if step.index == 3:
                    for parameter in step._model.parameters():
                        parameter.mul_(factor)

        runs = []
        for verify in (0, 1):
            training = Training(
                2, options={"verify": verify, "reduction_bits": 32, "skip_limit": 0}, between=between
            )
            training.run()
            runs.append(results(training))
        assert repr(runs[0]) == repr(runs[1])
        return runs[1], found

    _, large = scaled(1e4)
    _, infinite = scaled(1e30)
    assert {(wrong, corrupt) for wrong, corrupt, _ in large + infinite} == {(0, 0)}
    assert any(skipped for _, _, skipped in infinite)


_noise = itertools.count()


@torch.library.custom_op("recover_tests::noisy", mutates_args=())
def noisy(values: torch.Tensor) -> torch.Tensor:
    return values * (1 + 1e-3 * next(_noise))


noisy.register_autograd(lambda ctx, gradient: gradient)


def test_kernels_that_are_not_deterministic_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = toy.loss_of

    def loss_of(model: torch.nn.Module, sample: object) -> torch.Tensor:
        return noisy(plain(model, sample)) ** 2  # type: ignore[arg-type]

    monkeypatch.setattr(toy, "loss_of", loss_of)
    with pytest.raises(CorruptGradientError, match=r"recover_tests\.noisy.*verify=0"):
        trained(2, verify=1)
    assert results(trained(2))  # without verify they are the user's business


def test_replica_that_joins_is_verified_and_knows_what_is_off() -> None:
    seen = set()

    def look(rank: int, step: recover.Step) -> None:
        if rank == 3:
            seen.add((step.verified, step._engine.transaction.verification.off))

    training = Training(3, joins={3: 40}, steps=12, options={"verify": 2}, between=look, kills={1: 60})
    training.run()
    assert 3 in training.simulation.finished
    assert (2, "") in seen


CORRUPTIONS = 200


def corruption(seed: int) -> tuple[int, int, list[str]]:
    """A run in which a device errs in a verified slot: the number of replicas, the erring one, and the faults."""
    rng = random.Random(f"corruption/{seed}")
    replicas, step = rng.randint(3, 5), rng.randint(2, 5)
    (check,) = plan_checks(get_policy("balanced", replicas).layout(range(replicas), BATCH), 1, 0, step)
    erring = rng.choice((check.owner, check.shadow))
    once, always = rng.choice(("corrupt:gradient", "corrupt:activation")), "errs:1"
    faults = {
        "once": [f"check={once}"],
        "often": [f"check={once}", "check=errs:0.5"],  # the verified slot, and half of all others
        "always, in forward": [f"check={always}"],
        "always, in backward": [f"backward={always}"],
    }
    return replicas, erring, [f"{step}:{erring}:{fault}" for fault in faults[rng.choice(list(faults))]]


def struck(replicas: int, faults: list[str], verify: int) -> Training:
    schedule = [parse_fault(fault) for fault in faults]
    training = Training(
        replicas,
        options={"verify": verify},
        model={
            "dropout": 0.0,
            "always": True,
        },  # each layer is used by each microbatch, and no value is dropped
        hooks=lambda rank: Probe(rank, 0, schedule),
    )
    training.run()
    return training


@pytest.mark.soak
def test_random_corruptions_of_verified_slots_are_all_found() -> None:
    """The device errs always, often or once; in forward or in backward; in any layer; on the owner or on its
    shadow."""
    calm = results(struck(3, [], 0))
    found = healthy_evicted = same_bits = committed_without_verify = 0
    for seed in range(CORRUPTIONS):
        replicas, erring, faults = corruption(seed)
        # Without verify nothing is checked: the device errs in the first microbatch of its own share.
        unseen = [fault.replace(":check=", ":forward=") for fault in faults]
        verified, unverified = struck(replicas, faults, 1), struck(replicas, unseen, 0)
        gone = set(range(replicas)) - set(verified.simulation.finished)
        found += erring in gone
        healthy_evicted += len(gone - {erring})
        same_bits += results(verified) == calm
        committed_without_verify += results(unverified) != calm
        assert len(unverified.simulation.finished) == replicas, faults
    print(f"{found=} {healthy_evicted=} {same_bits=} {committed_without_verify=} of {CORRUPTIONS}")
    assert (found, healthy_evicted, same_bits) == (CORRUPTIONS, 0, CORRUPTIONS)
    assert committed_without_verify > 0


@pytest.mark.soak
def test_time_to_detection_agrees_with_the_simulator() -> None:
    """`recover simulate` predicts after how many steps a device that errs is found; real steps with such a device
    agree."""
    replicas, chance, runs = 3, 0.3, 60
    steps = []
    for seed in range(runs):
        first, erring = 2 + seed % 5, seed % replicas
        # The device errs in the verified slot or in its own share, whichever it computes first in that step.
        faults = [parse_fault(f"{first}:{erring}:{place}=errs:{chance}") for place in ("check", "forward")]
        probe = Probe(erring, 0, faults)
        training = Training(
            replicas,
            options={"verify": 1, "seed": seed},
            steps=first + 80,
            model={"dropout": 0.0, "always": True},
            hooks=lambda rank, probe=probe, erring=erring: probe if rank == erring else Probe(rank, 0, []),
            reduction="fast",
        )
        training.run()
        assert set(training.simulation.finished) == set(range(replicas)) - {erring}
        steps.append(max(training.commits[erring]) + 2 - first)
    assert_agrees(steps, replicas, chance)
