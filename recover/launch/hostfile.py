"""Open MPI over several hosts (`recover run --hostfile`, deprecated): options of mpirun beyond
those for one host.

PRRTE, Open MPI's runtime, starts a daemon on each host by ssh (or by Slurm or PBS). The session
lies on the host of the launcher only, so ranks read the job from variables, as under a site's own
mpirun, and share a directory on each host. All hosts must share the run directory. A rank may die;
**a lost host ends the job**: PRRTE ends all of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from recover.job.spec import VARIABLE, JobSpec
from recover.launch.preflight import Refusal

# Variables by which a site says how the other hosts are reached.
KEPT = ("PRTE_MCA_plm_ssh_agent", "PRTE_MCA_plm_ssh_args", "PRTE_MCA_prte_if_include")
DEPRECATED = (
    "--hostfile is deprecated: ranks may die, but the loss of a host ends the job; use --nnodes HOSTS --rdzv-endpoint "
    "HOST:PORT, the same command on each host, which survives that, too"
)


def check_hostfile(path: Path, ranks: int) -> None:
    """Check a hostfile. Raises Refusal, which names the file, the value and the remedy."""
    try:
        lines = [line.partition("#")[0].split() for line in path.read_text().splitlines()]
    except OSError as error:
        raise Refusal(
            f"--hostfile {path} cannot be read ({error}); give a file with a line for each host"
        ) from None
    slots = 0
    for words in filter(None, lines):
        found = [re.fullmatch(r"(?:max_)?slots=(\d+)", word) for word in words[1:]]
        if not all(found):
            raise Refusal(f"--hostfile {path}: {' '.join(words)!r} is no host; write NAME slots=NUMBER")
        slots += max((int(match[1]) for match in found if match), default=1)
    if slots < ranks:
        raise Refusal(
            f"--hostfile {path} has {slots} slots, and there are to be {ranks} ranks; give it "
            "more (NAME slots=NUMBER), or lower -n"
        )


def options(path: Path, spec: JobSpec) -> list[str]:
    """Options of mpirun for the hosts in the file."""
    variables = {
        "RECOVER_RUN_DIR": str(spec.run_dir),
        "RECOVER_REPLICA_SIZE": str(spec.replica_size),
        "RECOVER_CARRIER": "gloo" if spec.carrier == "auto" else spec.carrier,
        "RECOVER_HANG_LIMIT": f"{spec.hang_limit:g}" if spec.hang_limit else "",
        "RECOVER_LINK_TIMEOUT": f"{spec.link_timeout:g}",
        "RECOVER_KILL": " ".join(spec.faults),
        "ONEDNN_JIT_PROFILE": os.environ.get("ONEDNN_JIT_PROFILE", "1"),  # as `recover.cli` has it
    }
    line = ["--hostfile", str(path.absolute()), "--map-by", "slot"]
    for name, value in variables.items():
        line += ["-x", f"{name}={value}"]
    return [*line, *(word for name in ("PYTHONPATH", "OMP_NUM_THREADS") for word in ("-x", name))]


def parameters(inside_one_host: Mapping[str, str]) -> dict[str, str]:
    """MCA parameters: those of one host, with TCP between hosts."""
    kept = {name: value for name, value in inside_one_host.items() if not name.endswith("backing_directory")}
    # Topology 3 is a star: over hosts a chain hangs until all are connected. A rank that waits
    # yields its core to the thread of the network.
    return kept | {"btl": "self,sm,tcp", "coll_ftagree_era_topology": "3", "mpi_yield_when_idle": "1"}


def environment(session: Mapping[str, str]) -> dict[str, str]:
    """The environment of mpirun, with the variables by which it reaches the other hosts."""
    return {
        **session,
        **{name: os.environ[name] for name in KEPT if name in os.environ},
        "PYTHONPATH": _path(),
    }


def rank_command(command: list[str]) -> list[str]:
    """The command of a rank, without the session, also on this host: the other hosts have none."""
    return ["env", "-u", VARIABLE, "-u", "TMPDIR", *command]


def _path() -> str:
    return os.environ.get("PYTHONPATH", "")
