"""`recover bench titan` on CPUs: a step against stock torchtitan, and a kill under both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recover_lab.bench.titan import TitanOptions, bench_titan
from recover_lab.peers.titan_runs import OURS, RESTART


@pytest.mark.soak
def test_titan_benchmark_measures_a_step_and_a_kill(tmp_path: Path) -> None:
    """ReCoVer runs nothing again, keeps the batch and has the losses of torchtitan alone."""
    output = tmp_path / "titan.json"
    options = TitanOptions("debug", 2, 1, 2, 3, 1, 1, 64, "cpu", "flex", "auto", ())
    bench_titan(options, ("step", "kill"), (OURS, RESTART), None, output)
    found = json.loads(output.read_text())["titan"]
    assert all(facts["n"] == 2 for facts in found["step"]["milliseconds"].values())
    ours, stock = found["kill"][OURS], found["kill"][RESTART]
    assert (ours["steps_run_again"], ours["sequences"]) == (0, [2])
    assert stock["steps_run_again"] > 0
    assert ours["seconds_to_full_strength"] >= ours["seconds_to_next_step"] > 0
    assert ours["difference"] < 1e-5
    assert ours["compared_steps"] > 15
