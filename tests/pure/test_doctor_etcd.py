"""`recover doctor --etcd`: its messages for each finding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from recover.launch.doctor import checks
from recover.launch.doctor.etcd import DEFAULT_QUOTA, HISTORY, SLOW, Cluster, Member, findings
from recover.launch.hosts import own_etcd
from recover.world.fabrics.etcd.server import SAFE, NoEtcdError

GOOD = Member("h1:2379", "3.5.21", "17", size=20 << 20, used=15 << 20, quota=8 << 30)
SOUND = Cluster(
    [replace(GOOD, endpoint=f"h{number}:2379") for number in (1, 2, 3)], 3, (), (1.0, 2.0), 5 * HISTORY, False
)


def said(cluster: Cluster) -> dict[str, tuple[str, str]]:
    """By check: the status, and all of its messages."""
    return {one.what: (one.status, f"{one.seen}; {one.remedy}") for one in findings(cluster)}


def test_sound_etcd_has_no_warning_and_all_facts() -> None:
    found = said(SOUND)
    assert {status for status, _ in found.values()} == {"ok"}
    assert found["etcd at h2:2379"][1].startswith("3.5.21, 20.0 MiB of 8,192 MiB (quota)")
    assert found["etcd members"][1].startswith("3: 1 may be lost")
    assert found["etcd latency"][1].startswith("1.5 ms median, 2 ms at most, of 2 writes")
    assert "older ones are removed" in found["etcd compaction"][1]


@pytest.mark.parametrize(
    ("cluster", "check", "status", "words"),
    [
        (
            replace(SOUND, members=[replace(GOOD, version="3.5.1")]),
            "etcd at h1:2379",
            "warn",
            "upgrade to 3.5.16",
        ),
        (
            replace(SOUND, members=[replace(GOOD, version="3.4.23")]),
            "etcd at h1:2379",
            "warn",
            "upgrade to 3.5.16",
        ),
        (
            replace(SOUND, members=[replace(GOOD, error="refused")]),
            "etcd at h1:2379",
            "FAIL",
            "is it running",
        ),
        (replace(SOUND, members=[GOOD, replace(GOOD, cluster="18")]), "etcd cluster", "FAIL", "one cluster"),
        (
            replace(SOUND, members=[replace(GOOD, size=7 << 30)]),
            "space of h1:2379",
            "FAIL",
            "88% of its quota",
        ),
        (replace(SOUND, members=[replace(GOOD, size=1 << 30)]), "space of h1:2379", "warn", "etcdctl defrag"),
        (replace(SOUND, count=1), "etcd members", "warn", "jobs end with it"),
        (replace(SOUND, count=4), "etcd members", "warn", "odd number"),
        (replace(SOUND, alarms=["NOSPACE"]), "etcd alarm", "FAIL", "alarm disarm"),
        (replace(SOUND, alarms=["CORRUPT"]), "etcd alarm", "FAIL", "replace the damaged member"),
        (replace(SOUND, latency=(1.0, SLOW + 1, SLOW + 2)), "etcd latency", "warn", "disk of its own"),
        (replace(SOUND, keeps_history=True), "etcd compaction", "warn", "--auto-compaction-retention=1000"),
        (replace(SOUND, error="no leader"), "etcd writes", "FAIL", "no leader; does a majority"),
    ],
)
def test_each_fault_of_etcd_is_named_with_its_remedy(
    cluster: Cluster, check: str, status: str, words: str
) -> None:
    found = said(cluster)
    assert found[check][0] == status
    assert words in found[check][1]


def test_unknown_quota_is_taken_for_the_default_and_said() -> None:
    found = said(replace(SOUND, members=[replace(GOOD, quota=None, size=DEFAULT_QUOTA - 1)]))
    assert "it does not tell its own" in found["etcd at h1:2379"][1]
    assert found["space of h1:2379"][0] == "FAIL"


def test_etcd_that_agents_would_start_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_binary", lambda: Path("/opt/etcd"))
    for version, status in (((3, 5, 1), "warn"), (SAFE, "ok")):
        monkeypatch.setattr(checks, "version_of", lambda _, version=version: version)
        finding = checks.own_member()
        assert (finding.status, finding.seen.split()[0]) == (status, ".".join(map(str, version)))
        assert said(Cluster([], missing="h1:2379"))["etcd at h1:2379"][0] == status

    def none() -> Path:
        raise NoEtcdError("there is no etcd here; install one")

    monkeypatch.setattr(checks, "find_binary", none)
    assert checks.own_member().status == "warn"
    assert checks.own_member("h1:2379").status == "FAIL"


def test_warning_of_the_wheel_is_left_out_for_one_host_in_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Such an etcd ends with its job, so a crash of it loses nothing more. With data on disk, or on several hosts, the
    warning is printed."""
    texts: list[str] = []

    class Server:
        def __init__(self, *_: object, **__: object) -> None:
            import warnings

            warnings.warn("a crash may lose what was committed", stacklevel=1)

        def begin(self) -> None:
            pass

    monkeypatch.setattr(own_etcd, "EtcdServer", Server)
    monkeypatch.setattr(own_etcd, "say", texts.append)
    memory = Path("/dev/shm/recover-session")
    for alone, directory, is_said in ((True, memory, False), (True, tmp_path, True), (False, memory, True)):
        texts.clear()
        access = own_etcd.EtcdAccess(("127.0.0.1:2379",), "/recover/job/")
        own_etcd.OwnEtcd(access, directory, alone)._start("127.0.0.1:2379", None)
        assert any("crash may lose" in text for text in texts) == is_said
        assert any("started etcd" in text for text in texts)
