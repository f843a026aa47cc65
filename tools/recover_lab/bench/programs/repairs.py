"""Run by every rank of `recover bench repair`: ranks die one by one; survivors note when they have reduced again."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from recover_lab.peers.kills import note_kill

import recover

world = recover.init(carrier=sys.argv[1])
run_dir = Path(os.environ["RECOVER_RUN_DIR"])
source = np.ones(250_000, np.float32)
out = np.empty_like(source)
repaired = {}
for victim in range(1, world.grid.ranks):
    started = time.time()
    while True:
        complete = world.cross.all_reduce(source, out).wait()
        if victim == world.rank and time.time() - started > 0.3:
            note_kill(run_dir, victim)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.005)
        if world.agree(complete) is None:
            world.repair()
            assert world.cross.all_reduce(source, out).wait()
            repaired[victim] = time.time()
            break
    (run_dir / f"repaired-{world.rank}.json").write_text(json.dumps(repaired))
