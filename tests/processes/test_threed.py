"""Replicas on a grid of tensor, pipeline and expert parallelism: right gradients, exact bits, deaths anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from toy_llama import Tokens
from toy_threed import reference
from worlds import Outcome, run_world


def section(tp: int = 1, pp: int = 1, ep: int = 1, **more: Any) -> dict[str, Any]:
    return {"tp": tp, "pp": pp, "ep": ep, "batch": 4, "steps": 3, **more}


def train(place: Path, replicas: int, size: int, sections: list[dict[str, Any]], kills: list[str]) -> Outcome:
    return run_world("threed.py", place, replicas * size, [sections], replica_size=size, kills=kills)


def check(outcome: Outcome, place: Path, sections: list[dict[str, Any]], lost: set[int]) -> None:
    """Exactly B in every step, survivors agree, orphans have left, and gradients are those of one process."""
    size = outcome.grid.replica_size
    assert outcome.code == 0, outcome.output
    survivors = [rank for rank in outcome.diaries if rank // size not in lost]
    assert outcome.survivors == survivors, outcome.output
    for number, part in enumerate(sections):
        if part.get("dropout"):
            continue
        expected, model = reference(part)
        for step, one in expected.items():
            entries = {r: c for r in outcome.diaries for c in outcome.notes(r, "commit") if c["step"] == step}
            assert set(survivors) <= set(entries)
            assert {entry["weight"] for entry in entries.values()} == {one.weight}
            for shard in range(size):
                digests = {entry["digest"] for rank, entry in entries.items() if rank % size == shard}
                assert len(digests) == 1, f"step {step}, shard {shard}: {digests}"
            (told,) = {(entry["loss"], entry["norm"]) for entry in entries.values()}
            assert told == pytest.approx((one.loss, one.norm), rel=1e-6)
            check_gradients(place, f"gradients-{step}", survivors, one.gradients)
        with torch.no_grad():
            heldout = float(model(*Tokens(part.get("padded", False))[10**6]))
        ends = [outcome.notes(rank, "end")[number] for rank in survivors]
        assert [end["heldout"] for end in ends] == pytest.approx([heldout] * len(ends), rel=1e-6)
        names = sorted(name for name, _ in model.named_parameters())
        assert [end["names"] for end in ends] == [[] if rank % size else names for rank in survivors]


def check_gradients(place: Path, name: str, ranks: list[int], expected: dict[str, torch.Tensor]) -> None:
    """Gradients are right to 1e-6 of the tensor's largest value, with the same bits on all ranks that hold them, and
    none is missing."""
    seen: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for parameter, gradient in torch.load(place / f"{name}-{rank}.pt").items():
            wanted = expected[parameter]
            error = float((gradient - wanted).abs().max() / wanted.abs().max())
            assert error < 1e-6, f"{name}, rank {rank}, {parameter}: {error:.1e}"
            assert torch.equal(gradient, seen.setdefault(parameter, gradient)), f"{name}, {parameter}"
    assert set(seen) == set(expected)


@pytest.mark.guarantee(
    "Grids (3D parallelism)",
    "Any rank of a grid may die anywhere; its peers exit with it, and the others commit B microbatches.",
)
@pytest.mark.soak  # the 2 x 2 grid below and the matrix show the same
def test_tensor_parallel_replicas_may_lose_two_of_three_in_one_step(tmp_path: Path) -> None:
    """Two ranks at different positions die; the gradients are right before and after."""
    sections = [section(tp=2, batch=6)]
    outcome = train(tmp_path / "run", 3, 2, sections, ["2:0.1:in-reduce", "2:2.0:forward"])
    check(outcome, tmp_path / "run", sections, lost={0, 2})


@pytest.mark.guarantee(
    "The trajectory",
    "Weights per microbatch and per rank give the mean over all tokens for HSDP, pipelines and expert "
    "groups, through deaths.",
)
@pytest.mark.guarantee(
    "The trajectory",
    "Random draws of a microbatch slot depend neither on the replica nor on the round, and the ranks of a "
    "replica draw separately.",
)
@pytest.mark.guarantee(
    "Grids (3D parallelism)",
    "A rank of a grid may die in the middle of a round and while it waits in a pipeline bubble.",
)
@pytest.mark.guarantee(
    "Grids (3D parallelism)",
    "Gradients of a grid equal those of one process to 1e-6 through deaths, and are bitwise equal on all "
    "ranks that hold them.",
)
def test_pipeline_stage_and_expert_rank_may_die_inside_a_round(tmp_path: Path) -> None:
    """A stage that waits for another is killed, then a rank over whose experts all others route; both leave whole.

    Every microbatch, and every expert-parallel rank, has another number of targets that count, which is its weight.
    With dropout, three replicas and then two, whose rounds are longer, draw the same for the same microbatch.
    """
    tokens = {"padded": True, "clip": None}
    drawing = section(
        pp=2, batch=6, steps=2, dropout=0.2, recompute=True, reduction="reproducible", **{"from": 20}
    )
    sections = [
        drawing,
        section(pp=2, batch=6, tied=True, inside=[2, 1, 1, "bubble"], **tokens),
        drawing,
        section(ep=2, batch=4, experts=4, inside=[12, 0, 1, "backward"], **{"from": 10}, **tokens),
    ]
    outcome = train(tmp_path / "run", 3, 2, sections, [])
    check(outcome, tmp_path / "run", sections, lost={0, 1})
    assert {outcome.ends[rank] for rank in (0, 2)} == {"orphan"}
    told = [(c["rounds"], c["loss"], c["norm"]) for c in outcome.notes(4, "commit") if c["step"] > 20]
    assert [rounds for rounds, _, _ in told] == [[2], [2], [3], [3]]
    assert [numbers for _, *numbers in told[:2]] == [numbers for _, *numbers in told[2:]]
    first, _, second, _ = outcome.notes(4, "end")
    assert first["digest"] == second["digest"]


@pytest.mark.guarantee(
    "Grids (3D parallelism)",
    "Any rank of a grid may die anywhere; its peers exit with it, and the others commit B microbatches.",
)
@pytest.mark.guarantee(
    "Grids (3D parallelism)",
    "Gradients of a grid equal those of one process to 1e-6 through deaths, and are bitwise equal on all "
    "ranks that hold them.",
)
@pytest.mark.guarantee(
    "Grids (3D parallelism)",
    "The bits of a 2 x 2 grid do not depend on failures, also with rounds of alternating lengths.",
)
@pytest.mark.soak
@pytest.mark.parametrize("bits", [64, 32])
def test_grid_bits_do_not_depend_on_failures(tmp_path: Path, bits: int) -> None:
    """Two by two: one replica undisturbed, and two of which one dies in the middle of its pipeline.

    Exponents have no headroom, so that steps overflow and run again. The undisturbed replica has also run rounds of
    alternating lengths on the same stages, by schedules that differ.
    """
    exact = section(tp=2, pp=2, batch=6, tied=True, reduction="reproducible", reduction_bits=bits, tight=True)
    rounds = section(tp=2, pp=2, counts=[4, 1, 4], **{"from": 100})
    interleaved = section(tp=2, pp=2, counts=[4, 5, 4], schedule="interleaved", **{"from": 200})
    calm = train(tmp_path / "calm", 1, 4, [exact, rounds, interleaved], [])
    check(calm, tmp_path / "calm", [exact], lost=set())
    for part in (rounds, interleaved):
        expected, _ = reference({**part, "batch": sum(part["counts"]), "steps": 1, "clip": None})
        ((_, one),) = expected.items()
        total = {name: gradient * sum(part["counts"]) for name, gradient in one.gradients.items()}
        check_gradients(tmp_path / "calm", f"rounds-{part['from']}", [0, 1, 2, 3], total)

    torn = {**exact, "inside": [2, 0, 2, "forward"]}
    stormy = train(tmp_path / "stormy", 2, 4, [torn], [])
    check(stormy, tmp_path / "stormy", [torn], lost={0})
    assert {stormy.ends[rank] for rank in (0, 1, 3)} == {"orphan"}
    reruns = [[c["reruns"] for c in run.notes(rank, "commit")] for run, rank in ((calm, 0), (stormy, 4))]
    assert reruns[0] == reruns[1]
    assert reruns[0][0] == 1
    assert stormy.notes(4, "end")[0]["digest"] == calm.notes(0, "end")[0]["digest"]
    told = [
        [(c["loss"], c["norm"]) for c in run.notes(rank, "commit")] for run, rank in ((calm, 0), (stormy, 4))
    ]
    assert told[0] == told[1]


@pytest.mark.guarantee(
    "Grids (3D parallelism)",
    "Several optimizers on a grid have the same bits through a death and a resume on another number of replicas.",
)
@pytest.mark.soak
@pytest.mark.parametrize(("shape", "first"), [({"pp": 2}, "Muon"), ({"tp": 2}, "SGD")])
def test_several_optimizers_of_a_grid_resume_on_other_replicas(
    tmp_path: Path, shape: dict[str, int], first: str
) -> None:
    exact = section(**shape, batch=6, steps=4, several=first, reduction="reproducible")
    calm = train(tmp_path / "calm", 1, 2, [exact], [])
    saved = {**exact, "place": str(tmp_path / "saved")}
    begun = train(tmp_path / "begun", 3, 2, [{**saved, "steps": 2}], ["2:1.1:in-reduce"])
    resumed = train(tmp_path / "resumed", 2, 2, [saved], ["4:0.0:vote"])
    assert [run.survivors for run in (calm, begun, resumed)] == [[0, 1], [0, 1, 4, 5], [2, 3]]
    told = [
        [(c["step"], c["loss"], c["norm"], c["digest"]) for c in run.notes(rank, "commit")]
        for run, rank in ((calm, 0), (begun, 0), (resumed, 2))
    ]
    assert told[1] + told[2] == told[0]
    assert resumed.notes(2, "end")[0]["digest"] == calm.notes(0, "end")[0]["digest"]


PLACES = ["forward", "backward", "bucket:1", "in-reduce:0", "vote", "update", "after-update", "advance"]


@pytest.mark.guarantee(
    "Grids (3D parallelism)",
    "Any rank of a grid may die anywhere; its peers exit with it, and the others commit B microbatches.",
)
@pytest.mark.soak
@pytest.mark.parametrize(
    ("place", "local"),
    [(place, number % 4) for number, place in enumerate([*PLACES, "in forward", "in backward", "in bubble"])],
)
def test_grid_rank_may_die_anywhere(tmp_path: Path, place: str, local: int) -> None:
    part = section(tp=2, pp=2, tied=True)
    kills = [f"2:0.{local}:{place}"]
    if place.startswith("in "):
        part["inside"], kills = [2, 0, local, place.removeprefix("in ")], []
    outcome = train(tmp_path / "run", 2, 4, [part], kills)
    check(outcome, tmp_path / "run", [part], lost={0})


@pytest.mark.guarantee(
    "Grids (3D parallelism)",
    "Any rank of a grid may die anywhere; its peers exit with it, and the others commit B microbatches.",
)
@pytest.mark.soak
@pytest.mark.parametrize(
    "kills", [["2:0.3:in-reduce", "2:2.1:extra"], ["2:0.3:backward", "2:2.1:repair:census"]]
)
def test_grid_survives_a_second_death_during_recovery(tmp_path: Path, kills: list[str]) -> None:
    part = section(tp=2, pp=2, batch=6)
    outcome = train(tmp_path / "run", 3, 4, [part], kills)
    check(outcome, tmp_path / "run", [part], lost={0, 2})


@pytest.mark.guarantee(
    "Grids (3D parallelism)",
    "Gradients of a grid equal those of one process to 1e-6 through deaths, and are bitwise equal on all "
    "ranks that hold them.",
)
@pytest.mark.soak
@pytest.mark.parametrize(
    "part",
    [
        section(tp=2, ep=2, tied=True, experts=4, recompute=True),
        section(pp=2, ep=2, tied=True, experts=4, schedule="gpipe"),
        section(tp=2, pp=2, schedule="interleaved", experts=2, recompute=True),
    ],
)
def test_grid_mixtures_have_the_gradients_of_one_process(tmp_path: Path, part: dict[str, Any]) -> None:
    outcome = train(tmp_path / "run", 2, 4, [part], ["2:1.2:in-reduce"])
    check(outcome, tmp_path / "run", [part], lost={1})
