"""A training script of Hugging Face's Trainer, for tests/integrations/hf: `hf_job.py stock|ours SETTINGS`.

SETTINGS is JSON: arguments of TrainingArguments, and those of CASE. What happens is written to $HF_OUT, into one file
of each process.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from hf_parts import Rows, arguments, model, padded
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback

OUT = Path(os.environ["HF_OUT"])
SETTINGS: dict[str, Any] = json.loads(sys.argv[2])
CASE: dict[str, Any] = {
    "patience": 0,  # of early stopping
    "pace": 0.0,  # seconds of a step
    "resume": None,
    "kill": {},  # by replica: an event of a callback and its step, "on_log:4"; or "write:10", "print:7"
    "stops": "",  # REPLICA:STEP: this replica alone decides to stop
    "wait_after": 0,  # a step after which the others wait until a lost replica asks to join
    "hub": False,
    "set": [],  # values of the metric `set`, one for each evaluation
    "reduction": "fast",
    "verify": 0,
}
CASE |= {name: SETTINGS.pop(name) for name in list(SETTINGS) if name in CASE}
ours = sys.argv[1] == "ours"
if ours:
    from recover.integrations.hf import Trainer

    Trainer.step_options = {name: CASE[name] for name in ("reduction", "verify")}
else:
    from transformers import Trainer


def world() -> Any:
    import recover

    return recover.init()


def is_due(event: str, step: int) -> bool:
    return ours and CASE["kill"].get(str(world().replica)) == f"{event}:{step}"


class Notes(TrainerCallback):
    """Writes what this process sees; counts events."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.file = (OUT / f"notes-{os.getpid()}.jsonl").open("w")

    def write(self, **what: Any) -> None:
        self.file.write(json.dumps(what) + "\n")
        self.file.flush()

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *args, **named: self.event(name, *args, **named)
        return super().__getattribute__(name)

    def event(self, name: str, args: Any, state: Any, control: Any, **named: Any) -> Any:
        self.counts[name] += 1
        step = state.global_step
        if is_due(name, step):
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "on_log":
            self.write(step=step, epoch=state.epoch, first=state.is_world_process_zero, logs=named["logs"])
        if name == "on_step_end":
            time.sleep(CASE["pace"])
            if CASE["stops"] and CASE["stops"] == f"{world().replica}:{step}":
                control.should_training_stop = True
            while step == CASE["wait_after"] and len(world().replicas) < 2 and not world().asking:
                time.sleep(0.05)
        return control


class Hub:
    """In place of the Hub's client: notes calls, and sends nothing."""

    def _note(self, call: str, **what: Any) -> None:
        with (OUT / "hub.jsonl").open("a") as file:
            file.write(json.dumps({"call": call, "pid": os.getpid(), **what}) + "\n")

    def create_repo(self, name: str, **_: Any) -> Any:
        self._note("create_repo")
        return huggingface_hub.RepoUrl(f"https://huggingface.co/nobody/{name}")

    def upload_folder(
        self, *, folder_path: str, commit_message: str, run_as_future: bool = False, **_: Any
    ) -> Any:
        self._note("upload_folder", message=commit_message, files=sorted(os.listdir(folder_path)))

        class Sent:
            def done(self) -> bool:
                return True

            def is_done(self) -> bool:
                return True

        return Sent() if run_as_future else None


def kill_writer(save: Any) -> Any:
    """The replica dies in the middle of a checkpoint."""

    def killing(value: Any, path: Any, *args: Any, **named: Any) -> Any:
        folder = Path(path).parent.name
        if Path(path).name == "scheduler.pt" and is_due("write", int(folder.rpartition("-")[2])):
            Path(path).write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        return save(value, path, *args, **named)

    return killing


def kill_printer(on_log: Any) -> Any:
    """The replica dies before it prints a line."""

    def killing(self: Any, args: Any, state: Any, *more: Any, **named: Any) -> Any:
        if is_due("print", state.global_step):
            os.kill(os.getpid(), signal.SIGKILL)
        return on_log(self, args, state, *more, **named)

    return killing


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    PrinterCallback.on_log = kill_printer(PrinterCallback.on_log)
    if CASE["hub"]:
        transformers.trainer.hf_api = Hub
    torch.save = kill_writer(torch.save)
    notes, trained = Notes(), model()
    callbacks: list[Any] = [notes]
    if CASE["patience"]:
        callbacks.append(EarlyStoppingCallback(CASE["patience"]))
    losses = iter(CASE["set"])
    trainer = Trainer(
        model=trained,
        args=arguments(OUT / "out", **SETTINGS),
        train_dataset=Rows(),
        eval_dataset=Rows(1000, 11),
        data_collator=padded,
        compute_metrics=lambda prediction: {"rows": len(prediction.predictions), "set": next(losses, 0.0)},
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=CASE["resume"])
    trainer.save_model(str(OUT / "last"))
    if CASE["hub"]:
        trainer.push_to_hub()
    state = trainer.state
    notes.write(
        end=True,
        digest=hashlib.sha256(
            b"".join(p.detach().numpy().tobytes() for p in trained.parameters())
        ).hexdigest(),
        step=state.global_step,
        counts=notes.counts,
        flos=state.total_flos,
        seen=state.num_input_tokens_seen,
        best=state.best_metric,
        history=[
            {name: entry.get(name) for name in ("step", "loss", "eval_loss")} for entry in state.log_history
        ],
        first=trainer.is_world_process_zero(),
        patience=[getattr(each, "early_stopping_patience_counter", None) for each in callbacks][-1],
    )


main()
