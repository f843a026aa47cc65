"""A small training run through the public API; every rank writes down what it committed.

Argument: a JSON object with `policy`, `samples`, `accum`, `steps`, and optionally `carrier`, `flip` ([step, replica]:
flip a bit of that replica's weights), `poison` (a sample that raises), `nan` (a sample whose loss is NaN),
`ddp` (in place, on a user's own DDP: the restore mode; `views`: with DDP's gradients as views of its buckets).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time

import torch

import recover

options = json.loads(sys.argv[1])
torch.set_num_threads(1)
world = recover.init(carrier=options.get("carrier", "auto"))
torch.manual_seed(100 + world.rank)  # different on purpose: Step starts all replicas from the same bits


class Stream:
    """Sample i, out of nothing but i."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        if index == options.get("poison"):
            raise ValueError("this sample cannot be read")
        generator = torch.Generator().manual_seed(index)
        scale = float("nan") if index == options.get("nan") else 1.0
        return torch.randn(4, 16, generator=generator), torch.randn(4, 3, generator=generator) * scale, index


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(16, 64)
        self.sometimes = torch.nn.Linear(64, 64)
        self.outer = torch.nn.Linear(64, 3)

    def forward(self, inputs: torch.Tensor, index: int) -> torch.Tensor:
        hidden = torch.tanh(self.inner(inputs))
        if index % 3 == 0 and not options.get("ddp"):
            hidden = hidden + torch.tanh(self.sometimes(hidden))
        return self.outer(hidden)


model = Model()
gradients = None
if options.get("ddp"):
    from torch.nn.parallel import DistributedDataParallel

    import recover.dropin

    model.sometimes.requires_grad_(False)
    recover.dropin.init_replica_group(world)
    model = DistributedDataParallel(
        model, bucket_cap_mb=0.002, gradient_as_bucket_view=options.get("views", False)
    )
    gradients = recover.dropin.DDPGradients(model, restore=options["ddp"])
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
step = recover.Step(
    world,
    model,
    optimizer,
    global_batch=world.grid.replicas * options["accum"],
    policy=options["policy"],
    samples=options["samples"],
    bucket_mb=0.002,
    clip=options.get("clip"),
    gradients=gradients,
)
diary = os.open(f"{os.environ['RECOVER_RUN_DIR']}/diary-{world.rank}.jsonl", os.O_CREAT | os.O_WRONLY)


def note(kind: str, **facts: object) -> None:
    os.write(diary, (json.dumps({"kind": kind, "time": time.time(), **facts}) + "\n").encode())


def digest() -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


note("start", parameters=[p.tolist() for p in model.parameters()])
stream = Stream()
while step.index < options["steps"]:
    if options.get("flip") == [step.index + 1, world.replica]:
        with torch.no_grad():
            next(iter(model.parameters())).view(-1).view(torch.int32)[5] ^= 1
    for inputs, target, index in step.microbatches(stream):
        loss = torch.nn.functional.mse_loss(model(inputs, index), target)
        step.backward(loss)
        note("slot", step=step.index + 1, index=index)
    note(
        "commit",
        step=step.index,
        epoch=world.epoch,
        weight=step.weight,
        loss=step.loss,
        norm=step.grad_norm,
        samples=step.samples,
        skipped=step.skipped,
        digest=digest(),
        replicas=world.replicas,
        incidents=[
            {
                "dead": i.dead_ranks,
                "complete": i.complete,
                "boundary": i.boundary,
                "restore": i.restore,
                "extra": i.extra_microbatches,
                "discarded": i.discarded_microbatches,
            }
            for i in step.incidents
        ],
    )
note("end", parameters=[p.tolist() for p in model.parameters()])
