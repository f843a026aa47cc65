"""Runs with deaths are computed again bit by bit, and two runs are told apart by their records."""

from __future__ import annotations

import json
import random
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
from training import Trained, small_world, train
from typer.testing import CliRunner

from recover.cli import app
from recover.job.config_keys import read
from recover.train.config import parse
from recover.train.streams import open_streams

STEPS, BATCH = 7, 6


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    world = small_world(tmp_path_factory.mktemp("world"))
    return [*world, "reduction=reproducible", "checkpoint.every=4", f"steps={STEPS}"]


@pytest.fixture(scope="module")
def struck(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Three replicas, of which two die."""
    place = tmp_path_factory.mktemp("struck") / "run"
    run = train(place, *words, "replicas=3", "accum=2", kills=["2:1:in-reduce", "6:0:vote"])
    assert run.code == 0, run.output
    return run


def recover(*arguments: object) -> tuple[int, str]:
    told = CliRunner().invoke(app, [*map(str, arguments)])
    return told.exit_code, told.output


@pytest.mark.guarantee(
    "Replay", "Any step of a run with deaths is computed again by one replica with the same bits."
)
def test_run_with_deaths_is_replayed_bit_by_bit(struck: Trained, tmp_path: Path) -> None:
    """From a checkpoint; and the last step from the parameters in the summary."""
    assert "step-4" in struck.checkpoints
    code, told = recover(
        "replay", struck.run_dir, "--step", 5, "--until", STEPS, "--output", tmp_path / "again"
    )
    assert code == 0, told
    assert "from checkpoint step-4" in told
    assert f"steps 5 to {STEPS}: bitwise equal" in told
    again = [json.loads(line) for line in (tmp_path / "again/steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in again] == [5, 6, 7]
    assert {line["replicas"] for line in again} == {1}
    assert not (tmp_path / "again/checkpoints").exists()


def test_slot_of_a_step_is_computed_alone(struck: Trained) -> None:
    code, told = recover("replay", struck.run_dir, "--step", 5, "--slot", 3)
    assert code == 0, told
    assert f"slot 3 of step 5 is microbatch {4 * BATCH + 3}: loss " in told
    code, told = recover("replay", struck.run_dir, "--step", 5, "--slot", 3, "--until", 6)
    assert code == 2
    assert "leave --until out" in told


@pytest.mark.guarantee(
    "Replay",
    "`recover audit` finds a step whose record differs, and its report has the SHA-256 that it tells.",
)
def test_audit_finds_a_step_that_was_not_computed_so(struck: Trained, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(struck.run_dir, copy)
    lines = struck.steps
    lines[5]["parameters_before"] = "0" * 32  # as if the update of step 5 had gone wrong
    (copy / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    seed = next(n for n in range(1000) if sorted(random.Random(n).sample(range(1, STEPS + 1), 2)) == [3, 5])
    code, told = recover("audit", copy, "--segments", 2, "--seed", seed)
    assert code == 1, told
    report = copy / f"audit-{seed}.json"
    found = json.loads(report.read_text())
    segments = [(each["first"], each["last"], each["equal"]) for each in found["segments"]]
    assert segments == [(1, 3, True), (5, 5, False)]
    digest = sha256(report.read_bytes()).hexdigest()
    assert f"SHA-256 {digest}" in told
    assert (copy / f"{report.name}.sha256").read_text() == f"{digest}  {report.name}\n"


@pytest.mark.guarantee(
    "Replay", "Two runs that differ in one sample, or in one key, are told apart by the step and the cause."
)
def test_bisect_names_an_altered_sample_and_an_altered_key(
    struck: Trained, words: list[str], tmp_path: Path
) -> None:
    """One byte of a microbatch of step 5, and the limit of the gradient norm."""
    stream = open_streams(parse(read(words)))[0]
    text = bytes(stream[4 * BATCH + 2]["tokens"].flatten().tolist())
    corpus = Path(next(word for word in words if word.startswith("data.path=")).partition("=")[2])
    content = corpus.read_bytes()
    assert content.count(text) == 1
    altered = tmp_path / "altered.txt"
    place = content.index(text) + len(text) // 2
    altered.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    sampled = train(tmp_path / "sampled", *words, f"data.path={altered}", "replicas=2", "accum=3")
    assert sampled.code == 0, sampled.output
    code, told = recover("bisect", struck.run_dir, sampled.run_dir)
    assert code == 1
    assert "first difference in step 5 (samples)" in told
    assert "data.path" in told

    clipped = train(tmp_path / "clipped", *words, "clip=0.5", "replicas=2", "accum=3", "steps=7")
    assert clipped.code == 0, clipped.output
    code, told = recover("bisect", struck.run_dir, clipped.run_dir)
    assert code == 1
    assert "(parameters): the update of step" in told
    assert "differs, too: clip: 1.0 against 0.5" in told
