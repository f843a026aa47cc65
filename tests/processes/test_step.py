"""The step through the public API alone, with real processes and SIGKILL at every place."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from causes_told import why
from patience import PATIENCE
from toy import reference, remembered
from worlds import Outcome, run_world


def train(tmp_path: Path, replicas: int, kills: list[str], name: str = "run", **options: Any) -> Outcome:
    options = {"policy": "balanced", "samples": "exact", "accum": 2, "steps": 6, **options}
    return run_world("train.py", tmp_path / name, replicas, [options], kills=kills)


def commits(outcome: Outcome) -> list[dict[str, Any]]:
    return outcome.notes(outcome.survivors[0], "commit")


def committed_samples(outcome: Outcome, step: int, batch: int) -> list[int]:
    """Microbatches of a step: those of survivors, and of ranks that died after the sum was complete."""
    notes = {r: [c for c in outcome.notes(r, "commit") if c["step"] == step] for r in outcome.diaries}
    samples = [sample for entries in notes.values() for entry in entries for sample in entry["samples"]]
    departed = []
    for rank, entries in notes.items():
        theirs = [note["index"] for note in outcome.notes(rank, "slot") if note["step"] == step]
        if not entries and theirs:
            departed.append(theirs)
    for count in range(len(departed) + 1):
        for some in itertools.combinations(departed, count):
            if len(samples) + sum(map(len, some)) == batch:
                return sorted(samples + [sample for theirs in some for sample in theirs])
    raise AssertionError(
        f"step {step}: {samples} and some of {departed} do not make {batch}\n{outcome.output}"
    )


def check(outcome: Outcome, victims: set[int], batch: int, exact: bool = True, code: int = 0) -> None:
    """Every step on exactly B microbatches, the same bits on all survivors, the gradients of one process."""
    assert outcome.code == code, outcome.output
    assert outcome.survivors == [r for r in outcome.diaries if r not in victims], outcome.output
    steps = [entry["step"] for entry in commits(outcome)]
    assert steps == list(range(1, len(steps) + 1))
    batches = []
    for step in steps:
        entries = [c for r in outcome.diaries for c in outcome.notes(r, "commit") if c["step"] == step]
        assert {entry["weight"] for entry in entries} == {batch}, f"step {step}: {entries}"
        assert len({entry["digest"] for entry in entries}) == 1, (
            f"step {step} left replicas with different bits"
        )
        batches.append(committed_samples(outcome, step, batch))
        assert len(set(batches[-1])) == batch, f"step {step} used a sample twice: {batches[-1]}"
        if exact:
            assert batches[-1] == list(range((step - 1) * batch, step * batch))
    assert len({sample for used in batches for sample in used}) == batch * len(steps)
    first = outcome.survivors[0]
    losses, parameters = reference(
        outcome.notes(first, "start")[0]["parameters"],
        batches,
        always=bool(outcome.notes(first, "end")[0]["rewinds"]),
    )
    slack = 1.0 if os.environ.get("TEST_DEVICE", "cpu") == "cpu" else 100.0  # the reference runs on the CPU
    torch.testing.assert_close([c["loss"] for c in commits(outcome)], losses, rtol=1e-5 * slack, atol=1e-6)
    end = [torch.tensor(value) for value in outcome.notes(first, "end")[0]["parameters"]]
    torch.testing.assert_close(end, parameters, rtol=1e-6 * slack, atol=1e-6 * slack)
    count, average = remembered(batches)
    for rank in outcome.survivors:
        memory = outcome.notes(rank, "end")[0]["memory"]
        assert memory == outcome.notes(first, "end")[0]["memory"]
        assert memory[0] == count
        torch.testing.assert_close(torch.tensor(memory[1]).double(), average, rtol=1e-6, atol=1e-7)


@pytest.mark.guarantee(
    "The batch",
    "Every step commits exactly B microbatches wherever a replica dies, and survivors repeat none of theirs.",
)
@pytest.mark.guarantee("The trajectory", "Parameters of all survivors are bitwise equal after every commit.")
@pytest.mark.guarantee(
    "The trajectory", "Losses and parameters equal those of one process on the same samples up to rounding."
)
@pytest.mark.guarantee(
    "The trajectory", "Step t uses samples (t-1)B to tB-1 once each with `samples=exact`, through any deaths."
)
@pytest.mark.guarantee(
    "The trajectory",
    "Buffers that forward changes are equal on all replicas whichever replica died, and bitwise equal with "
    "`reduction=reproducible`.",
)
def test_death_at_every_location_of_a_step_keeps_batch_and_bits(tmp_path: Path) -> None:
    places = ["forward", "backward", "bucket", "in-reduce", "vote", "update", "after-update", "in-totals"]
    kills = [f"{step}:{9 - step}:{place}" for step, place in enumerate(places, start=1)]
    outcome = train(tmp_path, 9, kills, steps=9)
    check(outcome, {1, 2, 3, 4, 5, 6, 7, 8}, batch=18)
    # The death at the vote came after all buckets: the step was committed unchanged.
    (at_vote,) = commits(outcome)[4]["incidents"]
    assert (at_vote["complete"], at_vote["extra_microbatches"]) == (True, 0)
    (in_reduce,) = commits(outcome)[3]["incidents"]
    assert (in_reduce["complete"], in_reduce["boundary"], in_reduce["discarded_microbatches"]) == (
        False,
        True,
        0,
    )


@pytest.mark.guarantee(
    "The batch", "Every step commits exactly B microbatches with the roles and spares of the paper."
)
@pytest.mark.guarantee("Work kept after a death", "A dead spare costs a repair and no second reduction.")
@pytest.mark.parametrize(
    "places",
    [
        ("bucket", "in-reduce:1"),
        pytest.param(("repair", "in-reduce"), marks=pytest.mark.soak),
        pytest.param(("forward", "backward"), marks=pytest.mark.soak),
        pytest.param(("update", "advance"), marks=pytest.mark.soak),
    ],
)
def test_dead_spare_costs_nothing_and_a_spare_replaces_a_dead_major(
    tmp_path: Path, places: tuple[str, str]
) -> None:
    """7 x 1: after one loss there are 3 majors, a minor and a spare of each kind; two losses later no spare."""
    first, second = places
    # A death in a repair needs an earlier death that causes the repair.
    spare = "3:6:bucket" if first == "repair" else "2:6:vote"
    kills = ["1:0:in-reduce", spare, f"3:1:{first}", f"5:2:{second}"]
    outcome = train(tmp_path, 7, kills, policy="static", samples="partitioned", accum=1, steps=7)
    check(outcome, {0, 1, 2, 6}, batch=7, exact=False)
    told = [
        (i["complete"], i["boundary"], i["extra_microbatches"])
        for entry in commits(outcome)
        for i in entry["incidents"]
    ]
    assert told[0] == (False, True, 1)
    assert told[-1] == (False, True, 2)
    if first != "repair":  # the spare costs a repair and no second reduction; the major's share is at hand
        assert told[1:-1] == [(True, False, 0), (False, False, 0)]


@pytest.mark.guarantee(
    "The batch", "Every step commits exactly B microbatches with the roles and spares of the paper."
)
@pytest.mark.soak
@pytest.mark.parametrize(("replicas", "victim"), [(7, 1), (6, 1)])
def test_spares_of_larger_batches_are_promoted(tmp_path: Path, replicas: int, victim: int) -> None:
    """7 x 2 has one major-spare after a loss, and so has 6 x 2."""
    kills = ["1:0:in-reduce", f"3:{victim}:in-reduce"]
    outcome = train(tmp_path, replicas, kills, policy="static", samples="partitioned", steps=5)
    check(outcome, {0, victim}, batch=2 * replicas, exact=False)
    (promotion,) = commits(outcome)[2]["incidents"]
    assert (promotion["boundary"], promotion["restore"], promotion["complete"]) == (False, "blocking", False)


@pytest.mark.guarantee(
    "The trajectory", "In-place buckets with snapshots give the same gradients with either restore mode."
)
@pytest.mark.parametrize(
    ("restore", "views", "accum"),
    [
        pytest.param("blocking", True, 1, marks=pytest.mark.soak),
        ("non-blocking", False, 3),
        pytest.param("blocking", False, 2, marks=pytest.mark.soak),
        pytest.param("non-blocking", True, 2, marks=pytest.mark.soak),
    ],
)
def test_own_ddp_model_has_the_gradients_of_the_out_of_place_path(
    tmp_path: Path, restore: str, views: bool, accum: int
) -> None:
    """Although the loop keeps its own no_sync() in every second microbatch, which seldom fits the replica's share."""
    kills = ["1:1:in-reduce:1", "4:3:bucket:1"]  # in the first step DDP has not settled its buckets yet
    outcome = train(tmp_path, 4, kills, ddp=restore, views=views, always=True, accum=accum)
    check(outcome, {1, 3}, batch=4 * accum)
    assert outcome.notes(0, "end")[0]["rewinds"][restore] == 2


