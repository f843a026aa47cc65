"""Checkpoints of the trainer in its own layout, `checkpoint-N/`, written by one replica, with the
position of the run in `recover.json`.

A checkpoint is written elsewhere and renamed when it is complete. If its writer dies before that, no
checkpoint is found, and the next replica writes it.
"""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from recover.world import rank_exit
from recover.world.calls import Call
from recover.world.retry import retry_after_repair

POSITION = "recover.json"
SAVING = "_recover_saving"  # the Hub ignores names that begin with _

_Trainer: Any = object  # `recoverable` combines `Recoverable` with a subclass of transformers.Trainer


class SavesOnce(_Trainer):
    """Saving and resuming; `world`, `recovery` and `_stream` are those of `Recoverable`."""

    world: Any
    recovery: Any
    _stream: Any
    _saves_to: str | None = None
    _pushes = False
    _is_alone = False  # inside a function that runs on one replica only
    _saves = 0

    def _get_output_dir(self, trial: Any) -> str:
        return self._saves_to or super()._get_output_dir(trial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        place = Path(super()._get_output_dir(trial))
        name, best = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}", self.state.best_global_step
        write = super()._save_checkpoint
        self._saves += 1
        self.recovery.confirm()  # a replica whose state differs must not write it

        def act() -> None:
            if best and (
                best == self.state.global_step or (place / f"{PREFIX_CHECKPOINT_DIR}-{best}").is_dir()
            ):
                self.state.best_model_checkpoint = str(place / f"{PREFIX_CHECKPOINT_DIR}-{best}")
            if not self.is_world_process_zero():
                return
            try:
                self._write(place, name, lambda: write(model, trial))
            except Exception as error:
                if self.control.should_training_stop:
                    raise
                rank_exit.report(f"the checkpoint {place / name} failed ({error}); training continues")

        retry_after_repair(self.world, Call.SAVE, act, lambda *_: None)

    def _write(self, place: Path, name: str, write: Any) -> None:
        saving, best = place / SAVING, self.state.best_model_checkpoint
        shutil.rmtree(saving, ignore_errors=True)
        self._saves_to, self._pushes = str(saving), False
        try:
            write()
        finally:
            self._saves_to = None
        draft, final = saving / name, place / name
        self.state.best_model_checkpoint = best  # the trainer has looked for it here
        self.state.save_to_json(str(draft / "trainer_state.json"))
        data = {**self._stream.place, "generator": _text(self._stream.place["generator"])}
        (draft / POSITION).write_text(json.dumps({"position": self.recovery.state_dict(), "data": data}))
        if final.exists():
            final.rename(saving / "replaced")
        draft.rename(final)
        shutil.rmtree(saving)
        if self._pushes:
            super()._push_from_checkpoint(str(final))
        rotate_checkpoints(
            str(place), self.args.save_total_limit, self.state.best_model_checkpoint, use_mtime=True
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Postpone the push until the checkpoint has its final name."""
        self._pushes = True
        if self.hub_model_id is None:
            self.init_hf_repo()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self._on_first(_internal_call, super().save_model, output_dir, _internal_call)

    def push_to_hub(self, *args: Any, **named: Any) -> Any:
        return self._on_first(False, super().push_to_hub, *args, **named)

    def _on_first(self, directly: bool, act: Any, *args: Any, **named: Any) -> Any:
        if directly or self.recovery is None or self._is_alone:  # save_model pushes to the Hub
            return act(*args, **named) if self.is_world_process_zero() else None
        result: list[Any] = []

        def call() -> None:
            self._is_alone = True
            try:
                result.append(act(*args, **named))
            finally:
                self._is_alone = False

        self.recovery.on_first(call)
        return result[0] if result else None

    def _resume(self, checkpoint: str | None) -> None:
        """Set the position of a run that begins, or goes on from a checkpoint, also one of the trainer alone."""
        self._saved: dict[str, Any] = {}
        if checkpoint is None:
            return
        path = Path(checkpoint, POSITION)
        self._saved = json.loads(path.read_text()) if path.is_file() else {}
        here, index = self.recovery.state_dict(), self.state.global_step
        samples = {**here["samples"], "next": index * here["global_batch"]}
        skipped = self._saved.get("position", here)["skipped"]
        exponents = {
            key: value for key, value in self._saved.get("position", {}).items() if key == "exponents"
        }
        self.recovery.load_state_dict(
            {**here, **exponents, "index": index, "skipped": skipped, "samples": samples}
        )
        self.recovery.compare_optimizers()

    def _order_of(self, epoch: int) -> torch.Tensor | None:
        """State of the generator that the order of a resumed epoch was drawn with, if it was saved."""
        data = self._saved.get("data", {})
        if data.get("epoch") != epoch or not data["generator"]:
            return None
        return torch.frombuffer(bytearray(base64.b64decode(data["generator"])), dtype=torch.uint8)


def _text(generator: torch.Tensor) -> str:
    return base64.b64encode(generator.numpy().tobytes()).decode()
