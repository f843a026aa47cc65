"""Lightning on ReCoVer against Lightning alone, on CPUs: losses, rates, data, checkpoints, logs and callbacks through
deaths.

Lightning alone accumulates six batches in one process; here a step has the same six microbatches. An epoch has eight
steps, and its data are shuffled again.
"""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
from pl_runs import PROGRAMS, Lightning, Run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

STEPS, MIDDLE = 30, 15  # step 15 is the seventh of the second epoch
CLIPPED = ["--steps", str(STEPS), "--trainer", '{"gradient_clip_val": 0.5}']
WITHIN = 1e-5


@pytest.fixture(scope="module")
def lightning(tmp_path_factory: pytest.TempPathFactory) -> Lightning:
    return Lightning(tmp_path_factory.mktemp("lightning"))


@pytest.fixture(scope="module")
def stock(lightning: Lightning) -> Run:
    run = lightning.stock("stock", CLIPPED)
    assert run.code == 0, run.output
    assert list(run.losses) == list(range(1, STEPS + 1))
    return run


@pytest.fixture(scope="module")
def deaths(lightning: Lightning) -> Run:
    """Three replicas: one dies in a reduction, the first one while it writes the checkpoint of step 15."""
    arguments = [*CLIPPED, "--kill-writer", str(MIDDLE)]
    run = lightning.recover("deaths", 3, arguments, kills=["7:1:in-reduce"])
    assert run.code == 0, run.output
    return run


@pytest.fixture(scope="module")
def rejoined(lightning: Lightning) -> Run:
    """Two replicas: the first one dies, rejoins in the second epoch, and then the other one dies for good."""
    arguments = [*CLIPPED, "--wait", "12", "--workers", "1"]
    kills = ["7:0:backward", "21:1:vote"]
    run = lightning.recover("rejoined", 2, arguments, ["--return"], kills)
    assert run.code == 0, run.output
    assert "joined" in run.output
    return run


@pytest.fixture(scope="module")
def resumed_alone(lightning: Lightning, stock: Run) -> Run:
    """Lightning alone from its checkpoint of step 15. It shuffles the rest of that epoch's data again."""
    resume = ["--resume", str(stock.out / "checkpoints" / f"step={MIDDLE}.ckpt")]
    run = lightning.stock("resumed-alone", [*CLIPPED, *resume])
    assert run.code == 0, run.output
    return run


def check(run: Run, expected: Run, steps: range) -> None:
    assert run.code == 0, run.output
    assert list(run.losses) == list(steps), run.output
    for ours, theirs in ((run.losses, expected.losses), (run.rates, expected.rates)):
        assert list(ours.values()) == pytest.approx([theirs[step] for step in steps], rel=WITHIN)
    both = run.validations.keys() & expected.validations.keys()
    assert both == {step for step in expected.validations if step in steps}
    for step in both:
        assert run.validations[step] == pytest.approx(expected.validations[step], rel=WITHIN)


@pytest.mark.guarantee(
    "User code",
    "Lightning keeps the losses, learning rates and validation losses of one process to 1e-5 through deaths.",
)
@pytest.mark.parametrize("which", ["deaths", "rejoined"])
def test_lightning_keeps_its_losses_through_deaths(
    stock: Run, which: str, request: pytest.FixtureRequest
) -> None:
    """30 steps over four shuffled epochs, with a schedule and validation."""
    run: Run = request.getfixturevalue(which)
    check(run, stock, range(1, STEPS + 1))
    assert set(run.validations) == set(stock.validations) == {8, 16, 24}
    assert {end["step"] for end in run.ends} == {STEPS}
    assert {end["epoch"] for end in run.ends} == {stock.ends[0]["epoch"]}


