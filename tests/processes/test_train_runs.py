"""`recover train` with real processes that die: its files are complete, and it trains as configured."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from launching import state_of
from patience import wait_until
from training import (
    INCIDENT_FIELDS,
    STEP_FIELDS,
    SUMMARY_FIELDS,
    check_lines,
    finish,
    small_world,
    start,
    train,
)

from recover.data import open_stream
from recover.job.config_keys import read_words
from recover.runs.records.job_log import job_lines
from recover.runs.writing.run_records import data_digest
from recover.train.config import parse
from recover.train.learning_rate import lr_factor
from recover.train.model_shape import shape_of
from recover.train.models import Llama
from recover.train.optimizer import make_optimizer

PLACES = ("forward", "backward", "bucket", "in-reduce", "vote", "update", "after-update", "advance")


@pytest.mark.guarantee(
    "The trainer",
    "A run that loses four of five replicas, two of them writers, records B microbatches in every step.",
)
@pytest.mark.guarantee("The trainer", "No record line is lost, doubled or torn when the writer dies.")
def test_run_survives_four_of_five_deaths_with_B_microbatches_per_step(tmp_path: Path) -> None:
    """The writer is among the dead, and so is the rank that writes after it: that one dies after its last commit,
    before it can record it."""
    words = [
        *small_world(tmp_path),
        "replicas=5",
        "accum=4",
        "steps=12",
        "eval.every=5",
        "log.tensorboard=true",
    ]
    kills = ["3:1:in-reduce", "6:3:backward", "9:0:update", "12:2:advance"]
    run = train(tmp_path / "run", *words, kills=kills)
    assert run.code == 0, run.output
    check_lines(run, steps=12, batch=20)
    assert " ".join(run.steps[0]) == STEP_FIELDS
    assert {" ".join(line) for line in run.incidents} == {INCIDENT_FIELDS}
    assert " ".join(run.summary) == f"{SUMMARY_FIELDS} environment"
    assert (run.summary["replicas_end"], run.summary["failures"], run.summary["steps"]) == (1, 4, 12)
    assert [
        (i["step"], i["location"], i["dead_replicas"], i["extra_microbatches"]) for i in run.incidents
    ] == [
        (3, "in-reduce", [1], 4),
        (6, "backward", [3], 5),
        (10, "update", [0], 7),  # it died after the verdict on step 9: the others learn of it in the next
        (12, "advance", [2], 0),
    ]
    for step, line in enumerate(run.steps):
        assert line["data_digest"] == data_digest(range(step * 20, step * 20 + 20))
    assert [line["step"] for line in run.steps if "heldout_loss" in line] == [5, 10]
    assert (
        "step 3: lost replica 1 (in-reduce: rank 1 struck as scheduled (3:1.0:in-reduce)); rep" in run.output
    )
    assert "committed with 20 of 20 on 2 replicas" in run.output
    assert "step 12: lost replica 2" in run.output
    assert (run.run_dir / "config.yaml").exists()
    assert len(list((run.run_dir / "tensorboard").iterdir())) == 3
    goodput, start = run.summary["goodput"], job_lines(run.run_dir)[0]["at"]
    assert sum(goodput["parts_ms"].values()) == goodput["total_ms"]
    assert goodput["total_ms"] == 5 * round(1e3 * (goodput["until"] - start)), "not all time since the start"
    for part in (
        "computing",
        "exchange",
        "start_up",
        "waiting",
        "repair",
        "redone",
        "evaluation",
        "lost_capacity",
    ):
        assert goodput["parts_ms"][part] > 0, part


@pytest.mark.guarantee("The trainer", "No record line is lost, doubled or torn when the writer dies.")
@pytest.mark.soak  # tests/simulated shows the same
@pytest.mark.parametrize("seed", [1, 2])
def test_record_lines_survive_repeated_deaths_of_the_writer(tmp_path: Path, seed: int) -> None:
    """Each replica dies when it is the writer; the last one after its last commit, before it can record it."""
    steps, draw = 11, random.Random(seed)
    kills = [f"{2 * writer + draw.choice((1, 2))}:{writer}:{draw.choice(PLACES)}" for writer in range(4)]
    kills.append(f"{steps}:4:{'advance' if seed == 1 else 'after-update'}")
    words = [*small_world(tmp_path), "replicas=6", "accum=2", f"steps={steps}"]
    run = train(tmp_path / "run", *words, kills=kills)
    assert run.code == 0, run.output
    check_lines(run, steps=steps, batch=12)
    assert (run.summary["failures"], run.summary["replicas_end"]) == (5, 1), f"{kills}\n{run.output}"
    assert sum(len(line["dead_replicas"]) for line in run.incidents) == 5
    assert f"step {steps}: lost replica 4" in run.output
    assert [line["data_digest"] for line in run.steps] == [
        data_digest(range(step * 12, step * 12 + 12)) for step in range(steps)
    ]


@pytest.mark.guarantee("The trainer", "No record line is lost, doubled or torn when the writer dies.")
@pytest.mark.soak
def test_record_lines_survive_fifty_random_deaths_of_the_writer(tmp_path: Path) -> None:
    """The current writer is killed from outside, at any moment of a step, five times in a run."""
    words, draw, killed = small_world(tmp_path), random.Random(0), 0
    for number in range(10):
        run_dir = tmp_path / f"run-{number}"
        process = start(run_dir, *words, "replicas=6", "accum=2", "steps=150", "checkpoint.every=20")
        for writer in range(5):
            wait_until((run_dir / "steps.jsonl").exists)
            time.sleep(0.05 + draw.random() * 0.25)
            if pid := _rank(process, writer):
                os.kill(pid, signal.SIGKILL)
                killed += 1
        run = finish(process, run_dir)
        assert run.code == 0, run.output
        check_lines(run, steps=150, batch=12)
        assert all(
            line["data_digest"] == data_digest(range(12 * i, 12 * i + 12)) for i, line in enumerate(run.steps)
        )
    assert killed >= 45


@pytest.mark.guarantee("The trainer", "Partitioned samples are never used twice.")
@pytest.mark.soak  # tests/simulated/test_simulated_joins.py shows the same without the trainer
def test_partitioned_samples_are_used_once_and_only_dead_ones_drop_out(tmp_path: Path) -> None:
    words = [
        *small_world(tmp_path),
        "replicas=4",
        "accum=4",
        "steps=8",
        "policy=static",
        "samples=partitioned",
        "optimizer=sgd",
    ]
    run = train(tmp_path / "run", *words, kills=["3:1:in-reduce", "6:3:backward"])
    assert run.code == 0, run.output
    check_lines(run, steps=8, batch=16)
    drawn = {
        rank: [s for step in sorted(by_step) for s in by_step[step]]
        for rank in range(4)
        if (by_step := run.samples(rank))
    }
    everything = [sample for samples in drawn.values() for sample in samples]
    assert len(everything) == len(set(everything)) == 8 * 16
    for rank, samples in drawn.items():  # in order and without a gap, until the replica dies
        assert samples == [rank + 4 * i for i in range(len(samples))]
    assert [len(drawn[rank]) for rank in (1, 3)] == [
        4 + 4,
        4 + 4 + (4 + 1) + 4 + 4,
    ]  # one extra; then the minor of three
    for line in run.steps:
        together = [s for rank in range(4) for s in run.samples(rank).get(line["step"], [])]
        assert line["data_digest"] == data_digest(together)


@pytest.mark.guarantee("The trainer", "A death during a checkpoint leaves the previous one usable.")
@pytest.mark.usefixtures("every_checkpoint_is_awaited")
def test_death_during_a_checkpoint_leaves_the_previous_one_usable(tmp_path: Path) -> None:
    """Then the last replica is lost too, and another number of replicas resumes: same B, same LR, the next data."""
    words = [
        *small_world(tmp_path),
        "replicas=3",
        "accum=4",
        "steps=9",
        "checkpoint.every=2",
        "checkpoint.keep=9",
    ]
    calm = train(tmp_path / "calm", *words, "replicas=1", "accum=12")
    kills = ["4:0:checkpoint", "8:1:vote", "8:2:vote"]
    lost = train(tmp_path / "run", *words, kills=kills)
    assert lost.code == 1, lost.output
    assert lost.checkpoints == ["step-2", "step-5", "step-6"]  # instead of 4: its writer died
    check_lines(lost, steps=7, batch=12)
    assert f"--resume {lost.run_dir}` goes on from step 7" in lost.output

    again = train(
        lost.run_dir, "replicas=2", "checkpoint.keep=1", resume=lost.run_dir, kills=["8:0:backward"]
    )
    assert again.code == 0, again.output
    check_lines(again, steps=9, batch=12)
    for resumed, reference in zip(again.steps, calm.steps, strict=True):
        assert resumed["data_digest"] == reference["data_digest"]
        assert resumed["lr"] == pytest.approx(reference["lr"], rel=1e-12)
        assert resumed["loss"] == pytest.approx(reference["loss"], rel=1e-4)
    assert (again.summary["replicas_start"], again.summary["failures"]) == (
        2,
        2,
    )  # without the deaths that ended the first run
    assert again.checkpoints == ["step-9"]


@pytest.mark.guarantee("The trainer", "A stopped run resumes with the bits of an unstopped run.")
def test_stopped_run_resumes_with_the_bits_of_an_unstopped_run(tmp_path: Path) -> None:
    """A rank gets the signal and all stop after the same step; then Ctrl-C reaches the launcher and all that shares its
    terminal. The end is the same bit for bit."""
    words = [*small_world(tmp_path), "replicas=2", "accum=2", "lr=0.1", "warmup_steps=1000"]
    run_dir = tmp_path / "run"

    process = start(run_dir, *words, "steps=100000")  # it cannot be over before the signals come
    assert wait_until(lambda: _steps(run_dir) >= 5)
    os.kill(_rank(process, 1), signal.SIGUSR1)
    first = finish(process, run_dir)
    assert first.code == 0, first.output
    reached = first.summary["steps"]
    assert reached >= 5
    assert first.checkpoints == [f"step-{reached}"]
    assert f"stopped after step {reached} as asked" in first.output
    assert f"goes on from step {reached + 1}" in first.output

    process = start(run_dir, resume=run_dir)
    assert wait_until(lambda: _steps(run_dir) >= reached + 5)
    assert state_of(run_dir) == "running"
    os.killpg(process.pid, signal.SIGINT)
    second = finish(process, run_dir)
    assert second.code == 128 + signal.SIGINT, second.output
    assert (
        "SIGINT: finishing the step and saving a checkpoint; once more ends the job at once" in second.output
    )
    assert second.summary["steps"] > reached
    stopped = second.summary["steps"]
    assert f"`recover train --resume {run_dir}` goes on from step {stopped + 1}" in second.output
    assert state_of(run_dir) == f"stopped by SIGINT after step {stopped}"
    assert not (run_dir / "page.url").exists()

    last = second.summary["steps"] + 5
    third = train(run_dir, f"steps={last}", resume=run_dir)
    assert third.code == 0, third.output
    whole = train(tmp_path / "whole", *words, f"steps={last}")
    check_lines(third, steps=last, batch=4)
    assert [line["loss"] for line in third.steps] == [line["loss"] for line in whole.steps]
    assert third.summary["parameters_digest"] == whole.summary["parameters_digest"]


def test_second_signal_ends_the_run_at_once(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    # No step of this run ends before the second signal.
    process = start(run_dir, *small_world(tmp_path), "replicas=2", "accum=2", "pace=1000")
    assert wait_until(lambda: _rank(process, 1))
    assert wait_until(lambda: (run_dir / "config.yaml").exists())
    process.send_signal(signal.SIGTERM)
    assert wait_until(lambda: (run_dir / "stop").exists())
    process.send_signal(signal.SIGTERM)
    run = finish(process, run_dir)
    assert run.code == 128 + signal.SIGTERM, run.output
    assert wait_until(lambda: not _ranks(process))
    assert "ended by SIGTERM before its first step; there is no checkpoint to go on from" in run.output
    assert state_of(run_dir) == "ended by SIGTERM before its first step"
    assert not (run_dir / "page.url").exists()


def plain_losses(words: list[str]) -> list[float]:
    """The same training by one process in a plain loop: no step, no world, nothing that could fail."""
    config = parse(read_words(words))
    stream = open_stream(
        config.data.path, config.tokenizer, config.seq_len, config.microbatch_size, config.seed
    )
    torch.manual_seed(config.seed)
    model = Llama(shape_of(config, stream.vocab))
    optimizer = make_optimizer(config, model)
    losses = []
    for step in range(config.steps):
        optimizer.param_groups[0]["lr"] = config.lr * lr_factor(config, step)
        total = 0.0
        for sample in range(step * config.global_batch, (step + 1) * config.global_batch):
            loss = model(**stream[sample]) / config.global_batch
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def smooth(losses: list[float], window: int = 10) -> np.ndarray:
    return np.convolve(losses, np.ones(window) / window, mode="valid")


@pytest.mark.guarantee(
    "The trajectory",
    "A run with `reduction=fast` and deaths uses the same samples in every step, and its losses differ by "
    "at most 1e-4.",
)
def test_loss_curve_of_a_run_with_deaths_matches_a_failure_free_run(tmp_path: Path) -> None:
    """The failure-free run is one process: the same samples in every step, the same losses but for rounding. That is
    closer than failure-free runs on other data are to each other. With `policy=adaptive` batches become smaller."""
    words = [*small_world(tmp_path), "steps=24", "replicas=4", "accum=4"]
    losses = [plain_losses([*words, f"seed={seed}"]) for seed in range(2)]
    calm = [smooth(each) for each in losses]
    noise = np.abs(calm[0] - calm[1]).mean()
    rough = train(tmp_path / "rough", *words, kills=["6:1:in-reduce", "12:0:vote", "18:3:backward"])
    assert rough.code == 0, rough.output
    check_lines(rough, steps=24, batch=16)
    assert rough.summary["replicas_end"] == 1
    for step, line in enumerate(rough.steps):
        assert line["data_digest"] == data_digest(range(step * 16, step * 16 + 16))
        assert abs(line["loss"] - losses[0][step]) <= 1e-4 * losses[0][step], line
    told = [line["loss"] for line in rough.steps]
    assert told != losses[0]  # summed in another order: only reduction=reproducible has the same bits
    assert np.abs(smooth(told) - calm[0]).mean() <= min(noise, 1e-4)
    kills = ["2:1:in-reduce", "4:0:update", "6:2:vote"]
    shrinking = train(tmp_path / "adaptive", *words, "steps=8", "policy=adaptive", kills=kills)
    assert shrinking.code == 0, shrinking.output
    check_lines(shrinking, steps=8, batch=None)
    assert [shrinking.steps[i]["microbatches"] for i in (0, 2, 4, 7)] == [16, 12, 8, 4]


def _steps(run_dir: Path) -> int:
    path = run_dir / "steps.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _ranks(process: subprocess.Popen[str]) -> dict[int, int]:
    """The pids of a run's ranks, by rank."""
    mark = f"RECOVER_JOB=/dev/shm/recover-{process.pid}-".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
                if mark in environment and b"recover.launch.bootstrap" in (entry / "cmdline").read_bytes():
                    for setting in environment.split(b"\0"):
                        if setting.startswith(b"OMPI_COMM_WORLD_RANK="):
                            found[int(setting.partition(b"=")[2])] = int(entry.name)
            except OSError:
                pass  # gone meanwhile
    return found


def _rank(process: subprocess.Popen[str], rank: int) -> int:
    return _ranks(process).get(rank, 0)


@pytest.mark.guarantee(
    "Faults, hangs and stragglers",
    "The first skipped step is reported with its number, the reason and its samples; `skip_limit` skipped steps in "
    "a row end the run on all replicas in the same step.",
)
@pytest.mark.soak  # tests/processes/test_raised_exceptions.py shows the same for a script
def test_training_that_only_skips_steps_ends_after_skip_limit(tmp_path: Path) -> None:
    words = [*small_world(tmp_path), "steps=20", "replicas=2", "optimizer=sgd", "lr=1e30", "clip=null"]
    run = train(tmp_path / "run", *words, "warmup_steps=0", "skip_limit=3")
    assert run.code == 4, run.output
    assert [line.get("skipped", False) for line in run.steps] == [False, True, True, True]
    assert "3 steps in a row were skipped, the last is step 4 (skip_limit=3)" in run.output
