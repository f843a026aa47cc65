"""A process that has imported what every rank needs, and waits to be told which one it is.

Run as `python -P -m recover.launch.prewarmed_process`, with the arguments of
`recover.launch.bootstrap`, whose work it then does: most of the time that a rank needs to start goes into imports.
They see the environment as the script has changed it in the ranks that began (`recover.job.environment`); the script
itself begins with what its launcher gives it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time

from recover.job import process
from recover.job.code import note_versions
from recover.job.imports import importing
from recover.launch import bootstrap

# `torch._dynamo`: every optimizer of torch's imports it when it is made.
IMPORTED = (
    "torch",
    "torch._dynamo",
    "recover.step.step",
    "recover.launch.init",
    "recover.world.fabrics.etcd.fabric",
)


def main() -> None:
    bootstrap.die_with_parent()
    note_versions()  # of what is imported now: the files may be others when this process becomes a rank
    own = [sys.argv[2]] if sys.argv[1] == "-m" and sys.argv[2].startswith("recover.") else []
    with importing():
        for name in (*IMPORTED, *own):
            try:
                importlib.import_module(name)
            except Exception:
                pass  # the rank will say so, if it needs it
    if "torch" in sys.modules:
        # Where there is no MKL (aarch64) torch counts its threads when it is first asked, in the environment of then.
        sys.modules["torch"].get_num_threads()
    told = sys.stdin.buffer.readline()
    if not told:
        return  # nobody needs it
    process.waited_until = time.clock_gettime(time.CLOCK_BOOTTIME)
    os.environ.clear()
    os.environ.update(json.loads(told))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    bootstrap.main()


if __name__ == "__main__":
    main()
