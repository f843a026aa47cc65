"""What must be the same on every host of a job, each as a word that tells where it differs."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from recover.agent.host_options import HostPart
from recover.job.machine import version_of
from recover.job.spec import JobSpec

SHOWN = 12  # characters of a digest


def facts_of(
    part: HostPart, spec: JobSpec, script: Path, module: bool, lease: float, more: Mapping[str, str]
) -> dict[str, str]:
    """By name; `more` is what the job itself adds. No secrets: all can read it who can read etcd."""
    return {
        "--nnodes": part.nnodes,
        "--replica-size": str(spec.replica_size),
        "--carrier": spec.carrier,
        "--hang-limit": str(spec.hang_limit),
        "--link-timeout": f"{spec.link_timeout:g}",
        "--kill": " ".join(spec.faults) or "none",
        "--lease": f"{lease:g}",
        "--return": "yes" if part.returns else "no",
        "--standby": str(part.standby),
        "the version of Python": platform.python_version(),
        "the version of torch": version_of("torch"),
        "the version of recover": f"{version_of('recover')} ({_digest(_sources())})",
        f"the script {script.name}": "a module" if module else _digest([script.read_bytes()]),
        **more,
    }


def words_of(args: Sequence[str]) -> dict[str, str]:
    """What a script is told on its command line."""
    return {"what the script is told": f"{' '.join(args)[:60]!r} ({_digest(arg.encode() for arg in args)})"}


def _sources() -> Iterable[bytes]:
    """Our own code: a version says little of a working copy."""
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        yield path.relative_to(root).as_posix().encode()
        yield path.read_bytes()


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:SHOWN]