@pytest.mark.guarantee(
    "User code", "A logger of Lightning has each line once, after the death of the replica that wrote, too."
)
@pytest.mark.parametrize("which", ["deaths", "rejoined"])
def test_every_line_of_the_log_is_written_once(
    stock: Run, which: str, request: pytest.FixtureRequest
) -> None:
    run: Run = request.getfixturevalue(which)
    for name in ("train_loss_epoch", "accuracy", "val_loss"):
        ours, theirs = run.column(name), stock.column(name)
        assert [step for step, _ in ours] == [step for step, _ in theirs], name
        # After the vote a dead replica has contributed to the step, and cannot say what else it logged.
        within = 0.1 if (which, name) == ("rejoined", "accuracy") else WITHIN
        assert [v for _, v in ours] == pytest.approx([v for _, v in theirs], rel=within)
    # Lightning alone logs the last microbatch of a step; here it is the mean of all of them.
    logged = run.column("train_loss_step")
    assert [step for step, _ in logged] == list(range(STEPS))
    assert [loss for _, loss in logged] == pytest.approx(list(run.losses.values()), rel=1e-6)
    assert len(run.column("lr-AdamW")) == STEPS
    norms = [(step, min(norm, 0.5)) for step, norm in stock.column("norm")]
    assert run.column("norm") == [(step, pytest.approx(norm, rel=1e-4)) for step, norm in norms]


def test_callbacks_are_called_for_each_step_on_each_replica(rejoined: Run) -> None:
    """A joining replica goes on with the counts of the others, a callback's own included."""
    for lines in rejoined.seen("step"):
        assert [line["count"] for line in lines] == [line["step"] for line in lines]
        assert [line["index"] for line in lines] == [(line["step"] - 1) % 8 for line in lines]
    joined = [lines for lines in rejoined.seen("step") if lines and lines[0]["step"] > 1]
    (lines,) = joined
    assert 13 <= lines[0]["step"] <= 16
    assert lines[-1]["step"] == STEPS
    saves = Counter(line["saved"] for lines in rejoined.seen("saved") for line in lines)
    assert sorted(saves) == list(range(5, STEPS + 1, 5))
    epochs = [line["epoch"] for lines in rejoined.seen("epoch") for line in lines]
    assert Counter(epochs) == {0: 3, 1: 2, 2: 2, 3: 1}  # a rejoining replica begins epoch 0 before it joins


def test_checkpoint_of_a_dead_writer_is_written_by_the_next(deaths: Run) -> None:
    assert deaths.saved == list(range(5, STEPS + 1, 5))
    assert (deaths.out / "died").exists()
    assert len(deaths.ends) == 1


def test_half_a_checkpoint_is_not_under_its_name(lightning: Lightning) -> None:
    """The only replica dies while it writes: `ckpt_path` finds what was complete before."""
    run = lightning.recover("half", 1, [*CLIPPED, "--kill-writer", "10"])
    assert run.code != 0, run.output
    assert [path.name for path in (run.out / "checkpoints").glob("*.ckpt")] == ["step=5.ckpt"]


@pytest.mark.guarantee(
    "User code",
    "Checkpoints of Lightning on ReCoVer and of Lightning alone resume each other, on any number of replicas.",
)
def test_recover_resumes_a_checkpoint_of_lightning(
    lightning: Lightning, stock: Run, resumed_alone: Run
) -> None:
    """On two replicas, one of which dies in a validation."""
    resume = ["--resume", str(stock.out / "checkpoints" / f"step={MIDDLE}.ckpt")]
    run = lightning.recover("from-stock", 2, [*CLIPPED, *resume, "--kill-validation", "24"])
    check(run, resumed_alone, range(MIDDLE + 1, STEPS + 1))
    assert len(run.ends) == 1


@pytest.mark.guarantee(
    "User code",
    "Checkpoints of Lightning on ReCoVer and of Lightning alone resume each other, on any number of replicas.",
)
def test_lightning_resumes_a_checkpoint_of_recover(
    lightning: Lightning, deaths: Run, resumed_alone: Run
) -> None:
    resume = ["--resume", str(deaths.out / "checkpoints" / f"step={MIDDLE}.ckpt")]
    run = lightning.stock("back", [*CLIPPED, *resume])
    check(run, resumed_alone, range(MIDDLE + 1, STEPS + 1))


@pytest.mark.guarantee(
    "User code",
    "A checkpoint of Lightning on ReCoVer inside an epoch resumes with the data that the epoch has left.",
)
def test_resumed_run_goes_on_inside_an_epoch(lightning: Lightning, stock: Run, deaths: Run) -> None:
    """On one replica instead of three: the losses are those of the run that was not interrupted."""
    resume = ["--resume", str(deaths.out / "checkpoints" / f"step={MIDDLE}.ckpt")]
    run = lightning.recover("resumed", 1, [*CLIPPED, *resume])
    check(run, stock, range(MIDDLE + 1, STEPS + 1))


