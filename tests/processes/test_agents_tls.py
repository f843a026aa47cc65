"""An etcd that is there already, with TLS on both sides and users, through the agent."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_fabrics import add_user
from launching import Job
from patience import wait_until

from recover.world.fabrics.etcd.client import EtcdClient, EtcdError
from recover.world.fabrics.etcd.server import find_binary, free_port

HERE = "127.0.0.1"
EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
SCRIPT = """
import recover
world = recover.init()
assert world.agree(1) == 1
print("agreed", world.rank, flush=True)
"""


def openssl(place: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=place, check=True, capture_output=True)


def certificates(place: Path) -> None:
    """Make ca.pem, another-ca.pem, and certificates of a server and of a client, each with its key."""
    for name in ("ca", "another-ca"):
        subject = ("-subj", f"/CN={name}", "-days", "2")
        key = (*EC, "-nodes", "-keyout", f"{name}.key")
        openssl(place, "req", "-x509", *key, *subject, "-out", f"{name}.pem")
    (place / "uses").write_text(f"subjectAltName=IP:{HERE}\nextendedKeyUsage=serverAuth,clientAuth\n")
    subjects = {"server": "/CN=server", "client": "/O=recover", "named": "/CN=trainer"}
    for name, subject in subjects.items():
        key = (*EC, "-nodes", "-keyout", f"{name}.key")
        openssl(place, "req", *key, "-subj", subject, "-out", f"{name}.csr")
        sign = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "uses")
        openssl(place, "x509", "-req", "-in", f"{name}.csr", *sign, "-out", f"{name}.pem")


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[tuple[str, EtcdClient]]:
    """An etcd's endpoint, and a client of its user root; the user `trainer` may write below /ours/tls/ alone."""
    certificates(tmp_path)
    endpoint, peer = (f"{HERE}:{free_port(HERE)}" for _ in range(2))
    options = {
        "data-dir": tmp_path / "etcd",
        "listen-client-urls": f"https://{endpoint}",
        "advertise-client-urls": f"https://{endpoint}",
        "listen-peer-urls": f"http://{peer}",
        "initial-advertise-peer-urls": f"http://{peer}",
        "initial-cluster": f"default=http://{peer}",
        "cert-file": tmp_path / "server.pem",
        "key-file": tmp_path / "server.key",
        "trusted-ca-file": tmp_path / "ca.pem",
        "client-cert-auth": "true",
        "bcrypt-cost": 4,
        "log-level": "error",
    }
    server = subprocess.Popen([find_binary(), *(f"--{name}={value}" for name, value in options.items())])
    try:
        tls = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        tls.load_cert_chain(tmp_path / "client.pem", tmp_path / "client.key")
        admin = EtcdClient(endpoint, "/", tls=tls, timeout=10)
        assert wait_until(lambda: admin.version())
        add_user(admin, "trainer", "a-password", "/ours/tls/")
        yield endpoint, EtcdClient(endpoint, "/", "root", "root", tls)
    finally:
        server.kill()
        server.wait()


@pytest.mark.guarantee(
    "Several hosts", "An etcd with mutual TLS and users is used unchanged, and unknown users are refused."
)
@pytest.mark.soak
def test_etcd_with_tls_and_users_admits_the_job_and_refuses_unknown_users(
    etcd: tuple[str, EtcdClient], tmp_path: Path
) -> None:
    endpoint, root = etcd
    for name in ("a-password", "another"):
        (tmp_path / name).write_text(f"{name}\n")
    job = ["--nnodes", "1", "--nproc-per-node", "2", "--rdzv-endpoint", endpoint, "--rdzv-id", "tls"]
    job += ["--etcd-prefix", "/ours", "--join-timeout", "20"]
    ca = ["--etcd-ca", str(tmp_path / "ca.pem")]
    me = ["--etcd-cert", str(tmp_path / "client.pem"), "--etcd-key", str(tmp_path / "client.key")]
    named = [word.replace("client.", "named.") for word in me]
    user = ["--etcd-user", "trainer", "--etcd-password-file", str(tmp_path / "a-password")]
    other_ca, guess = ["--etcd-ca", str(tmp_path / "another-ca.pem")], [*user[:-1], str(tmp_path / "another")]
    for words, said in (
        ([*user, "--join-timeout", "1"], "and, if it wants TLS, was --etcd-ca given?"),
        ([*other_ca, *me, *user], "is not trusted"),
        ([*ca, *user], "--etcd-cert"),
        ([*ca, *me], "give a user"),
        ([*ca, *named, *user], "show one whose subject has no CN"),
        ([*ca, *me, *guess], "may user 'trainer' read and write under /ours/tls/"),
    ):
        refused = Job(tmp_path / str(len(said)), SCRIPT, *job, *words)
        assert refused.finish() == 2, refused.stderr
        assert said in refused.stderr
    run = Job(tmp_path / "run", SCRIPT, *job, *ca, *me, *user)
    assert run.finish() == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == ["agreed 0", "agreed 1"]
    assert "a-password" not in run.stderr
    assert "etcd grants no lease under 2 s here: a lost host is seen after 3 s, not 2" in run.stderr
    assert root.get_all("ours/")[0] == ()
    with pytest.raises(EtcdError):
        EtcdClient(endpoint, "/ours/tls/", "trainer", "a-password", patience=0).put("key", b"")
