"""The microbatch in flight, if it is verified: its fingerprint, and operations that are not
deterministic."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from recover.gradients.gradient_hash import GradientHash
from recover.gradients.module_gradients import Gradients, OwnedGradients
from recover.step.operations import Call, OperationRecorder, not_deterministic
from recover.step.verification import Verification


class CheckedMicrobatch:
    """Computes fingerprints of verified microbatches, and reports them to `Verification`. Does nothing
    for slots that are not verified.

    strikes:  called before a verified slot runs, for fault schedules
    """

    def __init__(
        self, verification: Verification, gradients: Gradients, strikes: Callable[[str], None]
    ) -> None:
        self._verification, self._gradients, self._strikes = verification, gradients, strikes
        self._slot = 0
        self._hash: GradientHash | None = None
        self._recorder: OperationRecorder | None = None
        self._calls: list[Call] | None = None  # of the run before
        self.counts = True  # the microbatch enters the local sums

    def hand_out(self, slots: Sequence[int], place: str) -> None:
        """Prepare the check of slots that are about to run."""
        self.counts, self._hash = place != "check", None
        if not self._verification.is_on or not (
            place == "check" or any(map(self._verification.is_checked, slots))
        ):
            return
        assert isinstance(self._gradients, OwnedGradients)  # `Step` refuses others
        (self._slot,) = slots
        self._hash = self._gradients.check(self.counts)
        if self.counts:
            self._strikes("check")  # otherwise the slot's own place is `check`
        if self._verification.wants_operations and not self.counts:
            self._recorder = OperationRecorder()
            self._recorder.__enter__()
        else:
            self._calls = None

    def computed(self, loss: torch.Tensor, weights: Sequence[float]) -> None:
        """Record the fingerprint of the microbatch, whose gradients were taken."""
        if self._hash is None:
            return
        self._stop_recording()
        self._hash.add_value("loss", loss)
        self._hash.add_value("weights", torch.tensor(weights, dtype=torch.float64))
        note = self._verification.note_owned if self.counts else self._verification.note
        note(self._slot, self._hash.value())
        self._hash = None

    def leave(self) -> None:
        """Drop the check in progress: the step is left on this rank."""
        self.counts, self._hash = True, None
        if self._recorder is not None:
            self._recorder.__exit__(None, None, None)
            self._recorder = None

    def _stop_recording(self) -> None:
        if self._recorder is None:
            return
        self._recorder.__exit__(None, None, None)
        calls, self._recorder = self._recorder.calls, None
        if self._calls is not None:
            self._verification.note_operations(not_deterministic(self._calls, calls))
        self._calls = calls