@pytest.mark.parametrize("schedule", ["plateau", pytest.param("epoch", marks=pytest.mark.soak)])
def test_monitored_decisions_are_those_of_lightning(lightning: Lightning, schedule: str) -> None:
    """EarlyStopping, the best checkpoints and ReduceLROnPlateau, with one replica that joins and one that dies."""
    arguments = ["--epochs", "8", "--schedule", schedule, "--monitor", "val_loss", "--patience", "2"]
    arguments += ["--logger", "tensorboard"]
    alone = lightning.stock(f"alone-{schedule}", arguments)
    run = lightning.recover(
        f"monitored-{schedule}",
        2,
        [*arguments, "--wait", "8"],
        ["--return"],
        ["5:0:in-reduce", "15:1:update"],
    )
    check(run, alone, range(1, len(alone.losses) + 1))
    assert len(alone.losses) < 64  # early stopping ended it
    assert run.saved == alone.saved
    assert len(set(run.rates.values())) == len(set(alone.rates.values())) > 1
    for ours in run.ends:
        assert Path(ours["best"]).name == Path(alone.ends[0]["best"]).name
        assert ours["score"] == pytest.approx(alone.ends[0]["score"], rel=WITHIN)
    written: Counter[int] = Counter()
    for path in (run.out / "logs" / "version_0").glob("events*"):
        events = EventAccumulator(str(path))
        events.Reload()
        if "train_loss_step" in events.Tags()["scalars"]:
            written.update(scalar.step for scalar in events.Scalars("train_loss_step"))
    assert sorted(written) == list(range(len(alone.losses)))
    assert {step for step, count in written.items() if count > 1} <= {
        14
    }  # lines of a dead writer may be there twice
    assert [path.name for path in (run.out / "logs").iterdir()] == ["version_0"]


def test_first_stop_saves_after_the_step_and_resumes(lightning: Lightning, stock: Run) -> None:
    """SIGTERM to the launcher inside an epoch. `--resume last` finds what was saved."""
    name = "stopped"
    first = lightning.stopped(name, 2, CLIPPED)
    assert first.code == 128 + signal.SIGTERM, first.output
    assert "asked to stop after step" in first.output
    last = max(first.losses)
    assert last < STEPS
    assert (first.out / "checkpoints" / "last.ckpt").is_file()
    run = lightning.recover(name, 1, [*CLIPPED, "--resume", "last"])
    assert run.code == 0, run.output
    check(run, stock, range(1, STEPS + 1))


@pytest.mark.soak
def test_features_of_lightning_keep_their_values(lightning: Lightning) -> None:
    """Runs tests/programs/pl/pl_features.py. A replica joins in the first step of an epoch, another one raises."""
    alone = lightning.stock("features-alone", (), "pl_features.py")
    run = lightning.recover(
        "features",
        3,
        ["--wait", "7", "--fail", "22"],
        ["--return"],
        ["5:1:backward"],
        "pl_features.py",
    )
    check(run, alone, range(1, 41))
    assert "joined" in run.output
    assert "on purpose" in run.output
    assert run.saved == alone.saved
    for name in ("mean", "twice", "largest", "val_loss", "test_loss"):
        ours, theirs = run.column(name), alone.column(name)
        assert ours == [(step, pytest.approx(value, rel=WITHIN)) for step, value in theirs], name
    for end in run.ends:
        assert end == alone.ends[0] | {"tested": pytest.approx(alone.ends[0]["tested"], rel=WITHIN)}


def test_two_optimizers_step_together(lightning: Lightning) -> None:
    """Lightning alone refuses them in automatic optimization: against one process of ReCoVer."""
    arguments = ["--steps", "10", "--schedule", "two"]
    alone = lightning.recover("two-alone", 1, arguments)
    run = lightning.recover("two", 2, arguments, kills=["4:0:in-reduce"])
    check(run, alone, range(1, 11))
    assert set(alone.rates.values()) == {1e-2}  # in the first epoch


