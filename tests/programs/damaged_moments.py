"""The trainer; on its first replica a bit of the optimizer flips just before the checkpoint of step 3 is taken.

The lowest bit of a moment: the next step's parameters do not show it.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import torch

import recover.train
from recover.checkpoint import saver, tensors

save = saver.Saver.save


def damage_and_save(
    self: saver.Saver, step: int, what: tensors.Tensors, facts: dict[str, Any], **options: Any
) -> None:
    if step == 3:
        state = next(iter(what._optimizers[0].state.values()))
        state["exp_avg"].view(-1).view(torch.int32)[0] ^= 1
    save(self, step, what, facts, **options)


saver.Saver.save = damage_and_save  # type: ignore[method-assign]
runpy.run_path(str(Path(recover.train.__file__).with_name("rank_script.py")), run_name="__main__")
