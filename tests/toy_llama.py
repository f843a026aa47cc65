"""A LLaMA of a few thousand parameters, and tokens that are a function of their sample's number alone."""

from __future__ import annotations

import torch

from recover.train.models import Llama, LlamaConfig

CONFIG = LlamaConfig(vocab=61, dim=32, layers=2, heads=4, kv_heads=2, hidden=80, seq_len=16)


class Tokens:
    """Sample i: four sequences. Where they are padded, they differ in the number of targets that count."""

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


LIMITS = [0.1, 0.005, None]  # of the groups of `several_optimizers`


def several_optimizers(model: torch.nn.Module, of_matrices: str) -> list[torch.optim.Optimizer]:
    """One optimizer for the matrices, AdamW with two groups for the rest; their gradients are clipped by `LIMITS`."""
    named = dict(model.named_parameters())
    embeddings = [p for name, p in named.items() if "embed" in name]
    matrices = [p for name, p in named.items() if p.ndim == 2 and "embed" not in name]
    vectors = [p for p in named.values() if p.ndim < 2]
    first: torch.optim.Optimizer = (
        torch.optim.Muon(matrices, lr=2e-3)
        if of_matrices == "Muon"
        else torch.optim.SGD(matrices, lr=0.05, momentum=0.9)
    )
    return [first, torch.optim.AdamW([{"params": vectors}, {"params": embeddings, "lr": 2e-3}], lr=1e-3)]


def reference(
    steps: int, batch: int, several: str = ""
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and final parameters of one process; `several`: with `several_optimizers`."""
    torch.manual_seed(3)
    model = Llama(CONFIG)
    stream, losses, norms = Tokens(), [], []
    optimizers = (
        several_optimizers(model, several) if several else [torch.optim.AdamW(model.parameters(), lr=1e-3)]
    )
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    for step in range(steps):
        model.zero_grad()
        total = 0.0
        for slot in range(batch):
            loss = model(*stream[step * batch + slot]) / batch
            loss.backward()
            total += loss.item()
        limit = float("inf") if several else 1.0
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        for parameters, own in zip(groups, LIMITS, strict=False) if several else ():
            torch.nn.utils.clip_grad_norm_(parameters, float("inf") if own is None else own)
        for optimizer in optimizers:
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
