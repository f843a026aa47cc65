"""Interface of what the jobs of a campaign run on: one machine, or the hosts of a lab."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from recover.faults import Fault
from recover.train.config import Config


@dataclass(frozen=True)
class CampaignRun:
    """One `recover train` of a campaign."""

    words: Sequence[str]
    run_dir: Path
    limit: float | None = None  # seconds after which it counts as hung and is ended
    faults: Sequence[Fault] = ()
    running: set[subprocess.Popen[bytes]] | None = (
        None  # its processes while they run, so that the caller can end them
    )


class Platform(Protocol):
    """Draws the faults of a job, runs it and checks its invariants. `returns`: lost replicas are restarted."""

    returns: bool

    def check(self, config: Config) -> None: ...

    def schedule(self, config: Config, seed: int) -> tuple[Fault, ...]: ...

    def run(self, job: CampaignRun) -> Any: ...

    def violations(
        self, run: Any, config: Config, faults: Sequence[Fault], calm: Any = None
    ) -> Iterator[str]: ...
