"""A loop of a user's own, with everything that is offered for it: a stream with workers, on_first, save and resume.

Arguments: a folder for checkpoints and lines, the number of steps, and a JSON object of what goes wrong: `dies_in_call`
and `dies_in_save` (rank to step), `hangs_in_thread` (the rank whose background call does not end, and its step).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import recover
from recover.checkpoint import saver

sys.path.insert(0, str(Path(__file__).parents[1]))
from own_loop import BATCH, digest, loss_of, make_average, make_model, make_optimizer, make_stream

place, steps, wrong = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
torch.set_num_threads(1)
world = recover.init()
diary = os.open(f"{os.environ['RECOVER_RUN_DIR']}/diary-{world.rank}.jsonl", os.O_CREAT | os.O_WRONLY)


def note(kind: str, **facts: object) -> None:
    os.write(diary, (json.dumps({"kind": kind, **facts}) + "\n").encode())


def strikes(what: str) -> bool:
    return wrong.get(what, {}).get(str(world.rank)) == step.index


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def write(name: str, line: str) -> None:
    if strikes("dies_in_call"):
        die()
    with (place / name).open("a") as file:
        file.write(line + "\n")


def write_slowly(rank: int, number: int, line: str) -> None:
    if wrong.get("hangs_in_thread") == [rank, number]:
        time.sleep(3600)
    write("slow.txt", line)


def fail() -> None:
    raise ValueError("this log is full")


class Noting:
    """A stream that remembers what it was asked for."""

    def __init__(self) -> None:
        self._stream = make_stream(workers=2)
        self.read: dict[int, str] = {}
        self.expect = self._stream.expect

    def __getitem__(self, index: int) -> dict[str, Any]:
        batch = self._stream[index]
        self.read[index] = digest(batch)
        return batch


model = make_model()
optimizer, scheduler = make_optimizer(model)
average = make_average(model)
step = recover.Step(world, model, optimizer, BATCH, scheduler=scheduler)
extra = {"average": average, "words": {1: ("one", None), "t": torch.arange(3)}, "seen": 0}
found = recover.resume(step, place, extra)
note("start", index=step.index, found=found and {"seen": found["seen"], "words": str(found["words"])})
torch.manual_seed(world.rank)  # the user's own draws: different on each rank
mine, stream = torch.get_rng_state(), Noting()
while step.index < steps:
    for batch in step.microbatches(stream):
        step.backward(loss_of(model, batch))
    average.update_parameters(model)
    extra["seen"] = step.index
    note("commit", step=step.index, loss=step.loss, samples={i: stream.read[i] for i in step.samples})
    step.on_first(write, "lines.txt", f"{step.index} {step.loss:.6f}")
    step.on_first(write_slowly, world.rank, step.index, f"{step.index}", background=True)
    if step.index == 2:
        step.on_first(fail)
        step.on_first(torch.rand, 3)
    if step.index % 4 == 0:
        if strikes("dies_in_save"):
            saver._flush = lambda path: die()  # the draft is whole, and no rank has confirmed it yet
        recover.save(step, place, extra)
assert torch.equal(torch.get_rng_state(), mine), "somebody has drawn from the user's generator"
note(
    "end",
    parameters=[p.tolist() for p in model.parameters()],
    average=[p.tolist() for p in average.parameters()],
)
