"""Decisions of Hugging Face's Trainer on ReCoVer: early stopping, the best model, a stop that one replica or a signal
asks for; and a script without the adapter."""

from __future__ import annotations

import json
import re
import signal
import zlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_runs import HuggingFace, Run

from recover.integrations.hf import trainer as adapter
from recover.integrations.hf.trainer import Recoverable


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> HuggingFace:
    return HuggingFace(tmp_path_factory.mktemp("hf"))


@pytest.mark.soak
def test_early_stopping_and_best_model_are_those_of_the_trainer_alone(hf: HuggingFace) -> None:
    """The metric is best in the third evaluation. One replica dies before it, and the first one, which has removed old
    checkpoints so far, after it."""
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "set",
        "greater_is_better": False,
        "patience": 3,
        "set": [5.0, 4.0, 3.0, 3.5, 3.6, 3.7, 3.8],
    }
    alone = hf.stock("alone", **settings)
    run = hf.recover("stopping", 3, kills=["3:1:vote"], kill={"0": "on_save:8"}, **settings)
    assert (alone.code, run.code) == (0, 0), run.output
    (expected,), (found,) = alone.ends, run.ends
    assert (found["step"], found["best"]) == (expected["step"], expected["best"]) == (12, 3.0)
    for each in (alone, run):
        assert [path.name for path in (each.out / "out").glob("*checkpoint*")] == ["checkpoint-6"]
    assert weights(run) == pytest.approx(weights(alone), rel=1e-4, abs=1e-5)
    state = json.loads((run.out / "out" / "checkpoint-6" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(run.out / "out" / "checkpoint-6")


def weights(run: Run) -> list[float]:
    from safetensors.torch import load_file

    found = load_file(run.out / "last" / "model.safetensors")
    return [float(value.double().sum()) for _, value in sorted(found.items())]


def test_stop_that_one_replica_decides_ends_all_after_the_same_step(hf: HuggingFace) -> None:
    """The replica decides as a callback with a clock does."""
    run = hf.recover("clock", 2, stops="1:4")
    assert run.code == 0, run.output
    assert [end["step"] for end in run.ends] == [4, 4]


@pytest.mark.soak
def test_first_interrupt_saves_and_the_run_resumes_on_other_replicas(hf: HuggingFace) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1000, "max_steps": 1000}
    process = hf.start("stopped", 2, pace=0.2, **settings)
    assert process.stdout is not None
    said = ""
    while said.count("'learning_rate'") < 3 and (line := process.stdout.readline()):
        said += line
    process.send_signal(signal.SIGINT)
    said += process.communicate()[0]
    assert process.returncode == 128 + signal.SIGINT, said
    (folder,) = (hf.place / "stopped" / "out").glob("checkpoint-*")
    step = json.loads((folder / "trainer_state.json").read_text())["global_step"]
    assert 3 <= step < 1000
    (hf.place / "stopped").rename(hf.place / "resumed")
    for notes in (hf.place / "resumed").glob("notes-*"):
        notes.unlink()
    calm = hf.recover("calm", 1, stops=f"0:{step + 3}", **settings)
    run = hf.recover("resumed", 1, resume=True, stops=f"0:{step + 3}", **settings)
    assert (calm.code, run.code) == (0, 0), run.output
    assert list(run.logged("loss")) == list(range(step + 1, step + 4))
    assert run.history == pytest.approx(calm.history, rel=1e-5)


def test_script_without_the_adapter_is_told_of_it(hf: HuggingFace) -> None:
    run = hf.recover("plain", 2, program="plain_job.py")
    told = re.findall(
        "recover: plain_job.py makes a TrainingArguments of transformers without its adapter.*", run.output
    )
    assert len(told) == 1, run.output
    assert "from recover.integrations.hf import Trainer" in told[0]


class Others:
    """Replaces `gather`: this replica is the second one, and the first one sends `first`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: list[Any]) -> None:
        self.first = first
        monkeypatch.setattr(adapter, "gather", lambda world, mine, call: [self._row(), mine])

    def _row(self) -> bytes:
        return json.dumps(self.first.pop(0)).encode()


def test_calls_that_one_replica_makes_alone_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """`if state.is_world_process_zero: trainer.log(...)`, while the others end their step."""
    Others(monkeypatch, [["trainer.log", {"mine": 1.0}]])
    replica: Any = SimpleNamespace(world=None)
    with pytest.raises(RuntimeError, match=r"some are in the end of a step, others in trainer\.log"):
        Recoverable._exchange(replica, "the end of a step", {"flags": []})


@pytest.mark.parametrize("sampler", ["torch's generator", "its own"])
def test_order_of_an_epoch_is_that_of_the_first_replica(
    monkeypatch: pytest.MonkeyPatch, sampler: str
) -> None:
    """This replica has drawn a random number that the first one has not."""
    torch.manual_seed(0)
    state = torch.get_rng_state().tolist()
    expected = torch.randperm(9).tolist()
    digest = zlib.crc32(bytes(expected))
    torch.manual_seed(0)
    torch.rand(3)

    class Stream:
        def begin(self, *_: Any) -> None:
            self.digest = zlib.crc32(bytes(torch.randperm(9).tolist() if sampler != "its own" else [1]))

    replica: Any = SimpleNamespace(world=None, _stream=Stream())
    replica._exchange = partial(Recoverable._exchange, replica)
    Others(monkeypatch, [["the start of an epoch", state], ["the order of an epoch", digest]])
    if sampler == "its own":
        with pytest.raises(RuntimeError, match="different orders of epoch 2"):
            Recoverable._begin_epoch(replica, 2, 0, None)
    else:
        Recoverable._begin_epoch(replica, 2, 0, None)
