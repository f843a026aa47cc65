"""A model that is wrapped in DistributedDataParallel already, by `recover.dropin`.

    RECOVER_KILL="5:1:in-reduce" recover run -n 3 examples/own_ddp.py

DDP keeps its buckets and its hooks; what it reduces across replicas goes through recover. DDP's own process group
holds this replica alone: no group that breaks with its members may span replicas.
"""

import os
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import recover
import recover.dropin
from recover.train.models import Llama, LlamaConfig

STEPS, GLOBAL_BATCH = 12, 12
SEQUENCES, LENGTH = 8, 64


class Stream:
    """Sample i: a few sequences of bytes, picked by i alone, and what follows each byte."""

    def __init__(self) -> None:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        self.text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        starts = torch.randint(len(self.text) - LENGTH, (SEQUENCES,), generator=generator)
        rows = torch.stack([self.text[start : start + LENGTH + 1] for start in starts]).long()
        return rows[:, :-1], rows[:, 1:]


world = recover.init()
torch.manual_seed(0)
recover.dropin.init_replica_world(world)
model = DistributedDataParallel(
    Llama(LlamaConfig(dim=64, layers=2, heads=4, kv_heads=2, hidden=160, seq_len=LENGTH)), bucket_cap_mb=0.1
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
gradients = recover.dropin.DDPGradients(model)
step = recover.Step(world, model, optimizer, GLOBAL_BATCH, gradients=gradients)
stream = Stream()

while step.index < STEPS:
    for tokens, targets in step.microbatches(stream):
        step.backward(model(tokens, targets))
    step.on_first(print, f"step {step.index} loss {step.loss:.4f} on {step.weight:g} by {world.replicas}")
