"""The folder of a test is its kind and its marker (`-m pure`, `-m simulated`, `-m processes`, `-m integrations`,
`-m lab`); only tests of the last three kinds may start processes, and a test that fails leaves none running."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from patience import wait_until

os.environ.setdefault("ONEDNN_JIT_PROFILE", "1")  # no file of oneDNN in /tmp: `recover` sets it, too
# A shell ignores SIGINT in what it starts in the background, and so would every job of a suite that is run that way.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL if _number == signal.SIGHUP else signal.default_int_handler)
settings.register_profile("untimed", deadline=None)  # a busy machine is no fault of the code's
settings.load_profile("untimed")
HERE = Path(__file__).parent
MAY_START_PROCESSES = ("processes", "integrations", "lab")
KINDS = ("pure", "simulated", *MAY_START_PROCESSES)
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system")
ASKS_FOR_FONTS = "fc-list"  # matplotlib does, once, in a home that has no list of them yet


class Starts:
    """An audit hook: Python reports every process that it is about to start, and the hook can refuse it."""

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
    _starts.allowed = kind_of(item.path) in MAY_START_PROCESSES
    # torch sets it when a test makes an optimizer; jobs that later tests start would leave that directory behind.
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    try:
        return (yield)
    finally:
        _starts.allowed = True


def children() -> set[int]:
    """The pids of this process's children that run."""
    found = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            found |= {int(pid) for pid in path.read_text().split() if runs(pid)}
    return found


def runs(pid: str) -> bool:
    try:
        return "Z (zombie)" not in Path("/proc", pid, "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def heeds(pid: int, number: signal.Signals) -> bool:
    """Whether the process does not ignore the signal: multiprocessing's resource tracker ignores SIGTERM."""
    try:
        ignored = re.search(r"^SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return ignored is not None and not int(ignored[1], 16) >> (number - 1) & 1


@pytest.fixture(autouse=True)
def a_test_that_fails_leaves_no_job_running(request: pytest.FixtureRequest) -> Iterator[None]:
    if kind_of(request.path) not in MAY_START_PROCESSES:
        yield
        return
    before = children()
    yield
    left = children() - before
    # A launcher that gets SIGTERM ends its ranks, too.
    for how, patience in ((signal.SIGTERM, 60), (signal.SIGKILL, 20)):
        for pid in left & children():
            with suppress(ProcessLookupError):
                os.kill(pid, how)
        wait_until(lambda how=how: not {pid for pid in left & children() if heeds(pid, how)}, patience)
