"""Run by every rank of a comparison, our side: the step of `recover train`, with a diary of what happened when.

Arguments: the configuration, how many replicas are to rejoin (the run then goes on until they have, and for a few steps
more), and the kills. A rank that is to stall waits at its location, and its host or its cable is struck from outside.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from recover_lab.peers.events import Events
from recover_lab.peers.kills import incident_facts

import recover
from recover.data import open_stream
from recover.faults import Fault, parse_faults
from recover.faults.probe import Probe
from recover.train.config import Config
from recover.train.engine import make_engine
from recover.train.learning_rate import lr_factor
from recover.train.model_shape import shape_of
from recover.train.optimizer import make_optimizer
from recover.world.liveness.board import age

AFTER = 4  # steps after all awaited replicas have rejoined

imported = time.time()
config, awaited = Config.model_validate_json(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(config.threads)
world = recover.init()
events = Events(Path(os.environ["RECOVER_RUN_DIR"]), world.rank)
events.note("start", at=time.time() - age())
events.note("imported", at=imported)
events.note("joined")


def fire(kill: Fault) -> None:
    if kill.kind == "stall":
        events.note("waiting", step=kill.step)
        time.sleep(kill.amount)
        return
    events.note("failure", step=kill.step)
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


world.hooks = Probe(world.replica, world.shard, parse_faults(sys.argv[3:]), fire)
stream = open_stream(config.data.path, config.tokenizer, config.seq_len, config.microbatch_size, config.seed)
engine = make_engine(config, shape_of(config, stream.vocab), world, torch.device("cpu"))
optimizer = make_optimizer(config, engine.model)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: lr_factor(config, done))
step = recover.Step(
    world,
    engine.model,
    optimizer,
    config.global_batch,
    clip=config.clip,
    scheduler=scheduler,
    seed=config.seed,
    join=config.join,
)
events.note("built")


def redone(times: list[float]) -> float:
    """Seconds that this replica has spent on microbatches of one that was lost, as long as its own take."""
    count = len(step.samples) - len(step.layout.share(world.replica).run) if step.incidents else 0
    spans = [later - before for before, later in pairwise(times)]
    return max(0, count) * median(spans)


last, came = config.steps, 0
while step.index < last or came < awaited:
    if not world.outside:  # a joining rank does not know yet which step it will be
        events.note("step-begin", step=step.index + 1)
    times = [time.perf_counter(), *(time.perf_counter() for _ in engine.work(step, stream))]
    events.note(
        "step-end",
        step=step.index,
        loss=step.loss,
        microbatches=len(step.all_samples),
        replicas=len(world.replicas),
        redone=redone(times),
        incidents=[incident_facts(incident) for incident in step.incidents],
    )
    if (there := sum(replica >= world.grid.replicas for replica in world.replicas)) > came:
        last, came = max(last, step.index + AFTER), there
