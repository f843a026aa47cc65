"""The request of a replay to a user's script that runs again: which steps, and from which checkpoint.

The script itself is not changed. `recover.Step`, `recover.save` and `recover.resume` follow the
order of the job that they run in.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class ScriptReplay:
    """until:         the script ends before the step after this one
    global_batch:  microbatches of a step of the run
    checkpoint:    that `recover.resume` loads; "": the script starts from the beginning"""

    until: int
    global_batch: int
    checkpoint: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ScriptReplay | None:
        """The request in `text`; None if it is empty: the job is no replay."""
        return cls(**json.loads(text)) if text else None

    def refuse_other_batch(self, global_batch: int) -> None:
        if global_batch != self.global_batch:
            raise ValueError(
                f"a step of the run has {self.global_batch} microbatches, and in this replay, on one replica, "
                f"global_batch is {global_batch}: the script computes it from the number of replicas; give a number "
                "that does not depend on it"
            )
