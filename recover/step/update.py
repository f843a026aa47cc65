"""The optimizer's part of a committed step: after the verdict, and alike on all replicas."""

from __future__ import annotations

from typing import Any

import torch

from recover.step.loop.habits import Habits
from recover.step.randomness import Randomness
from recover.step.transaction import Transaction


class Update:
    """`clip`: limit of the global gradient norm."""

    def __init__(self, optimizer: Any, clip: float | None, randomness: Randomness, habits: Habits) -> None:
        self._optimizer, self._clip, self._randomness, self._habits = optimizer, clip, randomness, habits

    def apply(self, transaction: Transaction, number: int, norm: float) -> None:
        totals, shrink = transaction.totals, 1.0
        if self._clip is not None and norm > self._clip:
            shrink = self._clip / (norm + 1e-6)
        transaction.gradients.install(totals.weight, shrink, totals.used.tolist())
        self._randomness.update(number)
        with self._habits.updating():
            self._optimizer.step()
        transaction.buffers.settle(torch.from_numpy(totals.changes), len(totals.samples))
