"""One stage of a pipeline: consecutive layers on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Stage(torch.nn.Module):
    """Consecutive layers, with the embedding before the first and the output after the last of
    the model."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, whole: Any, index: int, layers: Iterable[int]) -> None:
        super().__init__()
        cut = whole.mesh.cut
        self._tp = cut.tp
        self.index, self.is_first, self.is_last = index, index == 0, index == cut.stages - 1
        self.before = torch.nn.ModuleList([whole.embedding] if self.is_first else [])
        self.blocks = torch.nn.ModuleList(whole.blocks[str(layer)] for layer in layers)
        self.after = torch.nn.ModuleList([whole.norm, whole.output] if self.is_last else [])
        self.microbatch = -1  # of the round: every schedule begins them in their order
        self.on_microbatch: Callable[[int, int], None] | None = None  # gets its number, and this rank's stage
        self.register_buffer("cos", whole.cos, persistent=False)
        self.register_buffer("sin", whole.sin, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.microbatch += 1
        if self.on_microbatch is not None:
            self.on_microbatch(self.microbatch, self.index)
        # Tokens come whole. Between stages each tensor-parallel rank holds its part of the
        # sequence.
        length = x.shape[1] * (1 if self.is_first else self._tp)
        for module in self.before:
            x = module(x)
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        for module in self.after:
            x = module(x)
        return x
