"""ReCoVer: fault-tolerant pre-training. Every optimizer step uses exactly B microbatches, whichever processes die."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recover.checkpoint.save_and_resume import resume, save
    from recover.data.indexed import stream
    from recover.launch.init import init
    from recover.parallel.hsdp import hsdp
    from recover.parallel.threed import threed
    from recover.step.errors import StateDivergedError
    from recover.step.loop.stragglers import StragglerEviction
    from recover.step.step import Step
    from recover.world.world import World

__all__ = ["Step", "StragglerEviction", "World", "hsdp", "init", "resume", "save", "stream", "threed"]
_HOMES = {
    "Step": "recover.step.step",
    "StragglerEviction": "recover.step.loop.stragglers",
    "World": "recover.world.world",
    "hsdp": "recover.parallel.hsdp",
    "init": "recover.launch.init",
    "resume": "recover.checkpoint.save_and_resume",
    "save": "recover.checkpoint.save_and_resume",
    "stream": "recover.data.indexed",
    "threed": "recover.parallel.threed",
}
__version__ = "0.1.0"


def _save_states(step: Step, error: StateDivergedError) -> None:
    """`Step` itself knows nothing of files, and scripts import this only when it is needed."""
    importlib.import_module("recover.checkpoint.save_and_resume").save_states(step, error)


def __getattr__(name: str) -> Any:
    """Import public names when they are first used, so that the command line does not import MPI and torch."""
    if name in _HOMES:
        found = getattr(importlib.import_module(_HOMES[name]), name)
        if name == "Step":
            found.save_states = _save_states
        return found
    if name == "dropin":
        return importlib.import_module("recover.dropin")
    raise AttributeError(f"module 'recover' has no attribute {name!r}")
