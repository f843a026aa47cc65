"""Where this process stands, as the environment that its MPI launcher made tells it, before MPI is initialised."""

from __future__ import annotations

import os


def rank() -> int | None:
    """This process's rank; None outside of a job."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return None


def rank_on_host() -> int:
    """Its number among the ranks of this host."""
    return int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"))


def on_one_host() -> bool:
    """Whether all ranks of the job are on this host."""
    return os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == os.environ.get("OMPI_COMM_WORLD_SIZE")
