"""A tiny LLaMA on sharded replicas (HSDP); every rank writes down what it committed.

Argument: a JSON object with `accum`, `steps`, and optionally `reduction`, `reduction_bits`, `slow_repair` (seconds by
which every rank but the first delays its part in a repair), `slow_peer` (seconds for which one rank sleeps in step 2),
`fsdp1` (the model is wrapped by torch's older FullyShardedDataParallel, with its `use_orig_params`), `gradients`
(parameters stay what they are, and every rank keeps what the optimizer gets), `padded` (some targets do not count, and
every rank gives the number of its own as weight), `tight` (exponents without headroom: steps overflow often), and
`several` (two optimizers, the first one of this name, with limits for each group of parameters).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import recover
import recover.dropin
from recover.gradients import exponents
from recover.gradients.parts import local_part
from recover.parallel import rows
from recover.train.models import Llama
from recover.train.models.llama import Block

sys.path.insert(0, str(Path(__file__).parents[1]))
from toy_llama import CONFIG, LIMITS, Tokens, real, several_optimizers

options = json.loads(sys.argv[1])
torch.set_num_threads(1)
world = recover.init()
if seconds := options.get("slow_repair"):
    quick = world.repair

    def slow(*arguments: object, **named: object) -> object:
        time.sleep(seconds * (world.rank > 0))
        return quick(*arguments, **named)

    world.repair = slow
if options.get("tight"):
    exponents.HEADROOM, exponents.START = 0, dict.fromkeys(exponents.START, -30)
torch.manual_seed(3)
net, gradients = Llama(CONFIG), None
if "fsdp1" in options:
    recover.dropin.init_replica_world(world)
    model = FullyShardedDataParallel(
        net,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=options["fsdp1"],
        device_id=torch.device("cpu"),
    )
    gradients = recover.dropin.FSDPGradients(model, world, bucket_mb=0.02)
else:
    model = recover.hsdp(net, world)
keep = options.get("gradients", False)
several = options.get("several")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.0 if keep else 1e-3)
optimizers = several_optimizers(model, several) if several else [optimizer]
step = recover.Step(
    world,
    model,
    optimizers if several else optimizer,
    global_batch=world.grid.replicas * options["accum"],
    reduction=options.get("reduction", "fast"),
    reduction_bits=options.get("reduction_bits", 64),
    clip=LIMITS if several else None if keep else 1.0,
    bucket_mb=0.02,
    gradients=gradients,
)
diary = os.open(f"{os.environ['RECOVER_RUN_DIR']}/diary-{world.rank}.jsonl", os.O_CREAT | os.O_WRONLY)


def note(kind: str, **facts: object) -> None:
    os.write(diary, (json.dumps({"kind": kind, "time": time.time(), **facts}) + "\n").encode())


if keep:

    def keep_gradients(*_: object) -> None:
        whole = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        torch.save(whole, f"{os.environ['RECOVER_RUN_DIR']}/gradients-{world.rank}-{step.index + 1}.pt")

    optimizer.register_step_pre_hook(keep_gradients)
padded = options.get("padded", False)
stream = Tokens(padded)
while step.index < options["steps"]:
    if options.get("slow_peer") and step.index == 1 and world.rank == 1:
        time.sleep(options["slow_peer"])
    for number, sample in enumerate(step.microbatches(stream)):
        tokens, targets = rows(world, sample)
        # A user's loop would do this in all microbatches but the last; here it is done in every other one.
        held_back = model.no_sync() if "fsdp1" in options and number % 2 else nullcontext()
        if "fsdp1" not in options:
            model.set_requires_gradient_sync(number % 2 == 0)
        with held_back:
            step.backward(model(tokens, targets), weight=real(targets) if padded else 1.0)
    shard = b"".join(local_part(p.detach()).numpy().tobytes() for p in model.parameters())
    note(
        "commit",
        step=step.index,
        weight=step.weight,
        loss=step.loss,
        norm=step.grad_norm,
        samples=step.samples,
        reruns=step.reruns,
        digest=hashlib.sha256(shard).hexdigest(),
        replicas=world.replicas,
    )
states = [v for each in optimizers for p in each.state.values() for v in p.values() if v.numel() > 1]
note(
    "memory",
    parameters=sum(local_part(p).numel() for p in model.parameters()),
    optimizer=sum(local_part(v).numel() for v in states),
    buckets=sum(b.local.numel() for b in step._gradients.buckets),
)
if gradients is not None:
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        full = {n: p.detach().clone() for n, p in model.module.named_parameters()}
    full = {n.replace("_fsdp_wrapped_module.", ""): p for n, p in full.items()}
else:
    full = {name: p.full_tensor() for name, p in model.named_parameters()}
digest = hashlib.sha256(b"".join(full[n].detach().numpy().tobytes() for n in sorted(full))).hexdigest()
note("end", digest=digest, sample={n: full[n].flatten()[:8].tolist() for n in sorted(full)})
