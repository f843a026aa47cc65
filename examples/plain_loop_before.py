"""A plain PyTorch training loop: a byte-level language model on the sources of Python's standard library.

    python examples/plain_loop_before.py

One process, no fault tolerance. `plain_loop.py` is the same loop with 7 lines added and 9 deleted.
"""

import os
from pathlib import Path

import torch

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


torch.manual_seed(0)
stream, model = Stream(), Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for index in range(STEPS):
    total = 0.0
    for slot in range(GLOBAL_BATCH):
        batch = stream[index * GLOBAL_BATCH + slot]
        loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        (loss / GLOBAL_BATCH).backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {index + 1} loss {total / GLOBAL_BATCH:.4f}")
