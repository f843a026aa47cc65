"""Ranks of a replica that share a parameter start from the same values, with any strides of the parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recover.parallel.threed.mesh import Holders

LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "by rows": lambda: torch.zeros(3, 4),
    "transposed": lambda: torch.zeros(4, 3).t(),
    "with gaps": lambda: torch.zeros(3, 8)[:, ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copy_from_first_copies_values_with_any_strides(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake broadcast behaves as gloo's: it writes the sender's elements to consecutive addresses."""
    sent = torch.arange(12.0)

    def broadcast(tensor: torch.Tensor, **_: Any) -> None:
        tensor.as_strided((tensor.numel(),), (1,)).copy_(sent)

    monkeypatch.setattr(dist, "broadcast", broadcast)
    mine = LAYOUTS[layout]()
    Holders([0, 1], group=None).copy_from_first(mine)  # type: ignore[arg-type]
    assert torch.equal(mine, sent.view(3, 4))
