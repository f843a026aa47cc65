"""A mixture of experts: a router sends each token to `top_k` of several feed-forward networks.

No token is dropped, and no sum depends on an order that could vary. Tokens are sorted by expert, so that each expert
sees one dense block. `Experts.share` may distribute the blocks over ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

Compute = Callable[[torch.Tensor, list[int]], torch.Tensor]  # rows, and the number of them for each expert
Share = Callable[[torch.Tensor, torch.Tensor, Compute], torch.Tensor]


class Experts(nn.Module):
    """SwiGLU networks with stacked weights, one slice per expert."""

    def __init__(self, experts: int, top_k: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(dim, experts, bias=False)
        self.w1 = nn.Parameter(torch.empty(experts, hidden, dim))
        self.w2 = nn.Parameter(torch.empty(experts, dim, hidden))
        self.w3 = nn.Parameter(torch.empty(experts, hidden, dim))
        # Sends rows to the ranks that hold their experts, and returns the results.
        self.share: Share | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        scores = F.softmax(self.router(tokens).float(), dim=-1)
        weights, chosen = scores.topk(self.top_k, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).type_as(x)
        # A copy per visit and then a permutation: unlike a gather with repeats, it sums gradients in a fixed order.
        visits = tokens.unsqueeze(1).expand(-1, self.top_k, -1).flatten(0, 1)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=scores.shape[-1])
        rows = visits[order]
        share = self.share or (lambda rows, counts, compute: compute(rows, counts.tolist()))
        results = share(rows, counts, self.compute)
        back = results[order.argsort()].unflatten(0, (-1, self.top_k))
        return (back * weights.unsqueeze(-1)).sum(1).view_as(x)

    def compute(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """The experts on this rank, each on its own rows."""
        w1, w2, w3 = (here(weight) for weight in (self.w1, self.w2, self.w3))
        return torch.cat(
            [
                F.linear(F.silu(F.linear(part, w1[i])) * F.linear(part, w3[i]), w2[i])
                for i, part in enumerate(rows.split(counts))
            ]
        )


def here(weight: torch.Tensor) -> torch.Tensor:
    """The part of a weight that is on this rank."""
    to_local = getattr(weight, "to_local", None)
    part: torch.Tensor = to_local() if to_local else weight
    return part
