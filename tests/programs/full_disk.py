"""In a namespace of mounts of its own: `full_disk.py DISK KEPT OUTPUT COMMAND...` runs a training run on a small file
system, fills it while the run is at work, stops the run, makes room once it says that it waits, and keeps what it left.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from rank_pids import ranks_of_run

LIMIT = 240.0  # seconds; far above what anything here takes


def wait(condition: object, what: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            sys.exit(f"{what}\n{output.read_text()}")
        time.sleep(0.05)


disk, kept, output = map(Path, sys.argv[1:4])
if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk]).returncode:
    sys.exit(77)
run = disk / "run"
with open(output, "wb") as out:
    job = subprocess.Popen([*sys.argv[4:], "--run-dir", str(run)], stdout=out, stderr=subprocess.STDOUT)
steps = run / "steps.jsonl"
wait(lambda: steps.exists() and steps.read_text().count("\n") >= 3, "no step")
with open(disk / "filler", "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass
wait(lambda: "kept in memory" in output.read_text(), "there is room")
pid, _ = ranks_of_run(run)[0]
os.kill(pid, signal.SIGUSR1)
wait(lambda: "the last checkpoint cannot be written" in output.read_text(), "it does not wait")
os.remove(disk / "filler")
code = job.wait(LIMIT)
shutil.copytree(run, kept)
sys.exit(code)
