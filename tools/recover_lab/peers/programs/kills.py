"""Run by every rank of `recover bench gpu` and `recover bench recovery`: replicas die inside reductions.

Arguments: device, model size, sequence length, accumulation, deaths, and the seed that draws the victims. Survivors
commit the step of each death, and note what it took.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time

import torch
from recover_lab.peers.gpu_rank import GpuRank, RandomTokens, Tokens
from recover_lab.peers.kills import note_kill, timed_steps

import recover
from recover.faults import Fault
from recover.faults.probe import Probe
from recover.gradients.state_hash import parameters_digest
from recover.train.models import SIZES

kind, size = sys.argv[1], sys.argv[2]
seq_len, accum, deaths, seed = map(int, sys.argv[3:7])
me = GpuRank(kind)
world = me.world
batch = accum * world.grid.replicas


def fire(kill: Fault) -> None:
    note_kill(me.run_dir, kill.step)
    os.kill(os.getpid(), 9)
    time.sleep(60)


victims = random.Random(seed).sample(range(world.grid.replicas), deaths)
kills = [Fault(4 + 2 * n, victim, "in-reduce") for n, victim in enumerate(victims)]
world.hooks = Probe(world.replica, world.shard, kills, fire)
model, optimizer = me.make(size, seq_len)
step = recover.Step(world, model, optimizer, global_batch=batch, clip=1.0)
stream = RandomTokens(SIZES[size].vocab, seq_len, me.device)


def run(tokens: Tokens) -> None:
    step.backward(me.forward(model, tokens))
    if me.on_gpu:
        torch.cuda.current_stream().synchronize()  # the stream that computes, not the one that reduces


facts = {
    "rows": list(timed_steps(step, world.replica, stream, kills[-1].step + 2, run, me.synchronize)),
    "batch": batch,
    "parameters": sum(p.numel() for p in model.parameters()),
    "left": list(world.replicas),
    "expected": sorted(set(range(world.grid.replicas)) - set(victims)),
    "digest": parameters_digest(sorted(model.named_parameters())),
}
(me.run_dir / f"rows-{world.rank}.json").write_text(json.dumps({**facts, **me.place}))
