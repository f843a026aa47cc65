"""What the jobs of a campaign run on, and what it is asked for."""

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
    limit: float | None = None  # seconds; then it hangs, and is ended
    faults: Sequence[Fault] = ()
    running: set[subprocess.Popen[bytes]] | None = None  # its processes, while they run: others may end them


class Platform(Protocol):
    """What may strike there, how a job is run, and what must hold of it. `returns`: lost replicas are started again."""

    returns: bool

    def check(self, config: Config) -> None: ...

    def schedule(self, config: Config, seed: int) -> tuple[Fault, ...]: ...

    def run(self, job: CampaignRun) -> Any: ...

    def violations(
        self, run: Any, config: Config, faults: Sequence[Fault], calm: Any = None
    ) -> Iterator[str]: ...
