"""How mutants are run: a test that hangs under a mutant counts as caught, and leaves nothing running."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from mutate import CAUGHT, HUNG, LIMIT, run
from patience import wait_until

WITH_A_PROCESS = """
import pathlib, subprocess, sys, time

def test_it():
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100000)"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    pathlib.Path("pid").write_text(str(process.pid))
    {then}
"""


@pytest.mark.parametrize(
    ("then", "outcome"),
    [("time.sleep(100000)", HUNG), ("assert False", CAUGHT), ("", "SURVIVES (exit code 0: ")],
)
def test_mutant_run_leaves_no_process(tmp_path: Path, then: str, outcome: str) -> None:
    """Whatever the outcome of the test: even a process in a session of its own, which ignores SIGTERM, is ended."""
    (tmp_path / "test_it.py").write_text(WITH_A_PROCESS.format(then=then))
    limit = 10 if outcome == HUNG else LIMIT
    while not run("test_it.py", tmp_path, limit).startswith(outcome) or not (tmp_path / "pid").exists():
        assert outcome == HUNG
        limit *= 2  # the machine is busy: pytest had not come to the test
    assert wait_until(lambda: not is_running(int((tmp_path / "pid").read_text())))


# The process that forks is ended with all others that a test leaves behind.
@pytest.mark.filterwarnings("ignore:resource_tracker")
def test_mutant_is_judged_in_a_fork_by_the_code_of_its_tree(tmp_path: Path) -> None:
    """A test that starts no process runs in a fork, which imports the package of the given tree."""
    (tmp_path / "tests/pure").mkdir(parents=True)
    (tmp_path / "recover").mkdir()
    (tmp_path / "recover/__init__.py").write_text("BROKEN = False")
    for body, outcome in (
        ("while True: pass", HUNG),
        ("assert ours.BROKEN", CAUGHT),
        ("assert not ours.BROKEN", "SURVIVES (exit code 0: "),
    ):
        test = f"import recover as ours\n\ndef test_it():\n    {body}\n"
        (tmp_path / "tests/pure/test_it.py").write_text(test)
        told = run("tests/pure/test_it.py", tmp_path, 10 if outcome == HUNG else LIMIT)
        assert told.startswith(outcome), body


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
