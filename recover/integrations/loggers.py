"""Loggers of trainers, whose runs another replica continues."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

from recover.world.world import World


def name_wandb_run(world: World) -> None:
    """Let a successor continue the run of W&B: its id follows from the run directory, unless the user has set
    one."""
    if world.job.run_dir:
        path = Path(world.job.run_dir).resolve()
        os.environ.setdefault("WANDB_RUN_ID", f"{path.name}-{zlib.crc32(bytes(path)):08x}")
        os.environ.setdefault("WANDB_RESUME", "allow")
