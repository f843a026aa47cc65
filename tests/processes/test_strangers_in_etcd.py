"""A process that reaches the job's etcd without its token: it reads keys, and changes nothing that members do."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from etcd_fabrics import TOKEN, Fabrics, agree, at_once
from launching import Job
from patience import wait_until

from recover.job.authentication import Authenticator, make_token_file
from recover.runs.records.json_lines import read
from recover.world.fabrics.base import NotAdmittedError
from recover.world.fabrics.etcd.agreement import ASKING, CLAIM, DEAD, DECISION, VOTE, declare, key_of
from recover.world.fabrics.etcd.client import EtcdClient, KeyValue, LostDataError
from recover.world.fabrics.etcd.entry import place
from recover.world.fabrics.etcd.fabric import EtcdFabric
from recover.world.fabrics.etcd.server import EtcdServer, free_port
from recover.world.liveness.board import Board

pytestmark = pytest.mark.filterwarnings("ignore:.*is etcd 3:UserWarning")


class Forger(EtcdClient):
    """The job's own client, changed so that it writes with a guess of the token. It accepts and can read every value,
    as if the values of members could be guessed: so the whole way into a job can be tried."""

    def __init__(self, endpoint: str, prefix: str, token: str = TOKEN) -> None:
        super().__init__(endpoint, prefix, token="a guess")
        self._both = Authenticator(token, "etcd"), Authenticator("a guess", "etcd")

    def authentic(
        self, found: Iterable[Mapping[str, Any]], forged: list[KeyValue] | None = None
    ) -> tuple[KeyValue, ...]:
        return tuple(
            replace(one, value=value)
            for one in map(self._decoded, found)
            for value in [each.unsealed(self.prefix + one.key, one.value) for each in self._both]
            if value is not None
        )


class Copier(EtcdClient):
    """Writes values that it has read to keys of its choice."""

    def copy(self, value: bytes, to: str) -> None:
        self.put(to, value)

    def value(self, key: str) -> bytes:
        found = self.get(key)
        assert found is not None
        return found.value


def strangers(fabrics: Fabrics) -> tuple[Forger, Copier]:
    return tuple(kind(fabrics.server.endpoint, fabrics.prefix) for kind in (Forger, Copier))  # type: ignore[return-value]


@pytest.mark.guarantee(
    "Strangers", "Forged and copied deaths, votes, join requests and decisions do not count."
)
def test_forged_death_is_ignored_and_a_real_one_counts(fabrics: Fabrics) -> None:
    forger, copier = strangers(fabrics)
    ranks, _ = fabrics.make(3)
    assert agree(ranks, 7) == [7] * 3
    fabrics.etcd.put(
        key_of(CLAIM, 9), b""
    )  # a rank that was placed and died, so that there is a death to copy
    declare(fabrics.etcd, 9, "really")
    death = copier.value(key_of(DEAD, 9))
    for rank in range(3):
        declare(forger, rank, "because I say so")
    assert agree(ranks, 6) == [6] * 3
    for rank in range(3):
        copier.copy(death, key_of(DEAD, rank))
    assert agree(ranks, 5) == [5] * 3
    assert all(fabric.failed() <= {9} for fabric in ranks)
    forger.put(key_of(DEAD, 2), b"so that nobody can declare it")
    ranks[0].declare(2, "by decree")
    assert wait_until(lambda: 2 in ranks[1].failed())
    assert agree(ranks[:2], 3) == [None] * 2


@pytest.mark.guarantee(
    "Strangers", "Forged and copied deaths, votes, join requests and decisions do not count."
)
@pytest.mark.parametrize("kind", ["forged", "of another rank", "of an earlier agreement"])
def test_forged_vote_is_ignored(fabrics: Fabrics, kind: str) -> None:
    """By the rank that votes last, and decides, and by the rank that reads the votes."""
    forger, copier = strangers(fabrics)
    ranks, _ = fabrics.make(2)
    mine = key_of(VOTE, 1)
    early = threading.Thread(target=lambda: ranks[1].agree(7), daemon=True)
    early.start()
    assert wait_until(lambda: copier.get(mine) is not None)
    earlier = copier.value(mine)
    assert ranks[0].agree(7) == 7
    early.join()
    told: list[Any] = []
    first = threading.Thread(target=lambda: told.append(ranks[0].agree(7)), daemon=True)
    first.start()
    assert wait_until(lambda: copier.get(key_of(VOTE, 0)) is not None)
    if kind == "forged":
        forger.put(mine, forger.get(key_of(VOTE, 0)).value)  # type: ignore[union-attr]
    else:
        copier.copy(earlier if kind == "of an earlier agreement" else copier.value(key_of(VOTE, 0)), mine)
    ranks[0]._agreement.read_count()
    assert not told
    assert ranks[1].agree(3) == 3
    first.join(60)
    assert told == [3]


@pytest.mark.guarantee(
    "Strangers", "Forged and copied deaths, votes, join requests and decisions do not count."
)
def test_forged_join_request_is_ignored(
    fabrics: Fabrics,
) -> None:
    forger, copier = strangers(fabrics)
    ranks, _ = fabrics.make(2)
    assert agree(ranks, 7) == [7] * 2
    (rank,) = place(forger)
    stranger = EtcdFabric(forger, rank, 2, Board(fabrics.directory / "theirs", 3), "a guess", admits=True)
    asks = threading.Thread(target=lambda: at_once(stranger.ask), daemon=True)
    asks.start()
    assert wait_until(lambda: forger.get(key_of(ASKING, rank)) is not None)
    copier.copy(copier.value(key_of(CLAIM, 0)), key_of(ASKING, 3))
    fabrics.etcd.put("seen/after", b"")  # comes after the request, by the same watch
    assert wait_until(lambda: all("seen/after" in fabric._watch._known for fabric in ranks))
    assert [fabric.asking() for fabric in ranks] == [frozenset()] * 2
    # Not admitted even if all members vote for them.
    votes = at_once(*(lambda f=fabric: f.agree(7, frozenset({rank, 3})) for fabric in ranks))
    assert votes == [7] * 2
    assert ranks[0].participants == {0, 1}
    stranger.close()


@pytest.mark.guarantee("Strangers", "Ranks join only jobs started with `--return` or `--nnodes MIN:MAX`.")
def test_job_without_joins_ignores_join_requests(fabrics: Fabrics) -> None:
    ranks, _ = fabrics.make(2, admits=False)
    assert agree(ranks, 7) == [7] * 2
    with pytest.raises(NotAdmittedError, match="start it with --return, or with --nnodes MIN:MAX"):
        place(fabrics.etcd)
    with pytest.raises(NotAdmittedError, match="admits nobody after its start"):
        fabrics.join(2, 2, admits=False)
    fabrics.etcd.put(key_of(ASKING, 2), b"signed, but not asked for")
    assert wait_until(lambda: all(2 in fabric._cache.asking for fabric in ranks))
    assert [fabric.asking() for fabric in ranks] == [frozenset()] * 2


@pytest.mark.guarantee(
    "Strangers", "Forged and copied deaths, votes, join requests and decisions do not count."
)
@pytest.mark.parametrize("kind", ["forged", "an earlier one"])
def test_forged_decision_ends_the_members_with_their_agreed_state(fabrics: Fabrics, kind: str) -> None:
    """Etcd counts agreements by the versions of this key: no rank can go on from there."""
    forger, copier = strangers(fabrics)
    ranks, _ = fabrics.make(2)
    assert agree(ranks, 7) == [7] * 2
    if kind == "forged":
        forger.put(DECISION, fabrics.store()[DECISION].value.replace(b'"0-1"', b'"0-2"'))
    else:
        copier.copy(copier.value(DECISION), DECISION)
    told = agree(ranks, 5)
    assert [type(one) for one in told] == [LostDataError] * 2
    assert all("was overwritten without the job's token" in str(one) for one in told)
    assert [fabric.participants for fabric in ranks] == [{0, 1}] * 2


@pytest.mark.guarantee(
    "Strangers",
    "Etcd on one host listens on a private socket; several hosts on an etcd started by an agent need "
    "`--token-file`.",
)
def test_etcd_in_a_directory_listens_on_no_port(tmp_path: Path) -> None:
    with EtcdServer(sockets=tmp_path / "s") as server:
        assert EtcdClient(server.endpoint, token=TOKEN).get("nothing") is None
        assert (tmp_path / "s").stat().st_mode & 0o077 == 0
        assert (inodes := _sockets_of(server.pid))
        for table in ("tcp", "tcp6", "udp", "udp6"):
            lines = Path(f"/proc/{server.pid}/net/{table}").read_text().splitlines()[1:]
            assert inodes.isdisjoint(line.split()[9] for line in lines)


def _sockets_of(pid: int) -> set[str]:
    """Inodes of the sockets of a process, which opens and closes other files meanwhile."""
    names = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            names.add(path.readlink().name)
    return {name.removeprefix("socket:[").removesuffix("]") for name in names if name.startswith("socket:")}


SCRIPT = """
import sys, time
from pathlib import Path
import torch, recover
torch.set_num_threads(1)
torch.manual_seed(0)
class Stream:
    def __getitem__(self, i):
        return torch.randn(8, 4, generator=torch.Generator().manual_seed(i))
