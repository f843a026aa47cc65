"""A script that creates a trainer of another package without its adapter gets a warning, once."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType

import pytest

from recover.launch import trainers

SOURCE = "class Trainer:\n    def __init__(self, steps, *, rate=1):\n        self.steps = steps + rate\n"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "some_trainer.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    adapter = trainers.Adapter("Trainer", "Some", "some_adapter", "import some_adapter")
    trainers.watch({"some_trainer": adapter})
    yield importlib.import_module("some_trainer")
    sys.modules.pop("some_trainer")


def test_trainer_without_its_adapter_is_told_once(
    module: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [module.Trainer(3, rate=2).steps, module.Trainer(4).steps] == [5, 5]
    assert list(inspect.signature(module.Trainer).parameters) == ["steps", "rate"]
    told = capsys.readouterr().err
    assert told.count("makes a Trainer of Some without its adapter") == 1
    assert "no death is repaired; import some_adapter" in told


def test_trainer_with_its_adapter_is_not_told(
    module: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "some_adapter", ModuleType("some_adapter"))
    assert module.Trainer(3).steps == 4
    assert capsys.readouterr().err == ""


def test_every_adapter_is_a_module_of_this_package() -> None:
    for adapter in trainers.ADAPTERS.values():
        place = Path(trainers.__file__).parents[2].joinpath(*adapter.module.split("."))
        assert place.is_dir() or place.with_suffix(".py").is_file()
