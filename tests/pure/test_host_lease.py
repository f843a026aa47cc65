"""The lease of a host: what its seconds are, and how it is kept where answers come late."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from recover.etcd.etcd_client import Answer, EtcdError
from recover.etcd.etcd_host import EXPIRY, KEEP, KEEPERS, LEAST_GRACE, HostLease, parts_of
from recover.job.hosts_asked import LEASE

GENEROUS = 30.0


@given(st.floats(LEASE, 600.0))
@example(2.875)  # seven tenths of it are two whole seconds, and too little would be left for the grace
def test_etcds_lease_its_look_and_the_grace_make_up_what_users_call_a_lease(lease: float) -> None:
    """Those of etcd, the time until it looks, and the grace in which one that lives can come back."""
    ttl, grace = parts_of(lease)
    assert ttl >= 1
    assert grace >= LEAST_GRACE - 1e-9
    assert abs(ttl + EXPIRY + grace - lease) < 1e-9
    assert ttl > KEEP * 4
    assert grace > KEEP * 3


class SlowEtcd:
    """Takes every request, and answers when it is let to."""

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


def test_a_lease_is_asked_for_again_while_no_answer_comes() -> None:
    etcd = SlowEtcd()
    with kept(etcd):
        for _ in range(KEEPERS):
            assert etcd.came.acquire(timeout=GENEROUS), "all waited for one answer, and the lease ran out"


def test_etcd_is_asked_no_more_often_than_is_needed_whatever_the_number_of_keepers() -> None:
    etcd = SlowEtcd()
    etcd.answering.set()
    began = time.monotonic()
    with kept(etcd):
        for _ in range(11):
            assert etcd.came.acquire(timeout=GENEROUS)
        assert time.monotonic() - began >= 10 * KEEP


def test_a_lease_that_etcd_has_refused_can_be_left() -> None:
    """Its agent has no other way out, and says what etcd said."""
    etcd = SlowEtcd()
    etcd.grant = lambda ttl: (_ for _ in ()).throw(EtcdError("too large"))  # type: ignore[method-assign]
    lease = HostLease(etcd, "h", [0])  # type: ignore[arg-type]
    with pytest.raises(EtcdError, match="too large"):
        lease.start()
    lease.leave()
