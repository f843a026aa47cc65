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
    """Four replicas, two of which die."""
    run = titan.recover(
        "deaths",
        4,
        "llama3",
        ["--metrics.enable-tensorboard", "--recover.positions-every", "4"],
        kills=["3:1:backward", "6:2:in-reduce"],
    )
    assert run.code == 0, run.output
    return run


def check_losses(run: Run, stock: Run, steps: range, within: float = 1e-6) -> None:
    assert run.code == 0, run.output
    assert list(run.losses) == list(steps), run.output
    expected = [stock.losses[step] for step in steps]
    assert list(run.losses.values()) == pytest.approx(expected, rel=within), run.output


def from_checkpoint_of(titan: Titan, of: str, name: str) -> None:
    """A run `name` finds the checkpoint of step 10 of another run in its folder."""
    step = Path("dump", "checkpoint", f"step-{HALF}")
    shutil.copytree(titan.place / of / step, titan.place / name / step)


@pytest.mark.guarantee(
    "User code",
    "torchtitan keeps its losses to 1e-6 through deaths at five places, on data read exactly once.",
)
def test_titan_has_the_losses_of_torchtitan_through_deaths(stock: Run, deaths: Run) -> None:
    check_losses(deaths, stock, range(1, STEPS + 1))
    end, other = deaths.ends  # of four replicas
    assert end == other
    assert end["step"] == STEPS
    # Of all slots together; torchtitan alone counts those of one rank.
    assert end["tokens"] == BATCH * stock.ends[0]["tokens"]


def test_titan_writes_metrics_of_each_step_once(titan: Titan, deaths: Run) -> None:
    assert Counter(line["step"] for line in deaths.lines) == dict.fromkeys(range(1, STEPS + 1), 1)
    seen = [line["n_tokens_seen"] for line in deaths.lines]
    assert seen == [seen[0] * step for step in range(1, STEPS + 1)]
    steps: list[int] = []
    for folder in {path.parent for path in (titan.place / "deaths" / "dump" / "tb").rglob("events*")}:
        events = EventAccumulator(str(folder))
        events.Reload()
        steps += [scalar.step for scalar in events.Scalars(LOSSES)]
    assert sorted(steps) == list(range(1, STEPS + 1))


def test_titan_resumes_a_checkpoint_of_torchtitan(titan: Titan, stock: Run) -> None:
    """On three replicas, two of which die at two further places."""
    from_checkpoint_of(titan, "stock", "resumed")
    run = titan.recover("resumed", 3, "llama3", kills=["13:1:vote", "16:0:update"])
    check_losses(run, stock, range(HALF + 1, STEPS + 1))


@pytest.mark.guarantee(
    "User code", "A replica of torchtitan that returns ends with the bits of a run without deaths."
)
def test_replica_that_returns_ends_with_the_bits_of_the_calm_run(titan: Titan) -> None:
    arguments = [
        "--recover.reduction",
        "reproducible",
        "--training.steps",
        "40",
        "--recover.positions-every",
        "3",
    ]
    calm = titan.recover("calm", 1, "llama3", arguments)
    assert calm.code == 0, calm.output
    run = titan.recover(
        "returned", 2, "llama3", arguments, options=["--return"], kills=["3:1:backward"], TITAN_WAIT="1"
    )
    assert run.code == 0, run.output
    assert len(run.ends) == 2, run.output  # both replicas have ended, the one that came back as well
    assert run.digest == calm.digest
