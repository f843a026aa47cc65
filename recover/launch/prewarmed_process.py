"""A process that has imported what every rank needs, and waits for the environment of a rank on
stdin.

Run as `python -P -m recover.launch.prewarmed_process`, with the arguments of
`recover.launch.bootstrap`, which it then runs: most of the start of a rank is imports. The imports
see the environment as the script has changed it in the first ranks (`recover.job.environment`); the
script itself begins with the environment that its launcher gives it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time

from recover.job import process
from recover.job.code import record_versions
from recover.job.imports import importing
from recover.launch import bootstrap

# `torch._dynamo`: the constructor of every torch optimizer imports it.
IMPORTED = (
    "torch",
    "torch._dynamo",
    "recover.step.step",
    "recover.launch.init",
    "recover.world.fabrics.etcd.fabric",
)


def main() -> None:
    bootstrap.die_with_parent()
    record_versions()  # of what is imported now: the files may change before this process becomes a rank
    own = [sys.argv[2]] if sys.argv[1] == "-m" and sys.argv[2].startswith("recover.") else []
    with importing():
        for name in (*IMPORTED, *own):
            try:
                importlib.import_module(name)
            except Exception:
                pass  # the rank reports it, if it needs the module
    if "torch" in sys.modules:
        # Without MKL (aarch64) torch reads the number of threads from the environment at its first
        # use: now.
        sys.modules["torch"].get_num_threads()
    environment = sys.stdin.buffer.readline()
    if not environment:
        return  # it is not needed
    process.waited_until = time.clock_gettime(time.CLOCK_BOOTTIME)
    os.environ.clear()
    os.environ.update(json.loads(environment))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    bootstrap.main()


if __name__ == "__main__":
    main()
