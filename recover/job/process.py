"""The rank of this process and its host, from the environment that its launcher made, before MPI or
without it."""

from __future__ import annotations

import ctypes
import os
import signal

# Set for ranks that are started without mpirun; Open MPI's runtime has variables of its own.
RANK, RANK_ON_HOST, RANKS_ON_HOST = "RECOVER_RANK", "RECOVER_LOCAL_RANK", "RECOVER_LOCAL_SIZE"
LOCAL_RANK = "LOCAL_RANK"  # as torchrun calls it; torch itself reads it
# Variables of launchers under which every process would make a world of its own.
FOREIGN = {"WORLD_SIZE": "torchrun", "SLURM_STEP_NUM_TASKS": "srun", "PMI_SIZE": "another MPI's launcher"}
_RUNTIME = ("OMPI_", "PMIX_")
_SETTINGS = ("OMPI_MCA_", "PMIX_MCA_", "OMPI_ALLOW_")  # read whenever a part of Open MPI is first used

# The process name of a rank, with its number: the command line of a prewarmed process does not tell
# it. The kernel keeps 15 characters, and numbers grow with every restarted rank.
_NAME = "recover-"
_PR_SET_NAME = 15

_hidden: dict[str, str] = {}
given_environment: dict[str, str] | None = None  # when the script began
given_command: tuple[str, ...] = ()  # of the script: its path (or -m and its module), and its arguments
given_directory = ""  # in which it began
waited_until = 0.0  # seconds after boot: until then this process waited, prewarmed, for its rank


def hide_mpi_variables() -> None:
    """Remove the variables of Open MPI's runtime, which has read them. Libraries that look for a
    launcher (accelerate, and with it Hugging Face's Trainer) would take each rank for a process of
    a distributed job of theirs."""
    for name in [name for name in os.environ if name.startswith(_RUNTIME) and not name.startswith(_SETTINGS)]:
        _hidden[name] = os.environ.pop(name)


def _variable(*names: str) -> str:
    """The first of these that is set, hidden or not; "" if none is."""
    return next((value for name in names if (value := os.environ.get(name) or _hidden.get(name))), "")


def rank() -> int | None:
    """This process's rank; None outside of a job."""
    for name in (RANK, "OMPI_COMM_WORLD_RANK", "PMIX_RANK"):
        if _variable(name).isdigit():
            return int(_variable(name))
    return None


def mpi_namespace() -> str:
    """The name of the job in Open MPI's runtime; "" outside of mpirun."""
    return _variable("PMIX_NAMESPACE")


def set_process_name(rank: int) -> None:
    """Set the process name, which `ps` and `top` show."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"{_NAME}{rank}".encode(), 0, 0, 0)


def rank_of(pid: int) -> int | None:
    """The rank of another process, by its process name; None if it is no rank, or has ended."""
    try:
        with open(f"/proc/{pid}/comm") as file:
            name = file.read().strip()
    except OSError:
        return None
    number = name.removeprefix(_NAME)
    return int(number) if number != name and number.isdecimal() else None


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; most real-time signals have a number only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def rank_on_host() -> int:
    """The number of this rank among the ranks of this host."""
    return int(_variable(RANK_ON_HOST, "OMPI_COMM_WORLD_LOCAL_RANK") or "0")


def set_local_rank() -> None:
    """Set LOCAL_RANK for the script, in a rank of a job.

    Device meshes that a script makes take their GPU from it, and so do NCCL groups from torch 2.15
    on, even if another device is the current one. A value from the environment of the launcher is
    replaced: it is the same in all ranks, and can be right in one of them at most.
    """
    if rank() is not None:
        os.environ[LOCAL_RANK] = str(rank_on_host())


def ranks_on_host() -> int:
    """The number of ranks of this job on this host, as the launcher says; 0 if it does not."""
    return int(_variable(RANKS_ON_HOST, "OMPI_COMM_WORLD_LOCAL_SIZE") or "0")


def on_one_host() -> bool:
    """Whether all ranks of the job are on this host, and no other host can ever join it."""
    if RANK in os.environ:
        return False
    return _variable("OMPI_COMM_WORLD_LOCAL_SIZE") == _variable("OMPI_COMM_WORLD_SIZE")


def foreign_launcher() -> str | None:
    """The variable of a launcher, neither ours nor an mpirun, that says that this process is one of
    several."""
    return next((name for name in FOREIGN if os.environ.get(name, "1") not in ("", "1")), None)
