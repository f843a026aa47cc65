"""`recover bench gpu` where there is no GPU: it says so, and its programs are tried on the CPU; so is the doctor's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from recover_lab.bench.figures import FIGURES
from recover_lab.bench.gpu import bench_gpu
from recover_lab.bench.measure import BenchmarkError
from recover_lab.peers.kills import judge_launch
from recover_lab.publish.page import build

from recover.launch.doctor import checks


@pytest.mark.guarantee(
    "On GPUs", "Every part of the GPU benchmark yields its figures, and a broken invariant yields none."
)
@pytest.mark.soak
def test_gpu_benchmark_yields_figures_for_every_part(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Turn by turn over one carrier; results are added to an existing file, and a part that fails costs no other."""
    output = tmp_path / "gpu.json"
    bench_gpu(["tiny"], ["mpi"], 2, 3, 3, 1, ["step", "kill"], "cpu", output)
    with pytest.raises(
        BenchmarkError, match=r"not measured: reduce pigeon \(.*; all other results are written"
    ):
        bench_gpu(["tiny"], ["pigeon", "gloo"], 2, 2, 3, 1, ["reduce"], "cpu", output)
    found = json.loads(output.read_text())["gpu"]

    step = found["step"]["tiny"]["mpi"]
    assert step["milliseconds"].keys() == {"alone", "stock gloo", "ours"}
    assert all(facts["n"] == 3 for facts in step["milliseconds"].values())
    assert step["turn_by_turn"]
    for ratio in step["ours_against"].values():
        assert 0 < ratio["low"] <= ratio["value"] <= ratio["high"]

    kill = found["kill"]["mpi"]
    assert (kill["deaths"], kill["microbatches"], kill["replicas"]) == (1, 12, 3)
    whole, parts = kill["kill_to_commit_ms"]["median"], kill["parts_ms"]
    assert parts.keys() == {"notice", "drain", "repair", "restore", "redo"}
    assert 0 < sum(part["median"] for part in parts.values()) <= whole + 1
    assert kill["less_redone_ms"]["median"] < whole

    sums = found["reduce"]["gloo"]["gigabytes_per_second"]
    assert {(size, way) for size, ways in sums.items() for way in ways} == {
        (size, way) for size in ("1", "4") for way in ("ours", "stock gloo")
    }
    page = build(tmp_path, FIGURES).read_text()
    assert "SIGKILL inside a reduction to the commit, tiny, 3 replicas" in page
    assert "sum of 4 MB" in capfd.readouterr().out


@pytest.mark.soak
def test_gpu_benchmark_measures_variants_in_blocks_when_memory_is_short(tmp_path: Path) -> None:
    found = bench_gpu(["tiny"], ["gloo"], 2, 3, 4, 1, ["step"], "cpu", tmp_path / "gpu.json")
    step = found["step"]["tiny"]["gloo"]
    assert not step["turn_by_turn"]
    assert {facts["n"] for facts in step["milliseconds"].values()} == {4}


def test_gpu_benchmark_reports_a_lost_launch_and_counts_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[str] = []

    @contextmanager
    def launched(program: Path, ranks: int, words: list[str], *_: Any, **__: Any) -> Iterator[Path]:
        seeds.append(words[-1])
        if words[-1] == "1":
            raise BenchmarkError("a bystander was lost")
        place = tmp_path / words[-1]
        place.mkdir()
        (place / "killed-4").write_text("10.0")
        for rank in (0, 2):
            calm = {"step": 5, "seconds": 0.1, "microbatches": 12, "incidents": []}
            facts = survivor(card="CPU", cards=0, nccl="")
            facts["rows"].append(calm)
            (place / f"rows-{rank}.json").write_text(json.dumps(facts))
        yield place

    monkeypatch.setattr("recover_lab.bench.kills.launch_program", launched)
    output = tmp_path / "gpu.json"
    with pytest.raises(BenchmarkError, match=r"a launch of kill mpi \(a bystander was lost"):
        bench_gpu(["tiny"], ["mpi"], 2, 3, 3, 3, ["kill"], "cpu", output)
    kill = json.loads(output.read_text())["gpu"]["kill"]["mpi"]
    assert seeds == ["0", "1", "2"]
    assert (kill["deaths"], kill["launches"], kill["broken"]) == (2, 3, ["a bystander was lost"])


def survivor(**facts: Any) -> dict[str, Any]:
    incident = {
        "noticed_at": 10.02,
        "detect": 0.03,
        "repair": 0.04,
        "restore": 0.001,
        "redo": 0.1,
        "discarded": 0,
    }
    row = {
        "step": 4,
        "committed": 10.2,
        "microbatches": 12,
        "redone": 0.05,
        "incidents": [incident],
    }
    same = {"batch": 12, "left": [0, 2], "expected": [0, 2], "digest": "d"}
    return {**same, "rows": [{**row, **facts.pop("row", {})}], **facts}


def test_gpu_benchmark_times_a_death_by_its_slowest_survivor() -> None:
    (sample,) = judge_launch([survivor(), survivor(row={"committed": 10.25})], {4: 10.0})
    assert sample == pytest.approx(
        {
            "whole": 0.25,
            "less_redone": 0.2,
            "notice": 0.02,
            "drain": 0.03,
            "repair": 0.04,
            "restore": 0.001,
            "redo": 0.1,
            "discarded": 0,
        }
    )


@pytest.mark.guarantee(
    "On GPUs", "Every part of the GPU benchmark yields its figures, and a broken invariant yields none."
)
@pytest.mark.parametrize(
    ("other", "said"),
    [
        (survivor(row={"microbatches": 8}), r"committed on \[8, 12\] microbatches, not 12"),
        (survivor(left=[2]), "are left"),
        (survivor(digest="e"), "different parameters"),
        (survivor(row={"incidents": []}), "not noticed by all"),
    ],
)
def test_gpu_benchmark_publishes_no_figure_of_a_broken_invariant(other: dict[str, Any], said: str) -> None:
    with pytest.raises(BenchmarkError, match=said):
        judge_launch([survivor(), other], {4: 10.0})
    with pytest.raises(BenchmarkError, match="should be"):
        judge_launch([survivor()], {4: 10.0})


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        ([], "sees no CUDA device here (CUDA_VISIBLE_DEVICES is", 1),
        (["--carriers", "pigeon"], "--carriers: 'pigeon' must be one of", 2),
        (["--models", "2b"], "--models: '2b' must be one of", 2),
    ],
)
def test_gpu_benchmark_is_refused_without_a_gpu_or_with_wrong_arguments(
    words: list[str], said: str, code: int
) -> None:
    command = [sys.executable, "-m", "recover.cli", "bench", "gpu", "--carriers", "mpi", *words]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (answer.returncode, said in answer.stderr) == (code, True), answer.stderr


def test_doctor_gpu_probe_loses_a_rank_in_a_sum_and_sums_again() -> None:
    """On the CPU, with the carrier that it takes where ranks must share a GPU: it reports that NCCL was not tried."""
    finding = checks.gpu_test(checks.preflight.find_mpirun(), device="cpu")
    assert finding.status == "warn", finding
    assert "carrier mpi, cpu: the sum was right again after" in finding.seen
    assert "NCCL was not tried" in finding.seen
