"""What tests of several files stand on: an etcd, and hosts to try things on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from etcd_fabrics import Fabrics
from launching import wait_until
from left_out import leave_out

from recover.etcd.etcd_server import EtcdServer
from recover.lab.hosts import unavailable


def children() -> set[int]:
    """Of this process, those that run."""
    found = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            found |= {int(pid) for pid in path.read_text().split() if runs(pid)}
    return found


def runs(pid: str) -> bool:
    try:
        return "Z (zombie)" not in Path("/proc", pid, "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(autouse=True)
def a_test_that_fails_leaves_no_job_running() -> Iterator[None]:
    before = children()
    yield
    left = children() - before
    for how in (signal.SIGTERM, signal.SIGKILL):  # a launcher that is asked to takes its ranks along
        for pid in left & children():
            with suppress(ProcessLookupError):
                os.kill(pid, how)
        wait_until(lambda: not left & children(), 20)


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"/recover/{request.node.name}/"


@pytest.fixture
def fabrics(server: EtcdServer, prefix: str, tmp_path: Path) -> Iterator[Fabrics]:
    made = Fabrics(server, prefix, tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="session")
def a_lab_can_be_made_here() -> None:
    """Hosts need root, and Linux namespaces."""
    if reason := unavailable():
        leave_out("hosts", reason)
