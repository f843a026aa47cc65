"""Members of etcd that agents start: the last one to come is started, too, and a lost one is not."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from etcd_fabrics import EtcdCluster
from patience import wait_until

from recover.job.spec import EtcdAccess
from recover.launch.hosts.own_etcd import OwnEtcd
from recover.launch.session import Session

pytestmark = pytest.mark.filterwarnings("ignore:.*is etcd 3:UserWarning")


@pytest.mark.guarantee(
    "Rejoining replicas", "A late member of an etcd of three is started, and one that lost its data is not."
)
def test_late_etcd_member_is_started_and_a_lost_one_is_not(tmp_path: Path) -> None:
    cluster = EtcdCluster(tmp_path / "cluster")
    access = EtcdAccess(tuple(cluster.endpoints), "/job/")
    first, second, late = cluster.members
    try:
        for member in (first, second):
            member.begin()
        for member in (first, second):
            member.wait_until_ready()
        with OwnEtcd(access, tmp_path / "late", alone=True) as own:
            own.find_or_start(30, lambda: False)
            assert own.server is not None
            assert own.server.endpoint == late.endpoint
            own.server.wait_until_ready()
        with OwnEtcd(access, tmp_path / "again", alone=True) as own:
            own.find_or_start(30, lambda: False)
            assert own.server is None, "its data are lost"
    finally:
        for member in (first, second):
            member.stop()


@pytest.mark.guarantee(
    "Rejoining replicas",
    "A host that rejoins during an etcd pause waits for it, and an etcd member that lost its data is not "
    "started again.",
)
def test_host_that_rejoins_during_an_etcd_pause_waits_for_it(tmp_path: Path) -> None:
    """With one of three members gone and another one stopped, no member answers, although two of them exist."""
    cluster = EtcdCluster(tmp_path / "cluster")
    access = EtcdAccess(tuple(cluster.endpoints), "/job/")
    lost, still, _ = cluster.members
    try:
        for member in cluster.members:
            member.begin()
        for member in cluster.members:
            member.wait_until_ready()
        lost.kill()
        os.kill(still.pid, signal.SIGSTOP)
        said: list[str] = []

        def look() -> bool:  # called between two looks; never says that the job was stopped
            if own.server is not None:
                said.append("started")
            elif said:
                os.kill(still.pid, signal.SIGCONT)
            return False

        with OwnEtcd(access, tmp_path / "again", alone=True) as own:
            client = own.find_or_start(60, look)
            assert said, "it answered all the time"
            assert own.server is None
            assert client.get("anything") is None
    finally:
        os.kill(still.pid, signal.SIGCONT)
        for member in cluster.members:
            member.stop()


def test_etcd_files_written_during_session_removal_are_removed() -> None:
    """Other hosts need this etcd for a moment after the ranks of this host have ended, and their session with them."""
    with Session() as session:
        data = session.directory / "etcd"
        session.end()
        assert wait_until(lambda: not session.directory.exists())
        data.mkdir(parents=True)
        (data / "wal").touch()
    assert not session.directory.exists()


@pytest.mark.guarantee(
    "Several hosts",
    "An etcd that SIGTERM has ended together with the processes of a cancelled job is started again with its data, so "
    "that the job can agree on its last step.",
)
def test_etcd_ended_by_sigterm_is_started_again_with_its_data(tmp_path: Path) -> None:
    """An etcd that was killed is not started again: the state of its data is unknown."""
    endpoint = EtcdCluster(tmp_path / "cluster").endpoints[0]
    with OwnEtcd(EtcdAccess((endpoint,), "/job/"), tmp_path / "data", alone=True) as own:
        client = own.find_or_start(30, lambda: False)
        assert own.server is not None
        client.put("kept", b"value")
        first = own.server.pid
        os.kill(first, signal.SIGTERM)
        assert wait_until(lambda: own.server is not None and own.server.pid != first)
        own.server.wait_until_ready()
        found = client.get("kept")
        assert found is not None
        assert found.value == b"value"
        second = own.server.pid
        os.kill(second, signal.SIGKILL)
        assert not wait_until(lambda: own.server is not None and own.server.pid != second, 2)


@pytest.mark.guarantee(
    "Leaving", "Hosts that are asked to leave at once never take the majority of etcd along."
)
def test_second_host_with_a_member_of_etcd_stays_while_the_first_one_leaves(tmp_path: Path) -> None:
    cluster = EtcdCluster(tmp_path / "cluster")
    access = EtcdAccess(tuple(cluster.endpoints), "/job/")
    try:
        for member in cluster.members:
            member.begin()
        for member in cluster.members:
            member.wait_until_ready()
        hosts = []
        for member in cluster.members[:2]:
            host = OwnEtcd(access, tmp_path / "host", alone=False)
            host.server, host._endpoint = member, member.endpoint
            hosts.append(host)
        assert hosts[0].needs_this_host() == ""
        assert "1 of 3 would be left, and 2 are needed" in hosts[1].needs_this_host()
        assert hosts[0].needs_this_host() == "", "the second one has taken its reservation back"
        for member in cluster.members[1:]:
            member.kill()
        assert "etcd does not answer" in hosts[0].needs_this_host()
    finally:
        for member in cluster.members:
            member.kill()
