"""Expert parallelism: sends rows to the ranks that hold their experts, and results back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class Exchange:
    """Exchanges rows in a group whose ranks each hold the same number of experts, in order, and have
    rows for all of them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._size = group, dist.get_world_size(group)

    def __call__(
        self,
        rows: torch.Tensor,
        counts: torch.Tensor,
        compute: Callable[[torch.Tensor, list[int]], torch.Tensor],
    ) -> torch.Tensor:
        """Send rows to their experts, compute there, and return the results in the order of `rows`. These are
        sorted by expert, `counts` of them for each."""
        leaving = counts.view(self._size, -1)  # by rank, and there by expert
        arriving = torch.empty_like(leaving)
        dist.all_to_all_single(arriving, leaving, group=self._group)
        out, back = leaving.sum(1).tolist(), arriving.sum(1).tolist()
        arrived: torch.Tensor = _Travel.apply(rows, out, back, self._group)
        # They arrive sorted by sender; each expert needs its rows in one piece.
        experts = torch.arange(leaving.shape[1], device=rows.device).repeat(self._size)
        order = experts.repeat_interleave(arriving.flatten()).argsort(stable=True)
        results = compute(arrived[order], arriving.sum(0).tolist())
        returned: torch.Tensor = _Travel.apply(results[order.argsort()], back, out, self._group)
        return returned


class _Travel(torch.autograd.Function):
    """Sends the first `leaving[0]` rows to rank 0 of the group, and so on; gradients go the other
    way."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, leaving: list[int], arriving: list[int], group: Any
    ) -> torch.Tensor:
        ctx.way = leaving, arriving, group
        arrived = rows.new_empty(sum(arriving), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), arriving, leaving, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        leaving, arriving, group = ctx.way
        (gradient,) = gradients
        returned = gradient.new_empty(sum(leaving), *gradient.shape[1:])
        dist.all_to_all_single(returned, gradient.contiguous(), leaving, arriving, group=group)
        return returned, None, None, None
