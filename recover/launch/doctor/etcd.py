"""`recover doctor --etcd`: the etcd that jobs on several hosts would use, and what is wrong with it."""

from __future__ import annotations

import re
import secrets
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from recover.job.host_options import HostOptions
from recover.job.spec import EtcdAccess
from recover.launch.doctor.checks import Finding, dotted, own_member, show
from recover.launch.hosts.options import access_to, read_options
from recover.launch.hosts.own_etcd import is_protected, missing_here
from recover.launch.preflight import Refusal
from recover.world.fabrics.etcd.access import client_of, tls_of
from recover.world.fabrics.etcd.client import EtcdClient, EtcdError
from recover.world.fabrics.etcd.server import SAFE

WRITES = 50  # for the latency
SLOW = 50.0  # milliseconds of a write: a vote takes several
DEFAULT_QUOTA = 2 << 30  # bytes, of etcd
FULL = 0.8  # of the quota
HISTORY = 1_000_000  # revisions that an etcd with compaction does not keep; 83 bytes each
LARGE = 100 << 20  # bytes of a database from which on fragmentation is worth a warning
_TIMEOUT = 5.0
_KEY = "doctor"


@dataclass(frozen=True)
class Member:
    """Status of one endpoint; `error`: why it could not be read."""

    endpoint: str
    version: str = ""
    cluster: str = ""
    size: int = 0  # of the database, in bytes
    used: int = 0
    quota: int | None = None  # None: not known
    error: str = ""


@dataclass(frozen=True)
class Cluster:
    members: Sequence[Member]
    count: int = 0  # members that the cluster has
    alarms: Sequence[str] = ()
    latency: Sequence[float] = ()  # milliseconds of each write
    revision: int = 0
    keeps_history: bool | None = None  # None: there is too little to tell
    error: str = ""  # why nothing can be written
    missing: str = ""  # the endpoint at which an agent of this host would start a member


def examine_etcd(options: HostOptions) -> int:
    """Print the table; 0 if jobs can use this etcd, 1 if not, 2 if the options are wrong."""
    try:
        part = read_options(replace(options, nnodes=options.nnodes or "2", rdzv_id=options.rdzv_id or _KEY))
        access = access_to(options, part)
        # Agents start no member with users or TLS: it is missing, and not theirs.
        missing = None if is_protected(access) else missing_here(access, alone=part.most == 1)
    except Refusal as refusal:
        print(f"recover: {refusal}")
        return 2
    return show(findings(look(access, missing)), "jobs can use this etcd")


def look(access: EtcdAccess, missing: str | None) -> Cluster:
    """Ask every endpoint, and write to the cluster. Leaves nothing behind."""
    members = [_member(access, endpoint) for endpoint in access.endpoints if endpoint != missing]
    answering = [member.endpoint for member in members if not member.error]
    if not answering:
        return Cluster(members, missing=missing or "")
    client = client_of(replace(access, endpoints=tuple(answering), patience=_TIMEOUT))
    key, latency = f"{_KEY}-{secrets.token_hex(4)}", []
    try:
        count = len(client.ask("/v3/cluster/member/list", {}).get("members", []))
        alarms = [str(one.get("alarm")) for one in client.ask("/v3/maintenance/alarm", {}).get("alarms", [])]
        for number in range(WRITES):
            started = time.perf_counter()
            client.put(key, str(number).encode())
            latency.append(1e3 * (time.perf_counter() - started))
        client.delete_all(key)
        _, revision = client.get_all(key)
        return Cluster(
            members, count, alarms, latency, revision, _keeps(client, revision), missing=missing or ""
        )
    except EtcdError as error:
        return Cluster(members, error=str(error), missing=missing or "")


def findings(cluster: Cluster) -> Iterator[Finding]:
    if cluster.missing:
        yield own_member(cluster.missing)
    for member in cluster.members:
        yield from _of_member(member)
    answering = [member for member in cluster.members if not member.error]
    if not answering:
        return
    if len({member.cluster for member in answering}) > 1:
        names = ", ".join(member.endpoint for member in answering)
        yield Finding(
            "etcd cluster", "FAIL", f"{names} are not of one cluster", "name members of one cluster"
        )
    if cluster.error:
        remedy = "does a majority of its members run, and may this user write below --etcd-prefix?"
        yield Finding("etcd writes", "FAIL", cluster.error, remedy)
        return
    yield _members(cluster.count)
    for alarm in cluster.alarms:
        remedy = (
            "compact and defragment it, then `etcdctl alarm disarm`; see docs/guides/etcd.md"
            if alarm == "NOSPACE"
            else "replace the damaged member: remove it, and add it with an empty directory"
        )
        yield Finding("etcd alarm", "FAIL", alarm, remedy)
    yield _latency(cluster.latency)
    yield _compaction(cluster)


