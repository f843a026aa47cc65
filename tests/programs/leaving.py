"""Steps that are left early in every way that a loop can be left; every rank writes down what it committed.

Argument: the carrier. Three replicas; `RECOVER_KILL` should take the last one in step 8. Afterwards the two that are
left leave step after step of a larger model, and write down their memory. Then both raise in a step that was agreed on.
At the end both exit while they hold the iterator of a step.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import warnings
from pathlib import Path

import torch

import recover

sys.path.insert(0, str(Path(__file__).parents[1]))
from toy import Model, Stream, loss_of, make_optimizer

STEPS, ROUNDS = 9, 20
torch.set_num_threads(1)
warnings.simplefilter("ignore")
world = recover.init(carrier=sys.argv[1])
torch.manual_seed(0)
model, stream = Model(), Stream()
step = recover.Step(
    world, model, make_optimizer(model), global_batch=6, bucket_mb=0.002, buffers=["count", "average"]
)
diary = os.open(f"{os.environ['RECOVER_RUN_DIR']}/diary-{world.rank}.jsonl", os.O_CREAT | os.O_WRONLY)


def note(kind: str, **facts: object) -> None:
    os.write(diary, (json.dumps({"kind": kind, "time": time.time(), **facts}) + "\n").encode())


class Unreadable:
    def __getitem__(self, index: int) -> object:
        raise OSError("the file system is away")


def leave_after(microbatches: int) -> None:
    """Leave a step after so many microbatches. The last one of a share has handed its buckets to the reduction."""
    for number, sample in enumerate(step.microbatches(stream), start=1):
        step.backward(loss_of(model, sample))
        if number == microbatches:
            break


def leave() -> object:
    """Actions of this replica before the coming step."""
    number, me = step.index + 1, world.replica
    if number == 2 or (number == 3 and me == 1):  # all of them, then some of them
        leave_after(2)
    elif number == 4 and me != 1:  # twice in a row
        leave_after(1)
        leave_after(2)
    elif number == 5 and me == 1:  # an exception in the loop, which the user catches
        try:
            for _ in step.microbatches(stream):
                raise KeyError("in the loop")
        except KeyError:
            pass
    elif number == 6 and me == 0:  # an iterator that is kept, and replaced
        kept = step.microbatches(stream)
        step.backward(loss_of(model, next(kept)))
        return kept
    elif number == 7 and me != 0:  # an exception inside of the step, which the user catches
        try:
            next(step.microbatches(Unreadable()))
        except OSError:
            pass
    elif number == 8 and me == 0:  # in the step of a death, after the repair
        epoch = world.epoch
        for sample in step.microbatches(stream):
            if world.epoch != epoch:
                break
            step.backward(loss_of(model, sample))
    return None


note("start", parameters=[p.tolist() for p in model.parameters()])
while step.index < STEPS:
    kept, microbatches = leave(), 0
    for sample in step.microbatches(stream):
        step.backward(loss_of(model, sample))
        microbatches += 1
    note(
        "commit",
        step=step.index,
        samples=step.all_samples,
        loss=step.loss,
        microbatches=microbatches,
        epoch=world.epoch,
        incidents=[incident.dead_ranks for incident in step.incidents],
    )
    if kept is not None:
        try:
            next(kept)  # type: ignore[call-overload]
        except RuntimeError as error:
            note("kept", error=str(error))
note("end", parameters=[p.tolist() for p in model.parameters()])

# Measure the memory over many steps that are left.
large = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(8)))
gradients = 4 * sum(p.numel() for p in large.parameters())
step = recover.Step(
    world, large, torch.optim.SGD(large.parameters(), lr=1e-3), world.grid.replicas, bucket_mb=1
)
given_up, take = [0], world.worker.take_failed


def counting() -> list:
    works = take()
    given_up[0] += len(works)
    return works


world.worker.take_failed = counting
for turn in range(ROUNDS):
    for left in (True, False):
        for _, _, index in step.microbatches(stream):
            if left and world.replica == turn % 2:
                time.sleep(0.02)  # so that the reductions of the other replica wait for this one
                break
            inputs = torch.randn(4, 512, generator=torch.Generator().manual_seed(index))
            step.backward(large(inputs).square().mean())
    gc.collect()
    with open("/proc/self/statm") as memory:
        resident = int(memory.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    held = len(world._given_up)
    files, threads = (len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task"))
    note(
        "memory", resident=resident, gradients=gradients, held=held, given_up=given_up[0], os=[files, threads]
    )

# An exception between the verdict and the end of the step: this replica has not taken the step that the others have.
optimizer = make_optimizer(model)
torn = recover.Step(world, model, optimizer, world.grid.replicas, buffers=["count", "average"])
optimizer.register_step_pre_hook(lambda *_: 1 // 0)
for _ in range(2):
    try:
        for sample in torn.microbatches(stream):
            torn.backward(loss_of(model, sample))
    except (ZeroDivisionError, RuntimeError) as error:
        note("torn", error=str(error))

last = step.microbatches(stream)  # shares are 2 and 1: one of them has handed its buckets over
_, _, index = next(last)
step.backward(large(torch.ones(4, 512)).square().mean())
