"""The specification of a job: made once by its launcher, handed to every rank as one file, and read
once.

Under a launcher that is not ours there is no such file. Variables replace it, so that a script
under a site's own mpirun has the same options:

    RECOVER_RUN_DIR        where logs, markers and results go
    RECOVER_REPLICA_SIZE   ranks per replica
    RECOVER_CARRIER        what moves the data between replicas
    RECOVER_HANG_LIMIT     seconds after which a hung rank that others wait for is taken for dead
    RECOVER_LINK_TIMEOUT   seconds without progress after which a reduction that all take part in is aborted
    RECOVER_KILL           faults on schedule
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from recover.job import process
from recover.job.host_options import LEASE

VARIABLE = "RECOVER_JOB"  # the path of the file, in the environment of every process of a job
FILE = "job.json"
CARRIERS = ("auto", "mpi", "gloo", "nccl")
LEAST_HANG_LIMIT = (
    1.0  # seconds; on a busy machine a healthy process may well wait for a core for a good part of one
)
LINK_TIMEOUT = 60.0  # seconds
LEAST_LINK_TIMEOUT = 2.0  # seconds; what is known of ranks on other hosts is up to one second old

# Monitors of a run, as a context manager that gets the run directory.
Monitors = Callable[[Path], AbstractContextManager[object]]


@dataclass(frozen=True)
class EtcdAccess:
    """How the processes of a job reach its etcd."""

    endpoints: tuple[str, ...]
    prefix: str  # of all keys of the job
    token: str = ""  # of the job: values are sealed with it
    user: str | None = None
    password: str = ""
    ca: str | None = None  # files for TLS: the CA of etcd's certificate; certificate and key of this job
    certificate: str | None = None
    key: str | None = None
    patience: float = 30.0  # seconds without an answer after which a process gives up


@dataclass(frozen=True)
class JobSpec:
    ranks: int  # 0: from MPI
    replica_size: int = 1
    carrier: str = "auto"
    hang_limit: float | None = None
    faults: tuple[str, ...] = ()
    run_dir: str | None = None
    session: str | None = None  # the directory of the job on this host, in memory; removed with the job
    records: bool = False  # whether the steps of the script are recorded for it
    token: str = ""  # a secret of the processes of this job
    etcd: EtcdAccess | None = (
        None  # the fabric is etcd, started by an agent on each host; None: it is Open MPI
    )
    host: str | None = None  # the name under which this host's agent holds its lease
    address: str | None = None  # under which other hosts reach this one, and its interface
    interface: str | None = None
    lease: float = LEASE  # seconds without a renewal after which a host and its ranks are lost
    across: tuple[int, ...] = ()  # replicas that lie on several hosts
    directories: tuple[tuple[int, ...], ...] = ()  # the ranks that see the same run directory; (): all do
    joining: bool = False  # this process asks to join a running world
    room: int = 0  # number of ids for ranks that join after the start
    limit: int | None = None  # most ranks that work at once; further ones stand by for a loss
    admits: bool = False  # whether ranks may join after the start; if not, members do not look for any
    link_timeout: float = LINK_TIMEOUT  # seconds without progress in a reduction that all members wait in
    replay: str = ""  # what a replay asks of the script (`recover.job.script_replay`)
    leaves: bool = False  # SIGTERM asks this host to leave: its agent decides what its ranks do

    @property
    def is_alone(self) -> bool:
        """Whether this is a world of one rank, started by our launcher: it needs no MPI."""
        return self.ranks == 1 and self.session is not None and self.etcd is None

    @property
    def board_size(self) -> int:
        return self.ranks + self.room

    def write(self, name: str = FILE) -> Path:
        """Write it to the session, readable by this user only."""
        assert self.session is not None
        path = Path(self.session, name)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            json.dump(asdict(self), file)
        return path

    @classmethod
    def read(cls, path: Path) -> JobSpec:
        found = json.loads(path.read_text())
        unknown = sorted(set(found) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(
                f"{path} tells of {', '.join(unknown)}, which this version of recover does not know; "
                "launcher and ranks must run the same one"
            )
        etcd = found["etcd"] and EtcdAccess(
            **found["etcd"] | {"endpoints": tuple(found["etcd"]["endpoints"])}
        )
        tuples = {name: tuple(found[name]) for name in ("faults", "across")}
        directories = tuple(map(tuple, found["directories"]))
        return cls(**found | tuples | {"etcd": etcd, "directories": directories})

    def ranks_by_run_directory(self, members: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        """The members, grouped by the run directory that they see; one of each group writes there.

        The directories of ranks that joined later are not known: they count once no other member is
        left.
        """
        members = sorted(members)
        groups = [[rank for rank in group if rank in members] for group in self.directories]
        return tuple(tuple(group) for group in groups if group) or ((tuple(members),) if members else ())

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> JobSpec:
        """The job of a rank whose launcher is not ours. Raises ValueError, which names the variable
        and the remedy."""
        size = environment.get("RECOVER_REPLICA_SIZE", "1")
        if not size.isdigit() or int(size) < 1:
            raise ValueError(f"RECOVER_REPLICA_SIZE is {size!r}; give a whole number, 1 or more")
        return cls(
            ranks=int(environment.get("OMPI_COMM_WORLD_SIZE", "0")),
            replica_size=int(size),
            carrier=environment.get("RECOVER_CARRIER", "auto"),
            hang_limit=read_hang_limit(environment.get("RECOVER_HANG_LIMIT")),
            link_timeout=read_link_timeout(environment.get("RECOVER_LINK_TIMEOUT")),
            faults=tuple(environment.get("RECOVER_KILL", "").split()),
            run_dir=environment.get("RECOVER_RUN_DIR"),
            records="RECOVER_RUN_DIR" in environment,
        )


def current_job() -> JobSpec | None:
    """The job of this process; None if no launcher has started it."""
    if path := os.environ.get(VARIABLE):
        return _read(path)
    return JobSpec.from_environment(os.environ) if process.rank() is not None else None


@functools.cache
def _read(path: str) -> JobSpec:
    return JobSpec.read(Path(path))


def read_hang_limit(text: str | None) -> float | None:
    """The hang limit in seconds; None if none is given. Raises ValueError if it is not valid."""
    if not text:
        return None
    try:
        limit = float(text)
    except ValueError:
        limit = 0.0
    if not LEAST_HANG_LIMIT <= limit < float("inf"):
        raise ValueError(
            f"the hang limit is {text!r}; give seconds, {LEAST_HANG_LIMIT:g} or more (a busy machine makes healthy "
            "ranks wait that long), or leave it out"
        )
    return limit


def read_link_timeout(text: str | None) -> float:
    """The link timeout in seconds, or the default. Raises ValueError if it is not valid."""
    if not text:
        return LINK_TIMEOUT
    try:
        limit = float(text)
    except ValueError:
        limit = 0.0
    if not LEAST_LINK_TIMEOUT <= limit < float("inf"):
        raise ValueError(
            f"the link timeout is {text!r}; give seconds, {LEAST_LINK_TIMEOUT:g} or more (what is known of ranks on "
            f"other hosts is up to one second old), or leave it out: {LINK_TIMEOUT:g}"
        )
    return limit
