"""Hugging Face's Trainer on ReCoVer against the trainer alone: losses, evaluations, logs, callbacks, checkpoints and
calls of the Hub through deaths, rejoins and resumes."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from hf_runs import HuggingFace, Run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import Qwen2ForCausalLM
from transformers.trainer_utils import get_last_checkpoint

STEPS, SAVED = 30, 12  # step 12 is in the middle of an epoch of 5 steps
COMMON = {
    "eval_strategy": "steps",
    "eval_steps": 10,
    "save_strategy": "steps",
    "save_steps": SAVED,
    "include_num_input_tokens_seen": "non_padding",
}
EXACT = ("learning_rate", "epoch", "num_input_tokens_seen")


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> HuggingFace:
    return HuggingFace(tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def stock(hf: HuggingFace) -> Run:
    """The trainer alone: six epochs in shuffled order, each with a last step of one microbatch."""
    run = hf.stock("stock", **COMMON)
    assert run.code == 0, run.output
    assert list(run.logged("loss")) == list(range(1, STEPS + 1))
    assert run.logged("loss")[STEPS] < 0.7 * run.logged("loss")[1]
    return run


@pytest.fixture(scope="module")
def deaths(hf: HuggingFace) -> Run:
    """Three replicas; one dies in a step, and the first one in the middle of the checkpoint of step 12."""
    run = hf.recover(
        "deaths",
        3,
        kills=["4:1:in-reduce"],
        kill={"0": f"write:{SAVED}"},
        report_to=["tensorboard"],
        push_to_hub=True,
        hub=True,
        save_total_limit=2,
        **COMMON,
    )
    assert run.code == 0, run.output
    return run


def check(run: Run, stock: Run, first: int = 1) -> None:
    assert run.code == 0, run.output
    steps = list(range(first, STEPS + 1))
    assert list(run.logged("loss")) == steps, run.output
    for name, within in {
        "loss": 1e-5,
        "eval_loss": 1e-5,
        "grad_norm": 1e-4,
        **dict.fromkeys(EXACT, 0.0),
    }.items():
        expected = {step: value for step, value in stock.logged(name).items() if step >= first}
        assert run.logged(name) == pytest.approx(expected, rel=within, abs=0), name


@pytest.mark.guarantee(
    "User code",
    "Hugging Face's Trainer keeps its losses, evaluations and schedule to 1e-5 through deaths and rejoins.",
)
def test_trainer_has_the_losses_of_the_trainer_alone_through_deaths(stock: Run, deaths: Run) -> None:
    check(deaths, stock)
    (end,), (alone,) = deaths.ends, stock.ends
    assert (end["step"], end["flos"], end["seen"]) == (alone["step"], alone["flos"], alone["seen"])
    assert deaths.history == pytest.approx(stock.history, rel=1e-5)
    assert deaths.output.count("gradient_accumulation_steps=6 is the number of microbatches of a step") == 1


def test_logs_are_written_once_by_the_first_living_replica(deaths: Run) -> None:
    """The first replica has died after it had logged step 12, before the others knew: that step may be there twice."""
    rates = Counter(deaths.printed("learning_rate"))
    assert sum(rates.values()) in (STEPS, STEPS + 1)
    assert len(deaths.printed("eval_loss")) == 3
    written: Counter[int] = Counter()
    folders = {path.parent for path in (deaths.out / "out" / "runs").rglob("events*")}
    for folder in folders:
        events = EventAccumulator(str(folder))
        events.Reload()
        written.update(scalar.step for scalar in events.Scalars("train/loss"))
    assert len(folders) == 2  # of the first replica, and of its successor
    assert sorted(written) == list(range(1, STEPS + 1))
    assert {step for step, count in written.items() if count > 1} <= {SAVED}
    firsts = {note["step"] for note in deaths.notes if "logs" in note and note["first"]}
    assert firsts == set(range(1, STEPS + 1))  # as the callbacks of a user see it
    assert all(note["first"] for note in deaths.ends)


def test_callbacks_run_on_every_replica_as_often_as_alone(stock: Run, deaths: Run) -> None:
    found, expected = Counter(deaths.ends[0]["counts"]), Counter(stock.ends[0]["counts"])
    # The successor of the first replica opens what the first one had opened.
    assert found - expected == Counter(on_train_begin=1, on_push_begin=found["on_push_begin"])
    assert not expected - found


def test_checkpoint_of_a_dead_writer_is_written_by_its_successor(deaths: Run) -> None:
    """Nothing half-written is left, and what is there loads."""
    out = deaths.out / "out"
    assert {path.name for path in out.glob("*checkpoint*")} == {f"checkpoint-{step}" for step in (24, 30)}
    assert not (out / "_recover_saving").exists()
    assert get_last_checkpoint(str(out)) == str(out / "checkpoint-30")
    state = json.loads((out / "checkpoint-24" / "trainer_state.json").read_text())
    assert (state["global_step"], len(state["log_history"])) == (24, 26)
    assert json.loads((out / "checkpoint-24" / "recover.json").read_text())["position"]["index"] == 24
    for folder in (out / "checkpoint-30", deaths.out / "last"):
        Qwen2ForCausalLM.from_pretrained(folder)


def test_hub_is_called_once_for_each_checkpoint(deaths: Run) -> None:
    calls = [json.loads(line) for line in (deaths.out / "hub.jsonl").read_text().splitlines()]
    sent = Counter(call["message"] for call in calls if call["call"] == "upload_folder")
    expected = [f"Training in progress, step {step}" for step in (SAVED, 24, 30)]
    assert sent == Counter([*expected, "Model save", "End of training"])
    # One process is the first replica, one its successor.
    assert len({call["pid"] for call in calls if call["call"] == "create_repo"}) == 2
    assert all("_recover_saving" not in call.get("files", []) for call in calls)


def from_checkpoint_of(hf: HuggingFace, of: str, name: str, step: int = SAVED) -> None:
    """Copy the checkpoint of run `of` into the directory of run `name`."""
    folder = Path("out", f"checkpoint-{step}")
    shutil.copytree(hf.place / of / folder, hf.place / name / folder)


def test_checkpoint_of_the_trainer_alone_resumes_on_replicas(hf: HuggingFace, stock: Run) -> None:
    """In the middle of an epoch, on two replicas. The first one dies before it prints a line, the other prints it."""
    from_checkpoint_of(hf, "stock", "resumed")
    run = hf.recover("resumed", 2, kill={"0": "print:15"}, resume=True, **COMMON)
    check(run, stock, SAVED + 1)
    assert run.printed("learning_rate") == [f"{rate:.4g}" for rate in run.logged("learning_rate").values()]


def test_checkpoint_written_on_replicas_resumes_in_the_trainer_alone(
    hf: HuggingFace, stock: Run, deaths: Run
) -> None:
    from_checkpoint_of(hf, "deaths", "back", step=24)
    check(hf.stock("back", resume=True, **COMMON), stock, 25)


@pytest.mark.guarantee(
    "User code",
    "Hugging Face's Trainer keeps its losses, evaluations and schedule to 1e-5 through deaths and rejoins.",
)
def test_rejoined_replica_catches_up_and_succeeds_the_first_one(hf: HuggingFace, stock: Run) -> None:
    """Replica 1 rejoins, with the losses since the last log, and the counter of early stopping; then the first one dies
    in an evaluation, and the rejoined replica logs, evaluates and saves."""
    stopping = {"patience": 10, "metric_for_best_model": "loss", "greater_is_better": True}
    run = hf.recover(
        "rejoined",
        2,
        options=["--return"],
        kills=["2:1:backward"],
        kill={"0": "on_evaluate:20"},
        wait_after=9,
        **COMMON | stopping | {"logging_steps": 4},
    )
    assert run.code == 0, run.output
    assert "replica 2 joined" in run.output
    losses = stock.logged("loss")
    means = {step: sum(losses[step - ago] for ago in range(4)) / 4 for step in range(4, STEPS + 1, 4)}
    assert run.logged("loss") == pytest.approx(means, rel=1e-5)
    for name in ("eval_loss", "train_loss"):  # the latter is the mean over all steps
        assert run.logged(name) == pytest.approx(stock.logged(name), rel=1e-5), name
    assert len({end["digest"] for end in run.ends}) == 1
    assert {end["patience"] for end in run.ends} == {2}
    assert all(end["history"] == run.ends[0]["history"] for end in run.ends)
    assert {end["seen"] for end in run.ends} == {stock.ends[0]["seen"]}
    assert {path.name for path in (run.out / "out").iterdir()} >= {
        f"checkpoint-{step}" for step in (12, 24, 30)
    }


@pytest.mark.guarantee(
    "Verified gradients",
    "A replica of Hugging Face's Trainer or of Lightning whose device errs is evicted, and the step keeps its bits.",
)
def test_replica_that_errs_is_evicted_and_costs_no_bit_of_the_trainer(hf: HuggingFace) -> None:
    """One replica's gradients of step 4 are always wrong; the reduced sum of another one is wrong in step 2. Tokens of
    microbatches that are computed only for comparison do not count."""
    settings = {**COMMON, "max_steps": 8, "reduction": "reproducible"}
    calm = hf.recover("unverified", 2, **settings)
    run = hf.recover(
        "verified", 3, kills=["2:0:reduced=corrupt:sum", "4:1:check=errs:1"], verify=1, **settings
    )
    assert (calm.code, run.code) == (0, 0), run.output
    assert "the reduced sums of rank 0 on" in run.output
    assert "replica 1 was evicted: its gradient of slot" in run.output
    assert {end["digest"] for end in run.ends} == {end["digest"] for end in calm.ends}
    assert run.logged("loss") == calm.logged("loss")
    assert {end["seen"] for end in run.ends} == {end["seen"] for end in calm.ends}