@pytest.mark.guarantee(
    "State and samples", "A replica with a flipped bit is evicted within one step, and the others continue."
)
def test_replica_with_a_flipped_bit_is_evicted_within_one_step(tmp_path: Path) -> None:
    """Reproducible sums are those of one process, too."""
    outcome = train(tmp_path, 3, [], flip=[3, 1], reduction="reproducible", bit=30)
    assert outcome.ends[1] == "excluded", outcome.output
    told = "rank 1 was evicted: its parameters differ from the majority, first in "
    assert told in outcome.output
    check(outcome, {1}, batch=6)
    assert [len(entry["replicas"]) for entry in commits(outcome)] == [3, 3, 2, 2, 2, 2]


@pytest.mark.guarantee(
    "State and samples",
    "A run without a majority stops, names both sides and saves both states, which are never offered "
    "without a person's decision.",
)
def test_run_without_a_majority_stops_and_names_both_sides(tmp_path: Path) -> None:
    outcome = train(
        tmp_path, 2, [], flip=[3, 1], flipped="average"
    )  # a buffer that moves drifts as weights do
    assert outcome.code == 1
    assert "before step 3 replica 0 and replica 1 hold different states" in outcome.output
    assert "the first difference is in average (buffer)" in outcome.output
    assert "there is no majority to tell which state is right" in outcome.output
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == ["unconfirmed-2-replica-0", "unconfirmed-2-replica-1"], outcome.output
    assert "rename it to unconfirmed-2, and resume" in outcome.output


