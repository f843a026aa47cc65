"""Run by every rank: reduce, vote, repair, again and again, while ranks die; it records all that it learns in a diary.

Argument: a JSON object with `carrier`, `steps`, `megabytes`, `timers` ([rank, seconds after start-up] to be killed) and
`in_agreement` ([step, rank] to be killed while it waits inside the vote). Other deaths come by RECOVER_KILL.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from typing import Any

import numpy as np

import recover
from recover.world.census import Census

scenario = json.loads(sys.argv[1])
world = recover.init(carrier=scenario["carrier"])
diary = os.open(
    f"{os.environ['RECOVER_RUN_DIR']}/diary-{world.rank}.jsonl", os.O_CREAT | os.O_WRONLY | os.O_APPEND
)


def note(kind: str, **facts: object) -> None:
    os.write(diary, (json.dumps({"kind": kind, "time": time.time(), **facts}) + "\n").encode())


def kill_in(seconds: float) -> None:
    def die() -> None:
        note("dies")
        os.kill(os.getpid(), signal.SIGKILL)

    timer = threading.Timer(seconds, die)
    timer.daemon = True
    timer.start()


def note_census(census: Census) -> None:
    records = b"".join(census.records[rank] for rank in sorted(census.records))
    note(
        "census",
        epoch=census.epoch,
        members=census.members,
        lost=census.lost,
        steps=[int(data.split()[0]) for data in census.records.values()] if census.epoch > 1 else [],
        digest=hashlib.sha256(records).hexdigest(),
        ms=census.seconds * 1e3,
    )


note_census(world.last_census)
mine: Any = np.full(int(scenario["megabytes"] * 125_000), 2.0**world.replica, np.float64)
total: Any = np.empty_like(mine)
if (device := os.environ.get("TEST_DEVICE", "cpu")) != "cpu":
    import torch

    mine, total = torch.from_numpy(mine).to(device), torch.from_numpy(total).to(device)
for rank, seconds in scenario.get("timers", []):
    if rank == world.rank:
        kill_in(seconds)
in_agreement = {(step, rank) for step, rank in scenario.get("in_agreement", [])}

for step in range(1, scenario["steps"] + 1):
    world.hooks.step = step
    while True:
        expected = sum(2.0**replica for replica in world.replicas)
        world.hooks("bucket")
        work = world.cross.all_reduce(mine, total)
        world.hooks.under_way("in-reduce", work)
        complete = work.wait()
        time.sleep(scenario.get("compute", 0.0) * random.random())
        world.hooks("vote")
        if (step, world.rank) in in_agreement:
            kill_in(0.01)
        elif any(when == step for when, _ in in_agreement):
            time.sleep(0.03)
        epoch = world.epoch
        agreed = world.agree(complete)
        note("verdict", step=step, epoch=epoch, agreed=agreed)
        world.hooks("update")
        if agreed == 1:
            assert complete, "committed, but this rank has no sum"
            assert (total == expected).all(), (total.min(), total.max(), expected)
            break
        note_census(world.repair(b"%d %d" % (step, world.rank)))
note("done", epoch=world.epoch, members=world.members)
