"""A site's own etcd: its users change, and its database fills up, while a job runs on it."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from etcd_fabrics import add_user, agree
from patience import wait_until
from training import small_world

from recover.runs.records.json_lines import read
from recover.world.fabrics.etcd.client import EtcdClient, EtcdError, LoginError, UnansweredError
from recover.world.fabrics.etcd.fabric import EtcdFabric
from recover.world.fabrics.etcd.host_lease import HostLease
from recover.world.fabrics.etcd.server import find_binary, free_port
from recover.world.liveness.board import Board

HERE = "127.0.0.1"
QUOTA = 16 << 20


@contextmanager
def site_etcd(place: Path, *flags: str) -> Iterator[str]:
    """The endpoint of a running etcd with these flags that the job does not own."""
    endpoint, peer = (f"{HERE}:{free_port(HERE)}" for _ in range(2))
    urls = {"listen-client-urls": endpoint, "advertise-client-urls": endpoint, "listen-peer-urls": peer}
    urls |= {"initial-advertise-peer-urls": peer, "initial-cluster": f"default=http://{peer}"}
    options = [
        f"--{name}={'' if name == 'initial-cluster' else 'http://'}{value}" for name, value in urls.items()
    ]
    command = [find_binary(), f"--data-dir={place / 'etcd'}", "--log-level=error", *options, *flags]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert EtcdClient(endpoint, timeout=5).get("up?") is None
        yield endpoint
    finally:
        server.kill()
        server.wait()


def jwt(place: Path, ttl: str) -> str:
    """The flag for tokens that hold the revision of the users: any change of them makes all tokens invalid."""
    for words in (
        ("genrsa", "-out", "key.pem", "2048"),
        ("rsa", "-in", "key.pem", "-pubout", "-out", "pub.pem"),
    ):
        subprocess.run(["openssl", *words], cwd=place, check=True, capture_output=True)
    keys = f"pub-key={place / 'pub.pem'},priv-key={place / 'key.pem'}"
    return f"--auth-token=jwt,{keys},sign-method=RS256,ttl={ttl}"


def fill(admin: EtcdClient) -> None:
    """Write until etcd raises the alarm NOSPACE."""
    value = base64.b64encode(b"x" * 1_000_000).decode()
    for number in range(4 * QUOTA // 1_000_000):
        key = base64.b64encode(b"/somebody-else/%d" % number).decode()
        try:
            admin.call("/v3/kv/put", {"key": key, "value": value})
        except LoginError:
            continue
        except UnansweredError as error:
            if "NOSPACE" in error.remedy:
                return
    raise AssertionError("etcd takes more than its quota")


@pytest.mark.guarantee(
    "On etcd", "Users may change, tokens expire and authentication be switched off and on while a job runs."
)
def test_etcd_users_may_change_and_tokens_expire_during_a_job(tmp_path: Path) -> None:
    """JWT tokens: votes, the watch and the lease of a host all go on, through a change of users, an end of tokens, and
    authentication that is turned off and on."""
    with site_etcd(tmp_path, jwt(tmp_path, "2s"), "--bcrypt-cost=4") as endpoint:
        add_user(EtcdClient(endpoint, timeout=5), "trainer", "secret", "/recover/")

        def client() -> EtcdClient:
            return EtcdClient(endpoint, "/recover/", "trainer", "secret", timeout=5)

        admin = EtcdClient(endpoint, "/", "root", "root", timeout=5)
        lost: list[int] = []
        lease = HostLease(client(), "h1", [0, 1], lost=lambda: lost.append(1))
        lease.start()
        board = Board(tmp_path / "board", 2)
        ranks = [EtcdFabric(client(), rank, 2, board, host="h1") for rank in range(2)]
        try:
            changes: list[tuple[str, dict[str, Any]]] = [
                ("user/add", {"name": "somebody-else", "password": "s"}),
                ("role/add", {"name": "another"}),
                ("user/grant", {"user": "somebody-else", "role": "another"}),
                ("disable", {}),
                ("enable", {}),
            ]
            for word, (path, body) in enumerate(changes, 1):
                assert agree(ranks, word) == [word] * 2
                admin.ask(f"/v3/auth/{path}", body)
                assert agree(ranks, word) == [word] * 2
            # The watch reports the death; its token is long invalid by now.
            tokens = [rank._client._token for rank in ranks]
            assert wait_until(lambda: all(r._client._token != t for r, t in zip(ranks, tokens, strict=True)))
            ranks[0].declare(1, "for the test")
            assert wait_until(lambda: 1 in ranks[0].failed())
            assert not lost, "the host has kept its lease"
            admin.ask("/v3/auth/user/changepw", {"name": "trainer", "password": "another"})
            with pytest.raises(EtcdError, match=r"is the password right\?"):
                client().get("key")
        finally:
            for rank in ranks:
                rank.close()
            lease._left.set()


@pytest.mark.guarantee(
    "On etcd", "A full etcd is waited for, and the run ends with its state saved if it stays full."
)
def test_ranks_continue_when_a_full_etcd_has_room_again(tmp_path: Path) -> None:
    with site_etcd(tmp_path, f"--quota-backend-bytes={QUOTA}") as endpoint:
        admin = EtcdClient(endpoint, "/", timeout=5)
        board = Board(tmp_path / "board", 2)
        ranks = [
            EtcdFabric(EtcdClient(endpoint, "/recover/", patience=60), rank, 2, board) for rank in range(2)
        ]
        try:
            assert agree(ranks, 1) == [1, 1]
            fill(admin)
            with pytest.raises(UnansweredError, match="has raised the alarm NOSPACE"):
                EtcdClient(endpoint, "/recover/", patience=0.1).put("key", b"value")
            # (Votes pass even so: etcd does not count what is written by a transaction inside of one.)
            waiting = threading.Thread(
                target=lambda: ranks[0].send(b"a row of the census", 1, 4), daemon=True
            )
            waiting.start()
            assert wait_until(lambda: ranks[0]._client.unanswered)
            admin.delete_all("somebody-else/")
            admin.compact(admin.get_all("recover/")[1])
            admin.ask("/v3/maintenance/defragment", {})
            (alarm,) = admin.ask("/v3/maintenance/alarm", {"action": "GET"})["alarms"]
            admin.ask("/v3/maintenance/alarm", {"action": "DEACTIVATE", **alarm})
            waiting.join(60)
            message = ranks[1].receive(0, 4)
            assert message.done()
            assert message.data == b"a row of the census"
            assert agree(ranks, 2) == [2, 2]
        finally:
            for rank in ranks:
                rank.close()


@pytest.mark.guarantee(
    "On etcd", "A full etcd is waited for, and the run ends with its state saved if it stays full."
)
@pytest.mark.soak
def test_job_survives_user_changes_and_saves_its_state_when_etcd_is_full(tmp_path: Path) -> None:
    password, run = tmp_path / "password", tmp_path / "run"
    password.write_text("secret\n")
    words = [
        "--nnodes",
        "1",
        "--nproc-per-node",
        "2",
        "--rdzv-id",
        "j",
        "--rdzv-patience",
        "3",
        "--page",
        "off",
    ]
    words += ["--etcd-user", "trainer", "--etcd-password-file", str(password), "--run-dir", str(run)]
    keys = [*small_world(tmp_path / "world"), "accum=2", "steps=1000000", "pace=0.01"]

    def steps() -> int:
        return len(read(run / "steps.jsonl").whole)

    flags = jwt(tmp_path, "10m"), "--bcrypt-cost=4", f"--quota-backend-bytes={QUOTA}"
    with site_etcd(tmp_path, *flags) as endpoint, open(tmp_path / "out", "wb") as out:
        add_user(EtcdClient(endpoint, timeout=5), "trainer", "secret", "/recover/")
        admin = EtcdClient(endpoint, "/", "root", "root", timeout=5)
        command = [sys.executable, "-P", "-m", "recover.cli", "train", "--rdzv-endpoint", endpoint, *words]
        job = subprocess.Popen([*command, *keys], stdout=out, stderr=out, env=os.environ)
        try:
            assert wait_until(lambda: steps() > 2 or job.poll() is not None, 300)
            admin.ask("/v3/auth/user/add", {"name": "somebody-else", "password": "s"})
            before = steps()
            assert wait_until(lambda: steps() > before + 2 or job.poll() is not None, 300)
            assert job.poll() is None, (tmp_path / "out").read_text()
            fill(admin)
            assert job.wait(300) == 1
        finally:
            job.kill()
            job.wait()
    said = (tmp_path / "out").read_text()
    assert "etcd has raised the alarm NOSPACE" in said, said
    assert "etcdctl alarm disarm" in said
    assert "goes on from step" in said
    (saved,) = (run / "checkpoints").glob("unconfirmed-*")
    assert int(saved.name.partition("-")[2]) >= steps() - 1, said
