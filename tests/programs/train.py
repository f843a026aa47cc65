"""A small training run through the public API; every rank writes down what it committed.

Argument: a JSON object with `policy`, `samples`, `accum`, `steps`, and optionally `carrier`, `flip` ([step, replica]: a
bit of that replica's weights, or of its buffer `flipped`, is flipped before that step), `poison` (a sample that
raises), `nan` (a sample whose loss is NaN), `always` (every microbatch uses all parameters), `ddp` (in place, on a
user's own DDP: the restore mode) and `views` (with DDP's gradients as views of its buckets; the loop keeps its own
no_sync() in every second microbatch), `ends` ([step, replica]: the script ends there after that step), `reduction`,
`reduction_bits`, `dropout`, `noise` (drawn by the stream), `bit`, and `spikes` (by sample: how many times larger its
gradient is).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import torch

import recover

sys.path.insert(0, str(Path(__file__).parents[1]))
from toy import MEMORY, Model, Stream, loss_of, make_optimizer, spiked

options = json.loads(sys.argv[1])
torch.set_num_threads(1)
world = recover.init(carrier=options.get("carrier", "auto"))
torch.manual_seed(100 + world.rank)  # different on purpose: Step starts all replicas from the same bits
device = os.environ.get("TEST_DEVICE", "cpu")
model: torch.nn.Module = Model(options.get("always", False), options.get("dropout", 0.0)).to(device)
gradients = None
if options.get("ddp"):
    from torch.nn.parallel import DistributedDataParallel

    import recover.dropin

    recover.dropin.init_replica_world(world)
    model = DistributedDataParallel(model, bucket_cap_mb=0.002, gradient_as_bucket_view=options["views"])
    gradients = recover.dropin.DDPGradients(model, restore=options["ddp"])
step = recover.Step(
    world,
    model,
    make_optimizer(model),
    global_batch=world.grid.replicas * options["accum"],
    policy=options["policy"],
    samples=options["samples"],
    reduction=options.get("reduction", "fast"),
    reduction_bits=options.get("reduction_bits", 64),
    bucket_mb=0.002,
    gradients=gradients,
    buffers=[f"module.{name}" if options.get("ddp") else name for name in MEMORY],
)
diary = os.open(f"{os.environ['RECOVER_RUN_DIR']}/diary-{world.rank}.jsonl", os.O_CREAT | os.O_WRONLY)


def note(kind: str, **facts: object) -> None:
    os.write(diary, (json.dumps({"kind": kind, "time": time.time(), **facts}) + "\n").encode())


def digest() -> str:
    return hashlib.sha256(
        b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    ).hexdigest()


note("start", parameters=[p.tolist() for p in model.parameters()])
unreadable = options.get("poison") if world.replica == 0 else None
stream = Stream(unreadable, options.get("nan"), options.get("noise", 0.0))
microbatches = 0
while step.index < options["steps"]:
    if options.get("flip") == [step.index + 1, world.replica]:
        with torch.no_grad():
            struck = getattr(model, options["flipped"]) if "flipped" in options else next(model.parameters())
            struck.view(-1).view(torch.int32)[5] ^= 1 << options.get("bit", 0)
    for sample in step.microbatches(stream):
        inputs, target, index = sample
        if index == options.get("poison"):
            raise ValueError("this sample cannot be read")
        microbatches += 1
        with model.no_sync() if gradients and microbatches % 2 else nullcontext():
            loss = loss_of(model, (inputs.to(device), target.to(device), index))
            step.backward(spiked(loss, options.get("spikes", {}).get(str(index), 1.0)))
        note("slot", step=step.index + 1, index=sample[2])
    note(
        "commit",
        step=step.index,
        weight=step.weight,
        loss=step.loss,
        samples=step.samples,
        skipped=step.skipped,
        reruns=step.reruns,
        digest=digest(),
        replicas=world.replicas,
        incidents=[asdict(incident) for incident in step.incidents],
    )
    if options.get("ends") == [step.index, world.replica]:
        sys.exit()
rewinds = gradients.rewinds if gradients else {}
memory = [buffer.tolist() for buffer in model.buffers()]
note("end", parameters=[p.tolist() for p in model.parameters()], memory=memory, rewinds=rewinds)
