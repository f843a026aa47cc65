"""Options of a job on several hosts, named as torchrun's; under Slurm its environment gives the
missing ones."""

from __future__ import annotations

import os
import re
import secrets
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from recover.job.gpus import gpus_on_host
from recover.job.host_options import LEAVE, STOP, WARM_UP, HostOptions
from recover.job.spec import EtcdAccess
from recover.launch.preflight import Refusal
from recover.world.fabrics.etcd.access import tls_of
from recover.world.fabrics.etcd.client import UNIX
from recover.world.fabrics.etcd.host_lease import MOST_RANKS

PORT = 2379  # etcd's own
LEAST_LEASE = 2.0
MOST = 1e7  # seconds: etcd grants leases of no more than 9e9
ALONE_LEASE = (
    60.0  # on one host all is lost with the agent: the lease only must not run out on a busy machine
)


@dataclass(frozen=True)
class HostPart:
    """The contribution of this host to a job, and its requirements."""

    least: int  # hosts to begin with
    most: int
    slots: int  # ranks that this host takes
    endpoints: tuple[str, ...]
    job: str
    host: str
    order: int | None  # of this host among the others, if it is given
    token: str  # "": the plan brings one
    returns: bool = False
    standby: int = 0  # replicas that wait, ready, for a loss
    warm_up: float = WARM_UP

    @property
    def admits(self) -> bool:
        """Whether ranks may join after the start."""
        return self.returns or self.most > self.least

    @property
    def nnodes(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}:{self.most}"


def read_options(options: HostOptions, environment: Mapping[str, str] = os.environ) -> HostPart:
    """Read and check the options. Raises Refusal, which names the option, its value and the remedy."""
    slurm = environment if "SLURM_JOB_ID" in environment else {}
    if options.rdzv_backend not in (None, "etcd", "etcd-v2", "c10d"):
        raise Refusal(f"--rdzv-backend is {options.rdzv_backend!r}: hosts meet in etcd here; leave it out")
    nnodes = options.nnodes or slurm.get("SLURM_NNODES") or slurm.get("SLURM_JOB_NUM_NODES")
    if nnodes is None:
        raise Refusal(
            "--nnodes is missing; give the number of hosts, as --nnodes 4, or 3:4 to begin with three of four"
        )
    least, most = _read_nnodes(nnodes)
    endpoint = options.rdzv_endpoint or _slurm_endpoints(slurm)
    if not endpoint:
        raise Refusal("--rdzv-endpoint is missing; give HOST:PORT of etcd, one or three of them, with commas")
    endpoints = tuple(map(_read_endpoint, endpoint.split(",")))
    if UNIX in endpoints and (most > 1 or len(endpoints) > 1):
        raise Refusal(
            f"--rdzv-endpoint is {endpoint!r}, a socket of this host, which no other host reaches; give HOST:PORT"
        )
    job = options.rdzv_id or slurm.get("SLURM_JOB_ID")
    if not job:
        raise Refusal(
            "--rdzv-id is missing; give a name for the job, the same on every host, that no other job has"
        )
    if not re.fullmatch(r"[\w.:-]{1,200}", job):
        raise Refusal(f"--rdzv-id is {job!r}; give letters, digits, and . : _ - only")
    for name, value, low in (
        ("--rdzv-patience", options.rdzv_patience, 1.0),
        ("--join-timeout", options.join_timeout, 1.0),
        ("--lease", options.lease, LEAST_LEASE),
        ("--return-delay", options.return_delay, 0.0),
        ("--forgive", options.forgive, 0.0),
        ("--standby", options.standby, 0.0),
        ("--warm-up", options.warm_up, 1.0),
        ("--grace", options.grace, 0.0),
    ):
        if not low <= value <= MOST:
            what = "a number" if name == "--standby" else "seconds"
            raise Refusal(f"{name} is {value:g}; give {what}, {low:g} to {MOST:,.0f}")
    if options.on_term not in (LEAVE, STOP):
        raise Refusal(f"--on-term is {options.on_term!r}; give {LEAVE} or {STOP}")
    host = options.host_name or socket.gethostname()
    if not re.fullmatch(r"[\w.:-]{1,200}", host):
        raise Refusal(f"--host-name is {host!r}; give letters, digits, and . : _ - only")
    order = slurm.get("SLURM_NODEID") or environment.get("GROUP_RANK")
    return HostPart(
        least,
        most,
        _read_slots(options.nproc_per_node, slurm),
        endpoints,
        job,
        host,
        int(order) if order and order.isdecimal() else None,
        # With one host no other process needs it. With several it would have to be stored in etcd,
        # readable by all.
        _read_secret("--token-file", options.token_file) or (secrets.token_hex(32) if most == 1 else ""),
        options.restarts,
        options.standby,
        options.warm_up,
    )


