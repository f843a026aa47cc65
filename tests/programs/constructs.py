"""Every construct of `tests/constructs.py`, one after the other in the same world; survivors note what came of each.

Argument: a JSON object, rank to the number of the construct in whose second step it kills itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

import recover

sys.path.insert(0, str(Path(__file__).parents[1]))
from constructs import CONSTRUCTS, ours

deaths = json.loads(sys.argv[1])
torch.set_num_threads(1)
world = recover.init()
run_dir = os.environ["RECOVER_RUN_DIR"]
for number, construct in enumerate(CONSTRUCTS.values()):

    def perhaps_die(steps: int, number: int = number) -> None:
        if steps == 1 and deaths.get(str(world.rank)) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    parameters = ours(construct, world, perhaps_die)
    torch.save(parameters, f"{run_dir}/{number}-{world.rank}.pt")
