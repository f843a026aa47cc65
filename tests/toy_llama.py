"""A LLaMA of a few thousand parameters and tokens out of nothing but their number."""

from __future__ import annotations

import torch

from recover.train.models import Llama, LlamaConfig

CONFIG = LlamaConfig(vocab=61, dim=32, layers=2, heads=4, kv_heads=2, hidden=80, seq_len=16)


class Tokens:
    """Sample i: four sequences. Where they are padded, each has another number of targets that count."""

    def __init__(self, padded: bool = False) -> None:
        self._padded = padded

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(0, CONFIG.vocab, (4, 17), generator=torch.Generator().manual_seed(index))
        targets = tokens[:, 1:].clone()
        if self._padded:
            for row in range(4):
                targets[row, 1 + (7 * index + 4 * row) % 15 :] = -100
        return tokens[:, :-1], targets


def real(targets: torch.Tensor) -> int:
    """How many targets count."""
    return int((targets != -100).sum())


def reference(steps: int, batch: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and final parameters of one process."""
    torch.manual_seed(3)
    model = Llama(CONFIG)
    optimizer, stream = torch.optim.AdamW(model.parameters(), lr=1e-3), Tokens()
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for slot in range(batch):
            loss = model(*stream[step * batch + slot]) / batch
            loss.backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        losses.append(total)
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


def reference_gradients(step: int, batch: int, padded: bool = False) -> dict[str, torch.Tensor]:
    """The mean gradients of one process over a step's samples (over their tokens), at the first parameters."""
    torch.manual_seed(3)
    model, stream = Llama(CONFIG), Tokens(padded)
    samples = [stream[(step - 1) * batch + slot] for slot in range(batch)]
    total = sum(real(targets) for _, targets in samples)
    for tokens, targets in samples:
        (model(tokens, targets) * real(targets) / total).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
