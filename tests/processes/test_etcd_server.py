"""An etcd of one's own, and one that belongs to another owner: permissions, and what is left behind."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from etcd_fabrics import EtcdCluster, Fabrics, add_user, agree
from patience import wait_until

from recover.world.fabrics.etcd.client import EtcdClient, EtcdError
from recover.world.fabrics.etcd.fabric import EtcdFabric
from recover.world.fabrics.etcd.server import EtcdServer
from recover.world.liveness.board import Board

pytestmark = pytest.mark.filterwarnings("ignore:.*is etcd 3:UserWarning")


@pytest.mark.guarantee(
    "On etcd", "An etcd started by recover listens on one address, ends with its starter and leaves nothing."
)
def test_own_etcd_listens_on_one_address_and_ends_with_its_starter(
    tmp_path: Path,
) -> None:
    program = (
        "import time; from recover.world.fabrics.etcd.server import EtcdServer; s = EtcdServer().start(); "
        "print(s.endpoint, s.pid, s._directory, flush=True); time.sleep(600)"
    )
    starter = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program], stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    endpoint, pid, directory = starter.stdout.readline().split()
    try:
        host, port = endpoint.split(":")
        assert host == "127.0.0.1"
        socket.create_connection((host, int(port)), 5).close()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.2", int(port)), 5)
        assert directory.startswith("/dev/shm/")
    finally:
        starter.kill()
        starter.wait()
        starter.stdout.close()
    assert wait_until(lambda: not Path(f"/proc/{pid}").exists())
    shutil.rmtree(directory)  # the data of the etcd whose starter was killed
    with EtcdServer() as server:
        assert EtcdClient(server.endpoint).version() == ".".join(map(str, server.version))
        mine = server._directory
        assert mine is not None
        assert mine.exists()
    assert not mine.exists()


@pytest.mark.guarantee("On etcd", "An etcd that has lost its data is reported.")
def test_etcd_that_lost_its_data_is_reported(tmp_path: Path) -> None:
    server = EtcdServer(tmp_path / "etcd")
    try:
        made = Fabrics(server.start(), "/lost/", tmp_path)
        (rank,), _ = made.make(1)
        assert agree([rank], 1) == [1]
        server.kill()
        shutil.rmtree(tmp_path / "etcd")
        server.start()
        (error,) = agree([rank], 1)
        assert isinstance(error, EtcdError)
        assert "has lost its data" in str(error)
        made.close()
    finally:
        server.stop()


@pytest.mark.guarantee("On etcd", "One of three etcd members may be lost and restart on its data.")
def test_etcd_member_of_three_may_be_lost_and_restart_on_its_data(tmp_path: Path) -> None:
    with EtcdCluster(tmp_path) as cluster:
        etcd = EtcdClient(cluster.endpoints)
        etcd.put("before", b"1")
        for member in cluster.members:
            member.kill()
            etcd.put("meanwhile", member.endpoint.encode())
            member.start()
            alone = EtcdClient(member.endpoint)
            assert [found.value for found in alone.get_all()[0]] == [b"1", member.endpoint.encode()]
    with pytest.raises(ValueError, match="is none of the members"):
        EtcdServer(port=1, members=["h1:1", "h2:1"])


def test_etcd_user_needs_write_access_to_the_job_prefix_only(tmp_path: Path) -> None:
    with EtcdServer() as server:
        etcd = EtcdClient(server.endpoint)
        add_user(etcd, "trainer", "secret", "/recover/ours/")

        def client(prefix: str, password: str) -> EtcdClient:
            return EtcdClient(server.endpoint, prefix, "trainer", password)

        rank = EtcdFabric(client("/recover/ours/", "secret"), 0, 1, Board(tmp_path / "board", 1))
        try:
            assert agree([rank], 1) == [1]
        finally:
            rank.close()
        for prefix, password in (("/recover/theirs/", "secret"), ("/recover/ours/", "guessed")):
            with pytest.raises(EtcdError, match="may user 'trainer' read and write under"):
                client(prefix, password).put("key", b"value")
        with pytest.raises(EtcdError, match="give a user"):
            etcd.put("key", b"value")
