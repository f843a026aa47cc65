"""Facts that must be the same on every host of a job, as short values that an error can show."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

from recover.job.code import digest_of, recover_version
from recover.job.machine import version_of
from recover.job.spec import JobSpec
from recover.launch.hosts.options import HostPart


def facts_of(
    part: HostPart, spec: JobSpec, script: Path, module: bool, lease: float, more: Mapping[str, str]
) -> dict[str, str]:
    """The facts, by name. `more`: facts of the job itself. No secrets: every process that can read
    etcd can read them."""
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
        "the version of recover": recover_version(),
        f"the script {script.name}": "a module" if module else digest_of([script.read_bytes()]),
        **more,
    }


def words_of(args: Sequence[str]) -> dict[str, str]:
    """The arguments of a script as a fact."""
    return {"arguments of the script": f"{' '.join(args)[:60]!r} ({digest_of(arg.encode() for arg in args)})"}
