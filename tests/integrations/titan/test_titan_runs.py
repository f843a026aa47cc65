"""torchtitan on ReCoVer against torchtitan alone, on CPUs: losses, bits, data, checkpoints and metrics through deaths.

torchtitan alone runs on four data-parallel ranks, which read the data that the four slots of a step read here.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from titan_runs import Run, Titan
from wandb_files import histories

from recover.runs.records.json_lines import read

STEPS, HALF, BATCH = 20, 10, 4
LOSSES = "loss_metrics/global_avg_loss"


@pytest.fixture(scope="module")
def titan(tmp_path_factory: pytest.TempPathFactory) -> Titan:
    titan = Titan(tmp_path_factory.mktemp("titan"))
    titan.seed("llama3")
    return titan


@pytest.fixture(scope="module")
def stock(titan: Titan) -> Run:
    """torchtitan alone, which saves after steps 10 and 20."""
    run = titan.stock("stock", BATCH, "llama3")
    assert run.code == 0, run.output
    assert sorted(run.losses) == list(range(1, STEPS + 1))
    assert run.losses[STEPS] < 0.7 * run.losses[1]
    return run


@pytest.fixture(scope="module")
def deaths(titan: Titan) -> Run:
    """Four replicas; two die in steps, and the first one while it writes the checkpoint of step 10."""
    run = titan.recover(
        "deaths",
        4,
        "llama3",
        ["--metrics.enable-tensorboard", "--metrics.enable-wandb", "--recover.positions-every", "4"],
        kills=["3:1:backward", "6:2:in-reduce"],
        TITAN_KILL_WRITER=f"0:step-{HALF}",
        WANDB_MODE="offline",
    )
    assert run.code == 0, run.output
    return run


def check_losses(run: Run, stock: Run, steps: range, within: float = 1e-6) -> None:
    assert run.code == 0, run.output
    assert list(run.losses) == list(steps), run.output
    expected = [stock.losses[step] for step in steps]
    assert list(run.losses.values()) == pytest.approx(expected, rel=within), run.output


def from_checkpoint_of(titan: Titan, of: str, name: str) -> None:
    """Copy the checkpoint of step 10 of run `of` into the folder of run `name`."""
    step = Path("dump", "checkpoint", f"step-{HALF}")
    shutil.copytree(titan.place / of / step, titan.place / name / step)


@pytest.mark.guarantee(
    "User code",
    "torchtitan keeps its losses to 1e-6 through deaths at five places, on data read exactly once.",
)
def test_titan_has_the_losses_of_torchtitan_through_deaths(stock: Run, deaths: Run) -> None:
    check_losses(deaths, stock, range(1, STEPS + 1))
    (end,) = deaths.ends  # of four replicas
    assert end["step"] == STEPS
    # Tokens of all slots together; torchtitan alone counts those of one rank.
    assert end["tokens"] == BATCH * stock.ends[0]["tokens"]


def test_titan_writes_metrics_of_each_step_once(titan: Titan, deaths: Run) -> None:
    """The first replica dies after it has written step 10, before the others know: that step may be there twice."""

    def check(steps: list[int]) -> None:
        counts = Counter(steps)
        assert sorted(counts) == list(range(1, STEPS + 1))
        assert {step for step, count in counts.items() if count > 1} <= {HALF}

    check([line["step"] for line in deaths.lines])
    assert len(list(deaths.out.glob("metrics-*.jsonl"))) == 2  # the first replica, and its successor
    tokens = deaths.lines[0]["n_tokens_seen"]
    assert all(line["n_tokens_seen"] == tokens * line["step"] for line in deaths.lines)
    written: list[int] = []
    for folder in {path.parent for path in (titan.place / "deaths" / "dump" / "tb").rglob("events*")}:
        events = EventAccumulator(str(folder))
        events.Reload()
        written += [scalar.step for scalar in events.Scalars(LOSSES)]
    check(written)
    (run,) = {path.stem.removeprefix("run-") for path in (titan.place / "deaths").rglob("run-*.wandb")}
    begun = [[row["_step"] for row in rows] for rows in histories(titan.place / "deaths", run)]
    assert len(begun) == 2, "the run of the first replica, and its continuation by the next"
    # W&B writes by a process of its own: it may have had no time for the last rows of a killed replica.
    check([*range(1, len(begun[0]) + 1), *range(len(begun[0]) + 1, HALF), *begun[1]])
    assert begun[0] == list(range(1, len(begun[0]) + 1))


def test_checkpoint_of_a_dead_writer_is_written_again(titan: Titan, deaths: Run) -> None:
    """The first replica died between the data and the metadata, without which nothing loads."""
    ranks = titan.place / "deaths" / "run" / "ranks"
    assert not (ranks / "0.end").exists() or '"done"' not in (ranks / "0.end").read_text()
    folder = titan.place / "deaths" / "dump" / "checkpoint"
    assert [(folder / f"step-{step}" / ".metadata").is_file() for step in (HALF, STEPS)] == [True, True]


@pytest.mark.guarantee(
    "User code",
    "torchtitan keeps its losses to 1e-6 through deaths at five places, on data read exactly once.",
)
def test_titan_resumes_a_checkpoint_of_torchtitan(titan: Titan, stock: Run) -> None:
    """On three replicas, two of which die at two further places."""
    from_checkpoint_of(titan, "stock", "resumed")
    run = titan.recover("resumed", 3, "llama3", kills=["13:1:vote", "16:0:update"])
    check_losses(run, stock, range(HALF + 1, STEPS + 1))


def test_torchtitan_resumes_a_checkpoint_written_on_recover(titan: Titan, stock: Run, deaths: Run) -> None:
    from_checkpoint_of(titan, "deaths", "back")
    run = titan.stock("back", BATCH, "llama3", ["--training.steps", "14"])
    check_losses(run, stock, range(HALF + 1, 15))
    assert run.ends[0]["tokens"] * STEPS == stock.ends[0]["tokens"] * 14


def test_sharded_replicas_resume_a_checkpoint_of_whole_ones(titan: Titan, stock: Run, deaths: Run) -> None:
    """FSDP2: two replicas of two ranks, each with two loaders for a slot; one rank dies."""
    from_checkpoint_of(titan, "deaths", "sharded")
    run = titan.recover(
        "sharded",
        4,
        "llama3",
        ["--training.steps", "15"],
        options=["--replica-size", "2"],
        kills=["13:1.1:in-reduce"],
    )
    check_losses(run, stock, range(HALF + 1, 16))


def test_tensor_parallel_replicas_have_the_losses_of_torchtitan(titan: Titan, stock: Run) -> None:
    run = titan.recover(
        "tensor",
        4,
        "llama3",
        ["--training.steps", "5", "--parallelism.tensor-parallel-degree", "2"],
        options=["--replica-size", "2"],
        kills=["3:0.1:backward"],
    )
    check_losses(run, stock, range(1, 6))


@pytest.mark.guarantee(
    "User code",
    "Experts of torchtitan are balanced by the tokens of all microbatches of a step, whichever replica ran them.",
)
def test_experts_are_balanced_over_all_microbatches_of_a_step(titan: Titan) -> None:
    """With clipping that acts: norms of torchtitan on CPUs are 2e-4 low."""
    arguments = ["--training.steps", "6", "--training.max-norm", "0.5", "--training.global-batch-size", "2"]
    titan.seed("moe")
    alone = titan.stock("experts-alone", 2, "moe", arguments)
    run = titan.recover("experts", 2, "moe", arguments, kills=["4:1:in-reduce"])
    check_losses(run, alone, range(1, 7), within=1e-4)
    (ours,), (theirs,) = run.ends, alone.ends
    found, expected = ([value for layer in end["biases"] for value in layer] for end in (ours, theirs))
    assert found == pytest.approx(expected)
    assert len(set(found)) > 2  # the experts were balanced


@pytest.mark.guarantee(
    "User code", "A replica of torchtitan that returns ends with the bits of a run without deaths."
)
def test_replica_that_returns_ends_with_the_bits_of_the_calm_run(titan: Titan) -> None:
    arguments = ["--recover.reduction", "reproducible", "--training.steps", "40"]
    arguments += ["--recover.positions-every", "3"]
    calm = titan.recover("calm", 1, "llama3", arguments)
    assert calm.code == 0, calm.output
    for join in ("pause", "instalments"):
        run = titan.recover(
            f"returned-{join}",
            2,
            "llama3",
            [*arguments, "--recover.join", join],
            options=["--return"],
            kills=["3:1:backward"],
            TITAN_WAIT="1",
        )
        assert run.code == 0, run.output
        assert len(run.ends) == 2, run.output  # both replicas have ended, also the rejoined one
        assert run.digest == calm.digest
        joined = read(run.out / "run" / "incidents.jsonl").whole[-1]
        assert joined["joined_ranks"]
        assert (joined["joining_steps"] > 0) == (join == "instalments")


@pytest.mark.guarantee(
    "Verified gradients", "A replica of torchtitan whose device errs is evicted, and the step keeps its bits."
)
def test_titan_replica_that_errs_is_evicted_and_costs_no_bit(titan: Titan) -> None:
    """One replica's gradients of step 4 are always wrong from its verified microbatch on; the reduced sum of another
    one is wrong in step 2."""
    arguments = ["--training.steps", "6", "--recover.reduction", "reproducible", "--debug.deterministic"]
    calm = titan.recover("unverified", 2, "llama3", arguments)
    assert calm.code == 0, calm.output
    faults = ["2:0:reduced=corrupt:sum", "4:1:check=errs:1"]
    run = titan.recover("verified", 3, "llama3", [*arguments, "--recover.verify", "1"], kills=faults)
    assert run.code == 0, run.output
    assert run.digest == calm.digest
    assert "the reduced sums of rank 0 on" in run.output
    assert "replica 1 was evicted: its gradient of slot" in run.output


@pytest.mark.soak
@pytest.mark.parametrize(
    ("config", "ranks", "more", "options"),
    [
        ("moe", 2, ("--training.global-batch-size", "2"), ()),
        ("llama3", 4, (), ("--replica-size", "2")),
    ],
)
def test_titan_verifies_experts_and_sharded_replicas(
    titan: Titan, config: str, ranks: int, more: tuple[str, ...], options: tuple[str, ...]
) -> None:
    """The tokens of a microbatch that is only compared do not count for its experts."""
    arguments = [
        "--training.steps",
        "5",
        "--recover.reduction",
        "reproducible",
        "--debug.deterministic",
        *more,
    ]
    calm = titan.recover(f"calm-{config}-{ranks}", ranks, config, arguments, options=options)
    verify = [*arguments, "--recover.verify", "1"]
    run = titan.recover(f"verified-{config}-{ranks}", ranks, config, verify, options=options)
    assert (calm.code, run.code) == (0, 0), run.output
    assert run.digest == calm.digest
    assert run.ends[0].get("biases") == calm.ends[0].get("biases")


def test_asynchronous_checkpoint_of_a_lost_writer_is_replaced(titan: Titan) -> None:
    """The writer of step 3 dies in step 5, after which the other one saves. Each validation is logged once. A run with
    another batch does not know the positions of its loaders."""
    checkpoints = ["--checkpoint.async-mode", "async", "--checkpoint.interval", "3"]
    texts = ["--validator.dataloader.dataset", "c4_test"]
    texts += ["--validator.dataloader.dataset-path", str(titan.assets / "texts")]
    validation = ["--validator.enable", "--validator.freq", "4", "--validator.steps", "2", *texts]
    arguments = ["--training.steps", "8", *checkpoints, *validation]
    run = titan.recover("asynchronous", 2, "llama3", arguments, kills=["5:0:vote"])
    assert run.code == 0, run.output
    folder = titan.place / "asynchronous" / "dump" / "checkpoint"
    saved = {int(path.parent.name.removeprefix("step-")) for path in folder.glob("*/.metadata")}
    assert saved >= {0, 5, 6, 8}
    assert sorted(run.validations) == [1, 4, 8]
    assert run.validations[8] < run.validations[1]
    other = titan.recover(
        "other-batch", 1, "llama3", ["--training.global-batch-size", "2"], folder="asynchronous"
    )
    assert other.code != 0
    assert "has the positions of 4 data loaders, and this run has 2" in other.output
    assert "--checkpoint.exclude-from-loading dataloader" in other.output
