"""Fixtures of the tests that start processes: an etcd, and emulated hosts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from etcd_fabrics import Fabrics
from left_out import leave_out
from recover_lab.lab.hosts import unavailable

from recover.world.fabrics.etcd.server import EtcdServer

torch.set_num_threads(1)  # as in ranks; tests that compute a reference here do not depend on their order
AWAITED_SAVES = Path(__file__).parent / "awaited_saves"


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


@pytest.fixture
def every_checkpoint_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that the test starts write each checkpoint before they go on."""
    paths = [str(AWAITED_SAVES), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.fixture(scope="session")
def a_lab_can_be_made_here() -> None:
    """Skip the test where no lab can be made: hosts need root, and Linux namespaces."""
    if reason := unavailable():
        leave_out("hosts", reason)
