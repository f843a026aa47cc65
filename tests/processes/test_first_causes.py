"""First causes: real deaths of each kind, and the words of `recover why` for them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from causes_told import first_causes, why
from launching import ULFM, Job
from left_out import leave_out
from patience import PATIENCE, wait_until

from recover.job.spec import JobSpec
from recover.launch.witness import Witness, exit_status

GROUPS = [Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")]  # of cgroups v1 and v2

MANY = (
    ULFM
    + """
import ctypes
from pathlib import Path

run_dir = Path(os.environ["RECOVER_RUN_DIR"])
if rank == 1:
    (run_dir / "pid").write_text(str(os.getpid()))
    time.sleep(100000)
while rank and not (run_dir / "killed").exists():
    time.sleep(0.01)
if rank == 2:
    raise KeyError("no such shard")
if rank == 3:
    ctypes.string_at(0)
if rank == 4:
    os._exit(7)
if rank == 5:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
wait_for_deaths(5)
"""
)


@pytest.mark.guarantee(
    "Monitoring",
    "The cause of each kind of death is distinguished: signal, exception, crash, exit, OOM killer, full "
    "disk.",
)
def test_cause_of_each_kind_of_death_is_distinguished(tmp_path: Path) -> None:
    job = Job(tmp_path, MANY, "-n", "6")
    assert wait_until((job.run_dir / "pid").exists)
    assert wait_until(lambda: (job.run_dir / "pid").read_text())
    first = int((job.run_dir / "pid").read_text())
    os.kill(first, signal.SIGKILL)
    # The launcher may see the death late on a busy machine, and the next rank records itself when it raised.
    assert wait_until(lambda: '"exit"' in (job.run_dir / "job.jsonl").read_text())
    (job.run_dir / "killed").touch()
    job.finish()
    (story,) = why(job.run_dir)
    causes = {death["rank"]: death for death in story["first"]}
    assert {rank: death["cause"] for rank, death in causes.items()} == {
        1: "killed",
        2: "raised",
        3: "crashed",
        4: "left",
        5: "killed",
    }, job.stderr
    assert story["first"][0]["rank"] == 1, "the first one is named first"
    assert causes[1]["short"] == "killed by SIGKILL"
    assert causes[5]["short"] == "killed by SIGTERM"
    assert "KeyError: 'no such shard', at " in causes[2]["text"]
    assert "script.py" in causes[2]["text"]
    assert "SIGSEGV" in causes[3]["short"]
    assert "script.py" in causes[3]["text"], "the stack of the crash is there"
    assert "called os._exit(7)" in causes[4]["text"]
    assert "script.py" in (job.run_dir / "ranks" / "4.log").read_text(), "the stack of who called it is there"
    told = subprocess.run(
        [sys.executable, "-m", "recover.cli", "why", str(job.run_dir), "4"], capture_output=True, text=True
    )
    assert told.returncode == 2
    assert "no incident 4" in told.stderr


def test_end_of_a_rank_is_known_before_its_parent_reaps_it(tmp_path: Path) -> None:
    """Mpirun may reap it late. (Where the kernel does not report the end, it stays unknown.)"""
    rank = subprocess.Popen(["sleep", "100000"])
    descriptor = os.pidfd_open(rank.pid)
    idle = SimpleNamespace(step=3, doing="", slots=())
    board: Any = SimpleNamespace(here=lambda: [0], pid=lambda rank_: rank.pid, now=lambda rank_: idle)
    (tmp_path / "ranks").mkdir()
    with Witness(tmp_path) as witness:
        witness.begin(JobSpec(1, session=str(tmp_path)))
        witness.watch(board)
        assert wait_until(lambda: witness._seen)
        rank.kill()
        assert wait_until(lambda: witness._leaving)
        time.sleep(0.2)
        rank.wait()
    (line,) = (line for line in map(json.loads, (tmp_path / "job.jsonl").open()) if line["what"] == "exit")
    assert line.get("signal") == exit_status(descriptor).get("signal")
    os.close(descriptor)


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    """A control group with little memory. Making one needs root, and a machine that has them."""
    reasons = []
    for parent in GROUPS:
        group = parent / f"recover-test-{os.getpid()}"
        limit = group / ("memory.limit_in_bytes" if parent.name == "memory" else "memory.max")
        try:
            group.mkdir()
            limit.write_text(str(400 << 20))
        except OSError as error:
            if group.exists():
                group.rmdir()
            reasons.append(str(error))
            continue
        yield group
        assert wait_until(lambda group=group: not (group / "cgroup.procs").read_text())
        group.rmdir()
        return
    leave_out("memory", f"no control group with a limit can be made (by root alone): {'; '.join(reasons)}")


@pytest.mark.guarantee(
    "Monitoring",
    "The cause of each kind of death is distinguished: signal, exception, crash, exit, OOM killer, full "
    "disk.",
)
def test_oom_killer_is_named_when_a_control_group_is_out_of_memory(
    tmp_path: Path, small_memory: Path
) -> None:
    (small_memory / "cgroup.procs").write_text("0")  # and all that is started from here
    try:
        job = Job(
            tmp_path,
            ULFM
            + """
            if rank == 1:
                taken = []
                while True:
                    taken.append(os.urandom(1 << 20) * 8)
            wait_for_deaths(1)
            """.replace("\n            ", "\n"),
            *("-n", "3"),
        )
    finally:
        (small_memory.parent / "cgroup.procs").write_text("0")
    assert job.finish() == 0, job.stderr
    assert first_causes(job.run_dir) == {1: "oom"}


FULL = (
    ULFM
    + """