def one_host(ranks: int, replica_size: int, options: HostOptions) -> HostOptions:
    """Options for a job on this host alone, with an etcd of its own; `options`: those of
    restarts."""
    return replace(
        options,
        nnodes="1",
        nproc_per_node=str(ranks + options.standby * replica_size),
        rdzv_endpoint=UNIX,
        rdzv_id=f"alone-{secrets.token_hex(4)}",
        lease=ALONE_LEASE,
    )


def access_to(options: HostOptions, part: HostPart) -> EtcdAccess:
    """Endpoints and credentials of etcd. Raises Refusal."""
    if options.etcd_cert is not None and options.etcd_ca is None:
        raise Refusal("--etcd-cert needs --etcd-ca: the file that says who signed etcd's own certificate")
    files = (
        ("--etcd-ca", options.etcd_ca),
        ("--etcd-cert", options.etcd_cert),
        ("--etcd-key", options.etcd_key),
    )
    for name, path in files:
        if path is not None and not os.access(path, os.R_OK):
            raise Refusal(f"{name} {path} cannot be read on this host; check the path and its permissions")
    ca, certificate, key = (
        str(path.absolute()) if path else None
        for path in (options.etcd_ca, options.etcd_cert, options.etcd_key)
    )
    access = EtcdAccess(
        part.endpoints,
        f"{options.etcd_prefix.rstrip('/')}/{part.job}/",
        part.token,
        options.etcd_user,
        _read_secret("--etcd-password-file", options.etcd_password_file),
        ca,
        certificate,
        key,
        patience=options.rdzv_patience,
    )
    try:
        tls_of(access)
    except ssl.SSLError as error:
        given = " and ".join(f"{name} {path}" for name, path in files if path is not None)
        raise Refusal(
            f"{given} cannot be used for TLS ({error.reason or error}); give certificates in PEM, and the key of "
            "--etcd-cert"
        ) from None
    return access


def _read_nnodes(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise Refusal(
            f"--nnodes is {text!r}; give a number of hosts, as 4, or 3:4 to begin with three of four"
        )
    return least, most


def _read_slots(text: str | None, slurm: Mapping[str, str]) -> int:
    text = text or slurm.get("SLURM_GPUS_ON_NODE") or "1"
    if text in ("gpu", "auto"):
        slots = gpus_on_host() or (1 if text == "auto" else 0)
        if not slots:
            raise Refusal("--nproc-per-node is gpu, and no GPU is visible here; give a number")
    elif text.isdecimal():
        slots = int(text)
    else:
        slots = 0
    if not 1 <= slots <= MOST_RANKS:
        raise Refusal(
            f"--nproc-per-node is {text!r}; give a number of ranks from 1 to {MOST_RANKS}, gpu or auto"
        )
    return slots


def _read_endpoint(text: str) -> str:
    """Check and complete an endpoint. `unix:` stands for a socket in the session of the job."""
    if text.strip() == UNIX:
        return UNIX
    text = text.strip().removeprefix("http://").removeprefix("https://")
    found = re.fullmatch(r"(\[[0-9a-fA-F:.%\w]+\]|[\w.-]+)(?::(\d+))?", text)
    if not found or not 0 < int(found[2] or PORT) < 1 << 16:
        raise Refusal(f"--rdzv-endpoint is {text!r}; give HOST:PORT, several with commas in between")
    return f"{found[1]}:{found[2] or PORT}"


def _read_secret(option: str, path: Path | None) -> str:
    if path is None:
        return ""
    try:
        secret = path.read_text().strip()
    except OSError as error:
        raise Refusal(f"{option} {path} cannot be read on this host ({error}); check the path") from None
    if not secret:
        raise Refusal(f"{option} {path} is empty; write the secret into it")
    return secret


def _slurm_endpoints(slurm: Mapping[str, str]) -> str | None:
    """Endpoints on the first host of the allocation, or on the first three if it has three or more."""
    hosts = slurm_hosts(slurm.get("SLURM_JOB_NODELIST") or slurm.get("SLURM_NODELIST") or "")
    return ",".join(f"{host}:{PORT}" for host in hosts[: 3 if len(hosts) > 2 else 1]) or None


def slurm_hosts(text: str) -> list[str]:
    """Expand `n[01-03,7],m1` to a list, as `scontrol show hostnames` prints it."""
    hosts: list[str] = []
    for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        names = [""]
        for plain, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", word):
            parts = [plain] if plain else [number for span in ranges.split(",") for number in _numbers(span)]
            names = [name + part for name in names for part in parts]
        hosts += names
    return hosts


def _numbers(span: str) -> list[str]:
    first, _, last = span.partition("-")
    return [f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)]
