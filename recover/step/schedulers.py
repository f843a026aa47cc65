"""Several learning-rate schedulers as one, for a step with several optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Schedulers:
    """Schedulers that are advanced, saved and restored together, in the order in which they were
    given."""

    def __init__(self, schedulers: Sequence[Any]) -> None:
        self.schedulers = list(schedulers)

    @property
    def last_epoch(self) -> int | None:
        """Grows whenever one of them is advanced; None if none of them counts."""
        counts = [getattr(each, "last_epoch", None) for each in self.schedulers]
        known = [count for count in counts if count is not None]
        return sum(known) if known else None

    def step(self) -> None:
        for each in self.schedulers:
            each.step()

    def state_dict(self) -> dict[str, Any]:
        return {"schedulers": [each.state_dict() for each in self.schedulers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for the state of one scheduler, or of another number of them."""
        saved = state.get("schedulers")
        count = len(saved) if isinstance(saved, list) else 1
        if not isinstance(saved, list) or count != len(self.schedulers):
            raise ValueError(
                f"the state is of {count} scheduler(s), and Step was given {len(self.schedulers)}; give the "
                "schedulers that it was saved with, in the same order"
            )
        for each, theirs in zip(self.schedulers, saved, strict=True):
            each.load_state_dict(theirs)


def as_one_scheduler(scheduler: Any) -> Any:
    """A list of schedulers as one; anything else unchanged."""
    if not isinstance(scheduler, list | tuple):
        return scheduler
    if len(scheduler) == 1:
        return scheduler[0]  # its state is that of `scheduler=` without a list
    return Schedulers(scheduler) if scheduler else None
