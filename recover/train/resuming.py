"""Resuming from a checkpoint, on a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recover.checkpoint import directory
from recover.checkpoint.directory import CheckpointError, Found
from recover.checkpoint.tensors import Tensors
from recover.gradients.state_hash import parameters_digest
from recover.step.errors import StateDivergedError
from recover.train.engine import Engine
from recover.world.world import World


def load_checkpoint(path: Path, tensors: Tensors, engine: Engine, world: World) -> dict[str, Any]:
    """Load this rank's part of model and optimizer. The parameters must be those that were saved."""
    found = Found(path, int(path.name.rpartition("-")[2]))
    facts = found.facts()
    tensors.load(path, facts["files"])
    # All ranks of a replica take part; the first one holds the whole state.
    digest = parameters_digest(engine.parameters())
    if world.shard == 0 and digest != facts["parameters_digest"]:
        raise CheckpointError(
            f"{path} is damaged: its parameters_digest is {facts['parameters_digest']}, and what was loaded from it "
            f"has {digest}; {found.mend()}"
        )
    return facts


def name_last_checkpoint(error: StateDivergedError, run_dir: Path) -> None:
    """Add the path of the last good checkpoint to the message of an error after which no vote can decide which
    parameters are right."""
    found = directory.latest(run_dir)
    error.add_note(
        f"The last good checkpoint is {found.path}; `recover train --resume {run_dir}` goes on from it."
        if found
        else "There is no checkpoint to go on from."
    )
