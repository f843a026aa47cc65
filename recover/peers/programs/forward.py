"""Run by every rank of a comparison, our side: the step of `recover train`, with a diary of what happened when."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

import recover
from recover.data import open_stream
from recover.faults import Fault, parse_faults
from recover.faults.probe import Probe
from recover.peers.events import Events
from recover.train.config import Config
from recover.train.engine import make_engine
from recover.train.learning_rate import lr_factor
from recover.train.model_shape import shape_of
from recover.train.optimizer import make_optimizer

config = Config.model_validate_json(sys.argv[1])
torch.set_num_threads(config.threads)
world = recover.init()
events = Events(Path(os.environ["RECOVER_RUN_DIR"]), world.rank)


def fire(kill: Fault) -> None:
    events.note("failure", step=kill.step)
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


world.hooks = Probe(world.replica, world.shard, parse_faults(sys.argv[2:]), fire)
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
)
while step.index < config.steps:
    events.note("step-begin", step=step.index + 1)
    for _ in engine.work(step, stream):
        pass
    events.note(
        "step-end",
        step=step.index,
        loss=step.loss,
        microbatches=len(step.all_samples),
        replicas=len(world.replicas),
        incidents=[
            {
                "noticed_at": incident.noticed_at,
                "detect": incident.detect_ms / 1e3,
                "repair": incident.repair_ms / 1e3,
                "restore": incident.restore_ms / 1e3,
                "redo": incident.redo_ms / 1e3,
                "discarded": incident.discarded_microbatches,
            }
            for incident in step.incidents
        ],
    )
