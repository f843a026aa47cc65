"""A tiny LLaMA on replicas of several ranks (3D parallelism); every rank writes down what it committed.

Argument: a JSON list of sections, one after the other in the same world. Each has `tp`, `pp`, `ep`, `batch`, `steps`,
and optionally `from` (the number of steps to count from), `schedule`, `tied`, `experts`, `reduction`, `reduction_bits`,
`dtype`, `recompute`, `dropout`, `clip`, `padded` (some targets do not count, and a microbatch weighs as many as do),
`tight` (exponents without headroom: steps overflow often), `several` (two optimizers, the first one of this name),
`place` (a folder to resume from and to save to after the last step) and `inside`: a death inside a round, [step,
replica, local rank, `forward`, `backward` or `bubble`].
Gradients, as the optimizer gets them, go to `gradients-<step>-<rank>.pt`. A section with `counts` has no steps: rounds
of these lengths are run one after the other, and what they leave in `p.grad` goes to `rounds-<from>-<rank>.pt`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

import recover
from recover.gradients import exponents
from recover.gradients.parts import local_part
from recover.parallel import plain_name
from recover.train.models import Llama

sys.path.insert(0, str(Path(__file__).parents[1]))
from toy_llama import Tokens, several_optimizers
from toy_threed import config_of, make_optimizer, weight_of

torch.set_num_threads(1)
world = recover.init()
run_dir = os.environ["RECOVER_RUN_DIR"]
diary = os.open(f"{run_dir}/diary-{world.rank}.jsonl", os.O_CREAT | os.O_WRONLY)


def note(kind: str, **facts: object) -> None:
    os.write(diary, (json.dumps({"kind": kind, "time": time.time(), **facts}) + "\n").encode())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arrange_death(
    pipeline: torch.nn.Module, step: recover.Step, number: int, replica: int, local: int, how: str
) -> None:
    """Let a rank die in the second microbatch of a round of step `number`."""
    seen = {"count": 0}

    def on_forward(module: torch.nn.Module, inputs: object, result: torch.Tensor) -> None:
        if step.index + 1 != number or world.replica != replica:
            return
        seen["count"] += 1
        if how == "bubble":
            if world.shard == local:
                threading.Timer(0.2, die).start()  # and wait for what the other stages send
            else:
                time.sleep(0.5)
        elif world.shard == local and seen["count"] == 2:
            if how == "forward":
                die()
            result.register_hook(lambda gradient: die())

    next(iter(pipeline.blocks.values())).register_forward_hook(on_forward)


def save(name: str, pipeline: torch.nn.Module) -> None:
    """Save the whole gradients of the parameters that this rank holds a part of."""
    gradients = {}
    for parameter, holder in pipeline.named_parameters():
        whole = holder.grad.full_tensor() if isinstance(holder.grad, DTensor) else holder.grad
        gradients[plain_name(parameter)] = whole
    torch.save(gradients, f"{run_dir}/{name}-{world.rank}.pt")


def run(section: dict) -> None:
    start, padded = section.get("from", 0), section.get("padded", False)
    stream = Tokens(padded)
    torch.manual_seed(3)
    pipeline = recover.threed(
        Llama(config_of(section)),
        world,
        tp=section["tp"],
        pp=section["pp"],
        ep=section["ep"],
        schedule=section.get("schedule", "1f1b"),
        param_dtype=getattr(torch, section["dtype"]) if "dtype" in section else None,
        checkpoint_activations=section.get("recompute", False),
    )
    if "counts" in section:
        samples = iter(range(start * sum(section["counts"]), 10**6))
        for count in section["counts"]:
            pipeline([stream[next(samples)] for _ in range(count)])
        save(f"rounds-{start}", pipeline)
        return
    several = section.get("several")
    optimizers = several_optimizers(pipeline, several) if several else [make_optimizer(pipeline)]
    if section.get("tight"):
        exponents.HEADROOM, exponents.START = 0, dict.fromkeys(exponents.START, -30)
    step = recover.Step(
        world,
        pipeline,
        optimizers if several else optimizers[0],
        global_batch=section["batch"],
        reduction=section.get("reduction", "fast"),
        reduction_bits=section.get("reduction_bits", 64),
        clip=section.get("clip", 1.0),
        bucket_mb=0.02,
    )
    place = section.get("place")
    if place is None or recover.resume(step, place) is None:
        samples = {"mode": "exact", "next": start * section["batch"]}
        step.load_state_dict({**step.state_dict(), "index": start, "samples": samples})
    optimizers[0].register_step_pre_hook(lambda *_: save(f"gradients-{step.index + 1}", pipeline))
    if "inside" in section:
        arrange_death(pipeline, step, *section["inside"])
    while step.index < start + section["steps"]:
        rounds = []
        for batches in step.rounds(stream):
            rounds.append(len(batches))
            weights = [weight_of(targets, padded) for _, targets in batches]
            step.backward(pipeline(batches, weights) if padded else pipeline(batches))
        mine = b"".join(local_part(p.detach()).numpy().tobytes() for p in pipeline.parameters())
        note(
            "commit",
            step=step.index,
            weight=step.weight,
            loss=step.loss,
            norm=step.grad_norm,
            samples=step.samples,
            reruns=step.reruns,
            rounds=rounds,
            digest=hashlib.sha256(mine).hexdigest(),
            replicas=world.replicas,
        )
    if place is not None:
        recover.save(step, place)
    heldout = pipeline.evaluate(stream[10**6])
    full = dict(pipeline.full_parameters())
    digest = hashlib.sha256(b"".join(full[name].numpy().tobytes() for name in full)).hexdigest()
    note("end", digest=digest, names=list(full), heldout=heldout, sizes=[p.numel() for p in full.values()])


for section in json.loads(sys.argv[1]):
    run(section)
