"""Notices for scripts that create a trainer of another package without its adapter: each rank would
train by itself."""

from __future__ import annotations

import functools
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple


class Adapter(NamedTuple):
    trainer: str  # the class that the module defines
    package: str  # its name in a sentence
    module: str  # the adapter
    remedy: str
    method: str = "__init__"  # of the class: called when an object is made


_LIGHTNING = Adapter(
    "Trainer",
    "Lightning",
    "recover.integrations.lightning",
    "`from recover.integrations.lightning import RecoverStrategy` and write "
    "Trainer(strategy=RecoverStrategy(global_batch=...), devices=1): docs/guides/lightning.md",
)
ADAPTERS = {
    "lightning.pytorch.trainer.trainer": _LIGHTNING,
    "pytorch_lightning.trainer.trainer": _LIGHTNING,
    # Made before the trainer; fails where LOCAL_RANK is set. Its subclasses have an __init__ of their own.
    "transformers.training_args": Adapter(
        "TrainingArguments",
        "transformers",
        "recover.integrations.hf",
        "write `from recover.integrations.hf import Trainer`, or `recoverable(SFTTrainer)` for a subclass, at the top: "
        "docs/guides/huggingface-trainer.md",
        "__post_init__",
    ),
}


def watch(adapters: dict[str, Adapter] = ADAPTERS) -> None:
    """Install the notice in these modules when the script imports them."""
    sys.meta_path.insert(0, _Finder(adapters))


class _Finder:
    def __init__(self, adapters: dict[str, Adapter]) -> None:
        self._adapters = adapters

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._adapters:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_look(module: ModuleType) -> None:
                execute(module)
                _look(getattr(module, self._adapters[name].trainer, None), self._adapters[name])

            spec.loader.exec_module = execute_and_look  # type: ignore[method-assign]
        return spec


def _look(trainer: Any, adapter: Adapter) -> None:
    """Make the class print a notice when its first object is created without the adapter imported."""
    if trainer is None:
        return
    make, said = getattr(trainer, adapter.method), list[bool]()

    @functools.wraps(make)
    def made(self: Any, *arguments: Any, **named: Any) -> None:
        if not said and adapter.module not in sys.modules:
            said.append(True)
            print(
                f"recover: {Path(sys.argv[0]).name} makes a {adapter.trainer} of {adapter.package} without its "
                f"adapter: each rank trains by itself, and no death is repaired; {adapter.remedy}",
                file=sys.stderr,
                flush=True,
            )
        make(self, *arguments, **named)

    setattr(trainer, adapter.method, made)
