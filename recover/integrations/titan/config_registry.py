"""Configs of torchtitan by name, as configs of `RecoverTrainer`: torchtitan's `--config NAME` looks
for the function NAME here. A name with dots is a function of any module: `--config mine.small`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from torchtitan.models import _supported_models
from torchtitan.trainer import Trainer

from recover.integrations.titan.compatibility import converted
from recover.integrations.titan.trainer import RecoverTrainer


def with_recover(make: Callable[[], Trainer.Config]) -> RecoverTrainer.Config:
    """The config that `make` returns, with the section `recover`, and without two defaults of torchtitan that
    replicas cannot use: CUDA graphs, and a trace log with one file for each RANK."""
    config: Any = make()
    if type(config)._owner is not Trainer:
        raise ValueError(
            f"the config belongs to {type(config)._owner!r}, which overrides parts of torchtitan's trainer, as ReCoVer "
            "does; choose a config of torchtitan.trainer.Trainer"
        )
    config.training.disable_cuda_graphs, config.debug.enable_structured_logging = True, False
    return converted(RecoverTrainer.Config, config)


def _registries(name: str) -> list[Any]:
    """Modules of configs, the one whose model begins the name first."""
    found = []
    for model in sorted(_supported_models, key=lambda model: (not name.startswith(model), model)):
        try:
            found.append(importlib.import_module(f"torchtitan.models.{model}.config_registry"))
        except ImportError:
            pass  # this model needs packages that are not installed
    return found


def __getattr__(name: str) -> Any:
    place, _, function = name.rpartition(".")
    if not name.startswith("_"):
        for module in [importlib.import_module(place)] if place else _registries(name):
            if callable(found := getattr(module, function, None)):
                return partial(with_recover, found)
    raise AttributeError(f"torchtitan.models has no config {name!r}")


def __dir__() -> list[str]:
    """All names of configs: torchtitan lists them if it does not find a name."""
    every = ((module.__name__, item) for module in _registries("") for item in vars(module).items())
    return sorted(name for place, (name, value) in every if getattr(value, "__module__", "") == place)
