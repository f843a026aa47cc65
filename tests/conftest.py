"""The folder of a test is its kind: `-m pure`, `-m simulated`, `-m processes`; only the last may start processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

os.environ.setdefault("ONEDNN_JIT_PROFILE", "1")  # no file of oneDNN's in /tmp, as `recover` itself has it
settings.register_profile("untimed", deadline=None)  # a busy machine is no fault of the code's
settings.load_profile("untimed")
HERE = Path(__file__).parent
KINDS = ("pure", "simulated", "processes")
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system")
ASKS_FOR_FONTS = "fc-list"  # matplotlib does, once, in a home that has no list of them yet


class Starts:
    """Python tells of every process that it is about to start, and whoever listens can refuse."""

    allowed = True

    def heard(self, event: str, about: tuple[Any, ...]) -> None:
        if event in STARTS and not self.allowed and about[:1] != (ASKS_FOR_FONTS,):
            raise RuntimeError(f"a test that starts a process ({event}) belongs into tests/processes")


_starts = Starts()
sys.addaudithook(_starts.heard)


def kind_of(path: Path) -> str:
    kind = path.relative_to(HERE).parts[0]
    if kind not in KINDS:
        raise pytest.UsageError(f"{path}: a test must be in one of tests/{{{','.join(KINDS)}}}")
    return kind


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by these markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(kind_of(item.path))
    if "soak" not in config.option.markexpr:  # a soak runs only where it is asked for
        soaks = [item for item in items if item.get_closest_marker("soak")]
        items[:] = [item for item in items if item not in soaks]
        config.hook.pytest_deselected(items=soaks)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _starts.allowed = kind_of(item.path) == "processes"
    try:
        return (yield)
    finally:
        _starts.allowed = True