def _of_member(member: Member) -> Iterator[Finding]:
    what = f"etcd at {member.endpoint}"
    if member.error:
        remedy = "is it running, is the port open, and, if it wants TLS or a user, were --etcd-ca, --etcd-user given?"
        yield Finding(what, "FAIL", member.error, remedy)
        return
    quota = member.quota or DEFAULT_QUOTA
    known = "" if member.quota else ", etcd's default: it does not tell its own"
    seen = f"{member.version}, {member.size / 2**20:.1f} MiB of {quota / 2**20:,.0f} MiB (quota{known})"
    version = tuple(int(number) for number in re.findall(r"\d+", member.version)[:3])
    if version < SAFE:
        remedy = f"a crash may lose what was committed: upgrade to {dotted(SAFE)} or later"
        yield Finding(what, "warn", seen, remedy)
    else:
        yield Finding(what, "ok", seen)
    if member.size > FULL * quota:
        remedy = "compact and defragment it, or raise --quota-backend-bytes: a full etcd refuses writes, and jobs end"
        yield Finding(
            f"space of {member.endpoint}", "FAIL", f"{member.size / quota:.0%} of its quota", remedy
        )
    elif member.size > LARGE and member.used < member.size / 2:
        seen = f"{member.used / 2**20:,.0f} of {member.size / 2**20:,.0f} MiB are in use"
        remedy = f"etcdctl defrag --endpoints {member.endpoint}"
        yield Finding(f"space of {member.endpoint}", "warn", seen, remedy)


def _members(count: int) -> Finding:
    if count == 1:
        return Finding("etcd members", "warn", "1: jobs end with it", "use three, on three hosts")
    if count % 2 == 0:
        remedy = "use an odd number: this one survives no more losses than one member less"
        return Finding("etcd members", "warn", f"{count}", remedy)
    return Finding("etcd members", "ok", f"{count}: {count // 2} may be lost")


def _latency(times: Sequence[float]) -> Finding:
    middle, slowest = statistics.median(times), max(times)
    seen = f"{middle:.1f} ms median, {slowest:.0f} ms at most, of {len(times)} writes"
    if middle > SLOW:
        remedy = "give etcd a disk of its own (its log is flushed at every write), and hosts near those of the jobs"
        return Finding("etcd latency", "warn", seen, remedy)
    return Finding("etcd latency", "ok", seen)


def _compaction(cluster: Cluster) -> Finding:
    if cluster.keeps_history:
        seen = f"none: more than {HISTORY:,} old revisions are kept"
        remedy = "start etcd with --auto-compaction-mode=revision --auto-compaction-retention=1000"
        return Finding("etcd compaction", "warn", seen, remedy)
    seen = (
        f"revision {cluster.revision:,}: too early to tell; it needs --auto-compaction-retention"
        if cluster.keeps_history is None
        else f"on: revision {cluster.revision:,}, older ones are removed"
    )
    return Finding("etcd compaction", "ok", seen)


def _member(access: EtcdAccess, endpoint: str) -> Member:
    client = client_of(replace(access, endpoints=(endpoint,), patience=_TIMEOUT))
    try:
        status = client.ask("/v3/maintenance/status", {})
    except EtcdError as error:
        return Member(endpoint, error=str(error))
    size, used = int(status.get("dbSize", 0)), int(status.get("dbSizeInUse", 0))
    quota = int(status.get("dbSizeQuota", 0)) or _quota(access, endpoint)  # etcd 3.6 has it in its status
    cluster = str(status.get("header", {}).get("cluster_id", ""))
    return Member(endpoint, str(status.get("version", "")), cluster, size, used, quota)


def _quota(access: EtcdAccess, endpoint: str) -> int | None:
    """The quota, from etcd's metrics, which may be closed to us."""
    url = f"{'https' if access.ca else 'http'}://{endpoint}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT, context=tls_of(access)) as answer:
            text = answer.read().decode(errors="replace")
    except (OSError, ValueError, urllib.error.URLError):
        return None
    found = re.search(r"^etcd_server_quota_backend_bytes (\S+)$", text, re.MULTILINE)
    return int(float(found[1])) if found else None


def _keeps(client: EtcdClient, revision: int) -> bool | None:
    """Whether an old revision can still be read."""
    if revision <= HISTORY:
        return None
    try:
        client.ask("/v3/kv/range", {"key": "AA==", "revision": revision - HISTORY, "limit": 1})
    except EtcdError as error:
        if "compacted" in str(error):
            return False
        raise
    return True
