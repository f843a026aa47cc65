"""Gradients lie in autograd's memory, which is not ours to write to."""

from __future__ import annotations

import math

import pytest
import torch

from recover.gradients import deferred
from recover.gradients.module_gradients import OwnedGradients
from recover.gradients.reduction import make_sum


class SumsOfParameters(torch.nn.Module):
    """A model for which autograd gives the gradients of `first`, of `second` and, for one row, the gradient that flows
    on into the embedding, the same memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = torch.nn.Embedding(7, 8)
        self.first, self.second = (torch.nn.Parameter(torch.randn(5, 8)) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.tokens(ids) + (self.first.unsqueeze(0) + self.second.unsqueeze(0))
        return rows.tanh().square().sum(-1).mean()


@pytest.mark.guarantee(
    "Work kept after a death",
    "The memory of a gradient is left unchanged, since it may belong to another tensor or to the user.",
)
@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("reduction", ["fast", "reproducible"])
@pytest.mark.parametrize("rows", [1, 3])
def test_gradient_memory_is_left_unchanged(
    monkeypatch: pytest.MonkeyPatch, far: bool, reduction: str, rows: int
) -> None:
    """The memory may also belong to another gradient, or to one that still flows backward, or be kept by a user's
    hook."""
    monkeypatch.setattr(deferred, "NEAR", () if far else ("cpu",))
    model, kept = SumsOfParameters(), []
    model.first.register_hook(kept.append)
    for bucket_mb in (1.0, 1e-4):
        gradients = OwnedGradients(model.parameters(), bucket_mb, make_sum(reduction, 4))
        expected = {p: torch.zeros_like(p) for p in model.parameters()}
        gradients.begin()
        for seed in range(3):
            ids = torch.randint(7, (rows, 5), generator=torch.Generator().manual_seed(seed))
            for p, gradient in zip(
                expected, torch.autograd.grad(model(ids), list(expected), materialize_grads=True), strict=True
            ):
                expected[p] += gradient
            reference = kept[-1].clone()
            gradients.expect(None)
            model(ids).backward()
            gradients.collect()
            assert torch.equal(kept[-1], reference), "what the user kept is not what it was"
        assert math.isfinite(gradients.largest.sum())
        for bucket in gradients.buckets:
            bucket.result.copy_(bucket.local)
        gradients.install(1.0, [1.0], gradients.usage)
        for p, total in expected.items():
            torch.testing.assert_close(p.grad, total, rtol=1e-5, atol=1e-6)
            p.grad = None
        gradients._hooks.remove()
