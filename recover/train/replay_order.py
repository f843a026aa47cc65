"""The request of a replay to the ranks that compute steps again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

SLOT = "slot.json"  # in the directory of the replay: the result of `slot`


@dataclass(frozen=True)
class ReplayOrder:
    """until:  the last step to take; nothing is saved afterwards
    slot:   a microbatch of the step after it, whose loss is computed"""

    until: int
    slot: int | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ReplayOrder:
        return cls(**json.loads(text))