import contextlib
import threading

filler = os.path.join(os.environ["RECOVER_RUN_DIR"], "filler")
filling = True


def fill(path):
    with open(path, "ab", buffering=0) as file:
        while filling:
            file.write(b"x" * 4096)


def keep_full():
    # Records that are replaced free some room: take it, until rank 1 is dead.
    while filling:
        with contextlib.suppress(OSError):
            fill(filler + "-more")


if rank == 1:
    while not os.path.exists(filler + "-more"):
        time.sleep(0.01)
    fill(filler)
if rank == 0:
    keeper = threading.Thread(target=keep_full)
    keeper.start()
wait_for_deaths(1)
time.sleep(0.5)
if rank == 0:
    filling = False
    keeper.join()
    os.remove(filler + "-more")
    os.remove(filler)
"""
)


@pytest.mark.guarantee(
    "Monitoring",
    "The cause of each kind of death is distinguished: signal, exception, crash, exit, OOM killer, full "
    "disk.",
)
def test_full_disk_is_named_although_the_dead_rank_could_not_write(tmp_path: Path) -> None:
    """On a small file system of its own, in a namespace of its own; the last words went to memory."""
    script, disk = tmp_path / "script.py", tmp_path / "disk"
    script.write_text(FULL)
    disk.mkdir()
    commands = f"""
        mount -t tmpfs -o size=2m tmpfs {disk} || exit 77
        {sys.executable} -P -m recover.cli run -n 3 --timeout {PATIENCE} --run-dir {disk}/run {script}
        cp -r {disk}/run {tmp_path}/kept
    """
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", textwrap.dedent(commands)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    if done.returncode == 77 or "unshare failed" in done.stderr:
        leave_out("mounts", f"no file system can be mounted (by root alone): {done.stderr}")
    kept = tmp_path / "kept"
    assert "kept in memory" in done.stdout + done.stderr, "there was room: the test shows nothing"
    assert "No space left" in json.loads((kept / "ranks" / "1.end").read_text())["detail"], (
        "once there is room"
    )
    assert first_causes(kept) == {1: "disk-full"}, done.stderr
    assert "has no room" in why(kept)[0]["first"][0]["text"]