@pytest.mark.guarantee(
    "State and samples", "A sample that raises on two replicas ends the run with slot, sample and traceback."
)
@pytest.mark.guarantee(
    "Monitoring", "A fence and a poisoned sample are distinguished from other causes of death."
)
def test_poisoned_sample_ends_the_run_with_slot_sample_and_traceback(tmp_path: Path) -> None:
    """Whether it raises where it is read (on replica 0, which has it first) or in the loop, where it is computed."""
    outcome = train(tmp_path, 4, [], poison=17)
    assert outcome.code == 1
    assert "slot 1 of step 3 (sample 17) has cost replicas" in outcome.output
    assert "ValueError: this sample cannot be read" in outcome.output
    raised = [rank for rank, end in outcome.ends.items() if end == "raised"]
    assert len(raised) == 4  # two raised at the sample, two because of the report of it
    assert all(entry["step"] < 3 for rank in outcome.diaries for entry in outcome.notes(rank, "commit"))
    (story,) = why(tmp_path / "run")
    assert {death["cause"] for death in story["first"]} == {"poison"}
    assert all("slot 1 of step 3 (sample 17)" in death["text"] for death in story["first"])
    first = story["first"][0]["rank"]
    assert [death["because_of"] for death in story["followed"]] == [first] * 2


@pytest.mark.guarantee("The batch", "Every step commits exactly B microbatches with the `gloo` carrier.")
@pytest.mark.soak  # test_rejoin.py has the bits of a calm run on gloo, test_deaths.py deaths in its reductions
def test_gloo_carrier_commits_the_same_steps(tmp_path: Path) -> None:
    outcome = train(tmp_path, 4, ["2:1:in-reduce", "4:3:vote"], carrier="gloo")
    check(outcome, {1, 3}, batch=8)


@pytest.mark.guarantee(
    "Membership", "A script that ends while other replicas are inside a step is named and hangs no rank."
)
def test_script_that_ends_while_others_are_in_a_step_is_named_and_evicted(tmp_path: Path) -> None:
    """The script that ends frees the others itself; they do not wait until their links count as broken."""
    options = {"policy": "balanced", "samples": "exact", "accum": 2, "steps": 6, "ends": [3, 2]}
    outcome = run_world("train.py", tmp_path / "run", 3, [options], link_timeout=PATIENCE - 1)
    assert outcome.ends[2] == "raised", outcome.output
    assert "the script has ended on rank 2 after step 3" in outcome.output
    check(outcome, {2}, batch=6, code=4)  # the script is wrong, not the machine
