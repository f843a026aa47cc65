"""Environment variables of a job's processes: one builder, for ranks that mpirun starts and for
those started directly.

Order of precedence, lowest first: the launcher's own environment without what another launcher has
put there, the variables of the job on this host, the variables of one rank.
"""

from __future__ import annotations

import os
from pathlib import Path

from recover.job import process
from recover.job.spec import VARIABLE, JobSpec
from recover.launch import preflight


def job_environment(spec: JobSpec, job_file: Path, scratch: Path, ranks_on_host: int) -> dict[str, str]:
    """Variables that all processes of a job on this host share. `scratch`: their temporary
    directory."""
    environment = preflight.clean_environment()
    # Ranks share the cores; without this each would start a thread per core.
    cores = len(os.sched_getaffinity(0))
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // max(1, ranks_on_host))))
    return environment | {
        # The guardian finds the processes of the job by it: it must be set in every one of them.
        VARIABLE: str(job_file),
        "RECOVER_RUN_DIR": str(spec.run_dir),  # for scripts; our own code reads the job file
        "TMPDIR": str(scratch),  # Open MPI's session directory lies there, too
    }


def rank_variables(rank: int, slot: int, ranks_on_host: int) -> dict[str, str]:
    """Variables of one rank that is started without mpirun, which would set its own."""
    return {
        process.RANK: str(rank),
        process.RANK_ON_HOST: str(slot),
        process.RANKS_ON_HOST: str(ranks_on_host),
    }
