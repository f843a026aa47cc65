"""Which sample a slot stands for.

`exact`        slot i of step t is sample (t-1)*B + i of the stream, whoever computes it.
`partitioned`  (the paper) a replica draws from a partition of its own, and a dead replica's partition drops out.
"""

from __future__ import annotations

from typing import Any, Literal

SampleMode = Literal["exact", "partitioned"]


class ExactSamples:
    def __init__(self, global_batch: int) -> None:
        self._global_batch = global_batch

    def index(self, step: int, slot: int) -> int:
        return (step - 1) * self._global_batch + slot

    def committed(self, samples: list[int], contributed: bool) -> None:
        pass

    def put_back(self) -> None:
        pass  # a slot is its sample, whoever runs it

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class PartitionedSamples:
    """Replica r of W owns samples r, r + W, r + 2W, ... and draws them one after the other.

    The state is the same on all replicas, so that a run can go on with another number of them: partitions are cut anew
    behind the last sample that any replica has contributed.
    """

    def __init__(self, replica: int, replicas: int) -> None:
        self._replica, self._replicas = replica, replicas
        self._start = 0
        self._drawn = self._mark = 0
        self._behind = 0  # all contributed samples lie below

    def index(self, step: int, slot: int) -> int:
        self._drawn += 1
        return self._start + self._replica + (self._drawn - 1) * self._replicas

    def committed(self, samples: list[int], contributed: bool) -> None:
        self._behind = max([self._behind, *(sample + 1 for sample in samples)])
        if not contributed:
            self.put_back()
        self._mark = self._drawn

    def put_back(self) -> None:
        """What this replica drew in this step was not used: a spare draws it again."""
        self._drawn = self._mark

    def state_dict(self) -> dict[str, Any]:
        return {"start": self._behind}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._start = self._behind = state["start"]
        self._drawn = self._mark = 0


def sample_mode(mode: str, policy: str, global_batch: int, replica: int, replicas: int) -> Any:
    """The mapping of this name; refuses a pair that cannot keep its promise."""
    if mode == "exact":
        if policy == "static":
            raise ValueError(
                "samples='exact' does not go with policy='static': a spare's samples are almost never the ones that a "
                "dead replica leaves behind; use policy='balanced', or samples='partitioned'"
            )
        return ExactSamples(global_batch)
    if mode == "partitioned":
        return PartitionedSamples(replica, replicas)
    raise ValueError(f"samples={mode!r} is not known; choose 'exact' or 'partitioned'")
