"""Options of jobs on several hosts, and of jobs that restart lost replicas."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

PATIENCE = 30.0  # seconds that etcd may be silent
JOIN_TIMEOUT = 600.0  # seconds for all hosts to come, as with torchrun
LEASE = 2.0  # seconds without a renewal after which a host is lost
PREFIX = "/recover"
RETURN_DELAY = 1.0  # seconds that a slot rests, so that resources of the dead process are free
ROOM = 1000  # replicas that may be started after the first ones; of small replicas more, up to ROWS ranks
ROWS = 10_000  # rows of the board for ranks of such replicas
FORGIVE = 600.0  # seconds of work on a slot after which earlier deaths there do not count
WARM_UP = 1800.0  # seconds for a rank to get ready to join: it may compile for long
GRACE = 25.0  # seconds from the notice until a host leaves at once: schedulers give 30 and more
LEAVE, STOP = "leave", "stop"
# Options that have no effect on one host.
_OF_HOSTS = (
    *("nproc_per_node", "rdzv_backend", "lease", "on_term", "grace"),
    *("token_file", "etcd_user", "etcd_password_file", "etcd_ca", "etcd_cert", "etcd_key"),
)
# Options of etcd: a job that restarts replicas on one host has one, too.
_OF_THE_FABRIC = ("rdzv_patience", "join_timeout", "interface", "host_name", "etcd_dir", "etcd_prefix")
_OF_RETURNS = ("return_delay", "forgive", "ready", "warm_up")


def room_for(replica_size: int) -> int:
    """The number of ids for ranks of restarted replicas. It is limited: readers of a board read all
    of its rows."""
    return max(ROOM, ROWS // replica_size) * replica_size


@dataclass(frozen=True)
class HostOptions:
    """Options of a job on several hosts, as given on the command line; None: not given."""

    nnodes: str | None = None
    nproc_per_node: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_backend: str | None = None
    rdzv_patience: float = PATIENCE
    join_timeout: float = JOIN_TIMEOUT
    lease: float = LEASE
    interface: str | None = None
    host_name: str | None = None
    etcd_dir: Path | None = None
    etcd_prefix: str = PREFIX
    etcd_user: str | None = None
    etcd_password_file: Path | None = None
    etcd_ca: Path | None = None
    etcd_cert: Path | None = None
    etcd_key: Path | None = None
    token_file: Path | None = None
    returns: bool = False  # lost replicas are started again; see `restarts`
    return_delay: float = RETURN_DELAY
    forgive: float = FORGIVE
    ready: bool = True  # with `returns`: keep prewarmed processes
    standby: int = 0
    warm_up: float = WARM_UP
    on_term: str = LEAVE  # what SIGTERM to the agent of one of several hosts asks for
    grace: float = GRACE

    @property
    def asked(self) -> bool:
        """Whether a job on several hosts is meant at all."""
        return any(value is not None for value in (self.nnodes, self.rdzv_endpoint, self.rdzv_id))

    @property
    def restarts(self) -> bool:
        """Whether lost replicas are restarted. Standbys need that, too."""
        return self.returns or self.standby > 0

    def check_use(self) -> None:
        """Raise ValueError for options that were given and would have no effect."""
        if self.standby < 0:
            raise ValueError(f"--standby is {self.standby}; give a number, 0 or more")
        given = {field.name for field in fields(self) if getattr(self, field.name) != field.default}
        for names, used, needed in (
            (_OF_HOSTS, self.asked, "--nnodes and --rdzv-endpoint"),
            (_OF_THE_FABRIC, self.asked or self.restarts, "--nnodes and --rdzv-endpoint, or --return"),
            (_OF_RETURNS, self.restarts, "--return"),
            (("etcd_key",), self.etcd_cert is not None, "--etcd-cert"),
            (("etcd_password_file",), self.etcd_user is not None, "--etcd-user"),
        ):
            if idle := [] if used else [name for name in names if name in given]:
                options = " and ".join(
                    "--no-ready" if name == "ready" else f"--{name.replace('_', '-')}" for name in idle
                )
                raise ValueError(
                    f"{options} would have no effect without {needed}: give that, or leave it out"
                )
