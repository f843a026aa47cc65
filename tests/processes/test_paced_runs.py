"""Shares by speed on real processes: a slow replica runs less, and the bits are those of equal shares."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from causes_told import why
from test_rejoin import HSDP, LR, check_against_calm, kill, wait
from training import CAN_BE_CUT, finish, joins, losses, small_world, start, train

from recover.runs.records.json_lines import read

PIPELINE = ["parallel=3d", "pp=2"]


def last(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "steps.jsonl"
    lines = read(path).whole if path.exists() else []
    return lines[-1] if lines else {"shares": {}}


def is_relieved(shares: dict[str, int]) -> bool:
    """Whether replica 3, which takes six times as long, runs less than half of what replica 0 runs."""
    return 0 < 2 * shares.get("3", 0) < shares["0"] if shares else False


@pytest.mark.guarantee(
    "Paced shares",
    "With `policy=paced` and `reduction=reproducible` a run with slow replicas, deaths and joins has the bits of a "
    "run with equal shares.",
)
@pytest.mark.parametrize(
    "kind", ["ddp", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("hsdp", "pipeline"))]
)
def test_paced_run_has_the_bits_of_equal_shares(tmp_path: Path, kind: str) -> None:
    """A replica is slow, another one dies once the shares have followed, and a third one joins."""
    inside = {"ddp": [], "hsdp": HSDP, "pipeline": PIPELINE}[kind]
    shape = CAN_BE_CUT if kind == "pipeline" else {}
    words = [*small_world(tmp_path / "world", **shape), *inside, *LR, "reduction=reproducible"]
    run_dir = tmp_path / "run"
    many = ["policy=paced", "replicas=4", "accum=8", "steps=100000", "pace=0.01"]
    process = start(
        run_dir, *words, *many, "--return", "--return-delay=0", kills=["1:3:forward=slow:6"], quiet=True
    )
    wait(lambda: is_relieved(last(run_dir)["shares"]), "the slow replica is not relieved")
    kill(run_dir, 1 if kind == "ddp" else 2)
    wait(lambda: joins(run_dir) == 1, "nobody joins")
    wait(lambda: last(run_dir)["shares"].get("4", 0) > 1, "the joined replica runs nothing")
    process.send_signal(signal.SIGTERM)
    run = finish(process, run_dir)
    assert run.code == 0, run.run_dir
    assert all(sum(line["shares"].values()) == 32 for line in run.steps)
    assert [line.get("kind", "lost") for line in run.incidents] == ["lost", "joined"]
    check_against_calm(run, tmp_path / "calm", words, 32)


@pytest.mark.guarantee("Paced shares", "An evicted straggler is named with its factor, and the others go on.")
@pytest.mark.soak
def test_straggler_is_evicted_with_its_factor_as_the_reason(tmp_path: Path) -> None:
    words = [*small_world(tmp_path / "world"), *LR, "reduction=reproducible"]
    run_dir = tmp_path / "run"
    many = ["replicas=3", "accum=2", "steps=100000", "pace=0.02", "straggler.evict=4"]
    process = start(run_dir, *words, *many, kills=["1:2:forward=slow:9"], quiet=True)
    wait(lambda: losses(run_dir) == 1, "the straggler is not evicted")
    reached = last(run_dir)["step"]
    wait(lambda: last(run_dir)["step"] > reached + 20, "the others do not go on")
    process.send_signal(signal.SIGTERM)
    run = finish(process, run_dir)
    assert run.code == 0, run.run_dir
    (incident,) = run.incidents
    assert incident["dead_replicas"] == [2]
    assert "times as long as the others, and the limit is 4" in incident["evicted"]["2"]
    assert "times as long as the others" in why(run_dir)[0]["first"][0]["text"]
    assert run.steps[-1]["replicas"] == 2
    check_against_calm(run, tmp_path / "calm", words, 6)


def test_straggler_factor_below_two_is_refused(tmp_path: Path) -> None:
    run = train(tmp_path / "run", *small_world(tmp_path), "straggler.evict=1.5")
    assert run.code == 2
    assert "straggler.evict" in run.output
