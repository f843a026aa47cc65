"""The lease of a host: the parts of its duration, and how it is kept where answers come late."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from recover.job.host_options import LEASE
from recover.world.fabrics.etcd.client import Answer, EtcdError, KeyValue, Operation
from recover.world.fabrics.etcd.host_lease import (
    EXPIRY,
    KEEP,
    KEEPERS,
    LEAST_GRACE,
    HostLease,
    HostLeases,
    parts_of,
)

GENEROUS = 30.0


@pytest.mark.guarantee(
    "On etcd",
    "The `--lease` option is the whole time until a lost host is dead, and renewals are repeated without "
    "answers but not more often than needed.",
)
@given(st.floats(LEASE, 600.0))
@example(2.875)  # seven tenths of it are two whole seconds, and too little would be left for the grace
def test_lease_option_includes_etcd_lease_check_interval_and_grace(lease: float) -> None:
    """A lease consists of etcd's time to live, the time until etcd checks it, and the grace in which a living host can
    register again."""
    ttl, grace = parts_of(lease)
    assert ttl >= 1
    assert grace >= LEAST_GRACE - 1e-9
    assert abs(ttl + EXPIRY + grace - lease) < 1e-9
    assert ttl > KEEP * 4
    assert grace > KEEP * 3


class SlowEtcd:
    """An etcd that takes every request, and answers when the test lets it."""

    def __init__(self) -> None:
        self.came = threading.Semaphore(0)
        self.answering = threading.Event()

    def grant(self, ttl: float) -> tuple[int, int]:
        return 7, int(ttl)

    def get(self, key: str) -> None:
        pass

    def txn(self, *_: Any) -> Answer:
        return Answer(True, 1, ())

    def go_on(self) -> None:
        pass

    def revoke(self, lease: int) -> None:
        pass

    def keep_alive(self, lease: int) -> bool:
        self.came.release()
        self.answering.wait(GENEROUS)
        return True


@contextmanager
def kept(etcd: SlowEtcd) -> Iterator[None]:
    lease = HostLease(etcd, "h", [0])  # type: ignore[arg-type]
    lease.start()
    try:
        yield
    finally:
        etcd.answering.set()
        lease.leave()


@pytest.mark.guarantee(
    "On etcd",
    "The `--lease` option is the whole time until a lost host is dead, and renewals are repeated without "
    "answers but not more often than needed.",
)
def test_lease_renewal_is_repeated_while_no_answer_arrives() -> None:
    etcd = SlowEtcd()
    with kept(etcd):
        for _ in range(KEEPERS):
            assert etcd.came.acquire(timeout=GENEROUS), "all waited for one answer, and the lease ran out"


@pytest.mark.guarantee(
    "On etcd",
    "The `--lease` option is the whole time until a lost host is dead, and renewals are repeated without "
    "answers but not more often than needed.",
)
def test_lease_renewal_rate_does_not_depend_on_the_number_of_keepers() -> None:
    etcd = SlowEtcd()
    etcd.answering.set()
    began = time.monotonic()
    with kept(etcd):
        for _ in range(11):
            assert etcd.came.acquire(timeout=GENEROUS)
        assert time.monotonic() - began >= 10 * KEEP


def test_lease_refused_by_etcd_ends_with_its_error() -> None:
    """The agent cannot continue without a lease, and ends with the message of etcd."""
    etcd = SlowEtcd()
    etcd.grant = lambda ttl: (_ for _ in ()).throw(EtcdError("too large"))  # type: ignore[method-assign]
    lease = HostLease(etcd, "h", [0])  # type: ignore[arg-type]
    with pytest.raises(EtcdError, match="too large"):
        lease.start()
    lease.leave()


class Watcher(HostLeases):
    """A rank whose process is suspended for as long as the test says before each look at the hosts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, grace: float) -> None:
        super().__init__(None, grace)  # type: ignore[arg-type]
        self.clock, self.declared = 0.0, dict[str, float]()
        self._pauses: list[float] = []
        fake_time = SimpleNamespace(monotonic=lambda: self.clock)
        monkeypatch.setattr("recover.world.fabrics.etcd.host_lease.time", fake_time)
        self._stopped = SimpleNamespace(wait=self._wait)  # type: ignore[assignment]

    def look(self, *pauses: float) -> None:
        """Check the hosts once after each of these pauses."""
        self._pauses = [*pauses]
        self._run()

    def _wait(self, _: float) -> bool:
        if not self._pauses:
            return True
        self.clock += self._pauses.pop(0)
        return False

    def _declare(self, host: str, ranks: Any, agent: str) -> None:
        self.declared.setdefault(host, self.clock)


def host_without_lease(name: str) -> list[KeyValue]:
    """Events of a watch: the host's ranks, as the holder of its lease wrote them, and no event of a lease."""
    written: list[Operation] = []

    class Etcd(SlowEtcd):
        def txn(self, guards: Any, operations: Any, *_: Any) -> Answer:
            written.extend(operations)
            return super().txn()

    etcd = Etcd()
    etcd.answering.set()
    lease = HostLease(etcd, name, [0, 1])  # type: ignore[arg-type]
    lease.start()
    lease.leave()
    puts = {one["request_put"]["key"]: one["request_put"]["value"] for one in written if "request_put" in one}
    return [KeyValue(f"seen/placed/{name}", puts[f"seen/placed/{name}"], 1, 5)]


@pytest.mark.guarantee(
    "On etcd",
    "A host is declared dead only after the grace, and a suspended process gives every host a full grace.",
)
def test_host_is_declared_dead_only_after_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    news = host_without_lease("a")
    watcher = Watcher(monkeypatch, grace=5.0)
    watcher.apply(news)
    watcher.look(*[1.0] * 5)
    assert not watcher.declared
    watcher.look(1.0)
    assert watcher.declared == {"a": 6.0}


@pytest.mark.guarantee(
    "On etcd",
    "A host is declared dead only after the grace, and a suspended process gives every host a full grace.",
)
def test_lease_that_returns_within_the_grace_starts_a_new_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    news = host_without_lease("a")
    watcher = Watcher(monkeypatch, grace=5.0)
    for version in (0, 1, 0):  # gone, returned, gone again
        watcher.apply([*news, KeyValue("seen/host/a", b"7", version, 6)])
        if not version:
            watcher.look(*[1.0] * 4)
    assert not watcher.declared, "the seconds of two absences were added up"


@pytest.mark.guarantee(
    "On etcd",
    "A host is declared dead only after the grace, and a suspended process gives every host a full grace.",
)
@pytest.mark.parametrize("asleep", [5.5, 60.0, 3600.0])
def test_suspended_process_gives_hosts_a_full_grace(monkeypatch: pytest.MonkeyPatch, asleep: float) -> None:
    """The process's watch was suspended with it, so the process cannot know yet which hosts have renewed their leases
    meanwhile."""
    news = host_without_lease("a")
    watcher = Watcher(monkeypatch, grace=5.0)
    watcher.apply(news)
    watcher.look(1.0, asleep, *[1.0] * 5)
    assert not watcher.declared, "a host was declared dead by a process that had been suspended"
    watcher.look(1.0)
    assert watcher.declared == {"a": 1.0 + asleep + 6.0}, "a host that stays away is declared dead in the end"
