"""Files of benchmarks, with the versions that git and mpirun report: once, and again after an interruption."""

from __future__ import annotations

import functools
import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from recover_lab.bench import suite
from recover_lab.bench.measure import BenchmarkError, begin, write
from recover_lab.bench.multi import read_known
from recover_lab.bench.sweep import compare_with_arithmetic, costs_of
from recover_lab.peers.scene import Scene

from recover.job import machine as machines


def test_arithmetic_benchmark_reuses_the_costs_of_one_duel(tmp_path: Path) -> None:
    scene = Scene(replicas=4, kills=((24, 1),))
    theirs = {"save_every": 4, "costs": {"step": 1.0, "save": 0.5, "stall": 8.0}, "ratios": [1.9]}
    duel = {
        "scene": scene.to_json(),
        "interval": 16,
        "ours": {"recovery": 0.2, "steps_of": {4: 1.0, 3: 1.4}},
        "baselines": [theirs],
    }
    known = tmp_path / "multi-ddp.json"
    assert read_known("multi", scene, known) is None
    begin(known)
    write(known, {"multi": duel})
    found = read_known("multi", scene, known)
    assert found is not None
    assert read_known("multi", scene.but(pace=1.0), known) is None
    assert read_known("multi", scene.but(tp=2), known) is None
    assert read_known("breakdown", scene, known) is None
    (point,) = compare_with_arithmetic(costs_of(found), duel)
    # 16 steps, the 4 from the last checkpoint to the failure again, 4 saves, a stall; against 16 slower steps.
    assert point["predicted"] == pytest.approx((16 + 4 + 2 + 8) / (16 * 1.4 + 0.2) * 4 / 3)
    assert (point["measured"], point["share"], point["alive"]) == (1.9, 0.5, 3)


def test_bench_all_continues_after_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def measure(name: str, path: Path) -> None:
        called.append(name)
        begin(path)
        if name == "second" and called.count(name) == 1:
            raise BenchmarkError("a rank was lost")
        write(path, {"nothing": 1})

    names = ("first", "second", "third")
    parts = {name: functools.partial(measure, name) for name in names}
    monkeypatch.setattr(suite, "parts", lambda long: parts)
    assert suite.bench_all(tmp_path, fresh=False, long=False) == 1
    assert called == [*names]  # a part that fails does not stop the others
    assert suite.bench_all(tmp_path, fresh=False, long=False) == 0
    assert called == [*names, "second"]
    assert suite.bench_all(tmp_path, fresh=True, long=False) == 0
    assert called == [*names, "second", *names]
    assert (tmp_path / "index.html").exists()


@pytest.mark.guarantee(
    "Published figures",
    "A benchmark that cannot write its figures measures nothing, and missing package metadata loses none.",
)
def test_figures_are_written_without_package_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(machines, "version", version)
    suite.bench_collectives([1], [0.01], 2, tmp_path / "new" / "collectives.json")
    found = json.loads((tmp_path / "new" / "collectives.json").read_text())
    assert found["machine"]["torch"] == found["machine"]["recover"] == "not installed"
    assert found["collectives_ms"]["1"]
    assert "torch not installed" in " ".join(capfd.readouterr().out.split())