world = recover.init()
model = torch.nn.Linear(4, 1)
step = recover.Step(world, model, torch.optim.SGD(model.parameters(), lr=0.02), global_batch=4)
while not step.stop_agreed:
    if Path(__file__).with_name("stop").exists():
        step.request_stop()
    for x in step.microbatches(Stream()):
        step.backward(((model(x) - x.sum(1, keepdim=True)) ** 2).mean())
    time.sleep(0.02)
if world.rank == 0:
    torch.save([step.index, model.weight.detach(), model.bias.detach()], Path(__file__).with_name("result.pt"))
"""


def expected(steps: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(steps):
        optimizer.zero_grad()
        for sample in range(4 * step, 4 * step + 4):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(sample))
            (((model(x) - x.sum(1, keepdim=True)) ** 2).mean() / 4).backward()
        optimizer.step()
    return [model.weight.detach(), model.bias.detach()]


@pytest.mark.guarantee(
    "Strangers",
    "A process without the token that reaches the job's etcd cannot join, read state, declare deaths or end "
    "the job.",
)
def test_stranger_in_the_jobs_etcd_gains_nothing(tmp_path: Path) -> None:
    """It tries to join by the job's own code, copies what members wrote, declares them dead, and orders the end."""
    token = make_token_file(tmp_path / "token")
    endpoint = f"127.0.0.1:{free_port('127.0.0.1')}"
    words = ["--nnodes", "1", "--nproc-per-node", "2", "--rdzv-endpoint", endpoint, "--rdzv-id", "j"]
    job = Job(tmp_path, SCRIPT, *words, "--token-file", str(token), "--return", "--page", "off")
    try:
        steps = lambda: read(job.run_dir / "steps.jsonl").whole  # noqa: E731
        assert wait_until(lambda: (job.run_dir / "steps.jsonl").exists() and len(steps()) >= 3, 120)
        keys = {found.key: found for found in EtcdClient(endpoint, "/").get_all()[0]}
        secret = token.read_text().strip().encode()
        assert not any(
            secret in found.value or base64.b64encode(secret) in found.value for found in keys.values()
        )
        (prefix,) = {"/" + key.removesuffix("job") for key in keys if key.endswith("/job")}
        forger, copier = Forger(endpoint, prefix, secret.decode()), Copier(endpoint, prefix)
        (rank,) = place(forger)
        stranger = EtcdFabric(forger, rank, 2, Board(tmp_path / "theirs", 3), "a guess", admits=True)
        threading.Thread(target=lambda: at_once(stranger.ask), daemon=True).start()
        assert wait_until(lambda: forger.get(key_of(ASKING, rank)) is not None)
        claim = copier.value(key_of(CLAIM, 0))
        for key in (
            key_of(CLAIM, rank + 1),
            key_of(ASKING, rank + 1),
            key_of(DEAD, 0),
            "order",
            "anew/0000000002",
        ):
            copier.copy(claim, key)
        for member in (0, 1):
            declare(forger, member, "because I say so")
        forger.put("order", json.dumps({"host": "h", "why": "because I say so", "signal": 0}).encode())
        forger.put("ends/0", json.dumps({"end": "done", "detail": "", "time": ""}).encode())
        last = len(steps())
        assert wait_until(lambda: len(steps()) >= last + 10, 120)
        assert not stranger._cache.admitted()
        stranger.close()
        (tmp_path / "stop").touch()
        code = job.finish()
    finally:
        job.process.kill()
    said = job.stdout + job.stderr
    assert code == 0, said
    assert "seen/asking/0000000002 in etcd: it was not written with this job's token" in said
    assert {line["replicas"] for line in steps()} == {2}
    taken, *found = torch.load(tmp_path / "result.pt")
    assert all(map(torch.allclose, found, expected(taken)))
