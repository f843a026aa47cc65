"""A plain PyTorch training loop made fault tolerant: `plain_loop_before.py` with 7 lines added and 9 deleted.

    RECOVER_KILL="8:1:in-reduce" recover run -n 3 examples/plain_loop.py

Replica 1 is killed inside a reduction of step 8; the others go on, and the losses stay those of the one process before.
"""

import os
from pathlib import Path

import torch

import recover

STEPS, GLOBAL_BATCH = 20, 12
SEQUENCES, LENGTH, WIDTH = 8, 64, 64


class Stream:
    """Sample i: a few sequences of bytes, picked by i alone."""

    def __init__(self) -> None:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        self.text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        starts = torch.randint(len(self.text) - LENGTH, (SEQUENCES,), generator=generator)
        return torch.stack([self.text[start : start + LENGTH + 1] for start in starts]).long()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(256, WIDTH)
        self.places = torch.nn.Embedding(LENGTH, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.output = torch.nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(LENGTH)
        x = self.tokens(tokens) + self.places(torch.arange(LENGTH))
        return self.output(self.layers(x, mask=mask, is_causal=True))


world = recover.init()
torch.manual_seed(0)
stream, model = Stream(), Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
step = recover.Step(world, model, optimizer, GLOBAL_BATCH)

while step.index < STEPS:
    for batch in step.microbatches(stream):
        loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        step.backward(loss)
    step.on_first(print, f"step {step.index} loss {step.loss:.4f} on {step.weight:g} by {world.replicas}")
