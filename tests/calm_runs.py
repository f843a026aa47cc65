"""The same training on one machine without any loss, to compare parameters with."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable
from pathlib import Path

from patience import wait_until
from training import finish, start

from recover.checkpoint.directory import FACTS


def calm_digest(place: Path, words: Iterable[str], step: int) -> str:
    """The digest of the parameters after this step, of a run with these keys on three replicas.

    `steps` stays as it is, since the learning rate depends on it: the run is stopped after its checkpoint.
    """
    words = [word for word in words if not word.startswith(("pace=", "checkpoint."))]
    run_dir = place / "calm"
    facts = run_dir / "checkpoints" / f"step-{step}" / FACTS
    job = start(run_dir, *words, "replicas=3", f"checkpoint.every={step}", quiet=True)
    assert wait_until(lambda: facts.exists() or job.poll() is not None)
    job.send_signal(signal.SIGTERM)
    finish(job, run_dir)
    return str(json.loads(facts.read_text())["parameters_digest"])
