"""Every construct of a table, one after the other in the same world; survivors save the parameters of each.

Arguments: the module under `tests` that has the table (`constructs`, `huggingface`), and a JSON object: rank to the
number of the construct in whose second step it kills itself.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from pathlib import Path

import torch

import recover

sys.path.insert(0, str(Path(__file__).parents[1]))
from constructs import ours

table = importlib.import_module(sys.argv[1]).CONSTRUCTS
deaths = json.loads(sys.argv[2])
torch.set_num_threads(1)
world = recover.init()
run_dir = os.environ["RECOVER_RUN_DIR"]
for number, construct in enumerate(table.values()):

    def perhaps_die(steps: int, number: int = number) -> None:
        if steps == 1 and deaths.get(str(world.rank)) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    parameters = ours(construct, world, perhaps_die)
    torch.save(parameters, f"{run_dir}/{number}-{world.rank}.pt")