def test_scripts_without_the_adapter_are_told_of_it(lightning: Lightning) -> None:
    command = lightning.command("plain", 1, (), ())
    run = lightning.program("plain", [*command, str(PROGRAMS / "pl_plain.py")])
    told = "pl_plain.py makes a Trainer of Lightning without its adapter"
    assert run.output.count(told) == 1
    assert "RecoverStrategy(global_batch=...)" in run.output


REFUSED = {
    "manual": ("automatic_optimization is False", "return the loss from training_step"),
    "devices": ("devices is 2", "set devices=1, `recover run -n 2`"),
    "nodes": ("num_nodes is 2", "leave num_nodes out"),
    "accumulate": ("accumulate_grad_batches is 4", "RecoverStrategy(global_batch=...)"),
    "clip-value": ('gradient_clip_algorithm is "value"', '"norm"'),
    "scaler": ('precision is "16-mixed"', 'precision="bf16-mixed"'),
    "batchnorm": ("sync_batchnorm is True", "leave sync_batchnorm out"),
    "reload": ("reload_dataloaders_every_n_epochs is 1", "leave it out"),
    "clock": ("val_check_interval is 600 seconds", "a number of steps"),
    "asynchronous": ("AsyncCheckpointIO", "leave it out"),
    "optimizer-step": ("optimizer_step is overridden", "a scheduler"),
    "clipping-hook": ("configure_gradient_clipping is overridden", "gradient_clip_val"),
    "callback": ("GradientAccumulationScheduler", "leave it out"),
    "iterable": ("InOrder is read in order", "__len__ and __getitem__"),
    "worker-init": ("worker_init_fn is given", "__getitem__"),
    "remainder": ("4 batches", "drop_remainder=True"),
    "no-step": ("4 batches", "drop_remainder=True"),
    "several-loaders": ("several data loaders", "give one DataLoader"),
    "one-loader-in-a-dict": ("several data loaders", "give one DataLoader"),
    "none": ("training_step returned None", "return the loss"),
    "text": ("self.log('words')", "log a number"),
    "logger": ("a logger was called in training_step", "use self.log"),
    "signature": ("Strategy.barrier(self name)", "install lightning=="),
    "warning": ("was tested with lightning 2.0.0, not", ""),
}
ACCEPTED = ("plain", "dropped", "bf16", "untested")


def test_settings_that_cannot_work_are_refused_with_the_remedy(lightning: Lightning) -> None:
    run = lightning.program("refusals", [sys.executable, str(PROGRAMS / "pl_refusals.py")])
    lines = [json.loads(line) for line in run.output.splitlines() if line.startswith("{")]
    said = {line["name"]: line["said"] for line in lines}
    assert said.keys() == {*REFUSED, *ACCEPTED}, run.output
    assert {name: said[name] for name in ACCEPTED} == dict.fromkeys(ACCEPTED, "done")
    for name, words in REFUSED.items():
        for word in words:
            assert word in said[name], (name, said[name])


@pytest.mark.guarantee(
    "Verified gradients",
    "A replica of Hugging Face's Trainer or of Lightning whose device errs is evicted, and the step keeps its bits.",
)
def test_replica_that_errs_is_evicted_and_costs_no_bit_of_lightning(lightning: Lightning) -> None:
    """One replica's gradients of step 4 are always wrong; the reduced sum of another one is wrong in step 2.
    Microbatches that are computed only for comparison are not logged."""
    exact, arguments = {"reduction": "reproducible"}, ["--steps", "10"]
    calm = lightning.recover("unverified", 2, [*arguments, "--strategy", json.dumps(exact)])
    run = lightning.recover(
        "verified",
        3,
        [*arguments, "--strategy", json.dumps(exact | {"verify": 1})],
        kills=["2:0:reduced=corrupt:sum", "4:1:check=errs:1"],
    )
    assert (calm.code, run.code) == (0, 0), run.output
    assert "the reduced sums of rank 0 on" in run.output
    assert "replica 1 was evicted: its gradient of slot" in run.output
    assert {end["digest"] for end in run.ends} == {end["digest"] for end in calm.ends}
    assert run.losses == calm.losses
    assert run.column("accuracy") == calm.column("accuracy")
