"""A host that rejoins a running job, by a real etcd: it waits until its old lease is gone, and finds its old files."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from etcd_fabrics import TOKEN, Fabrics, at_once
from patience import PATIENCE, wait_until
from training import small_world

from recover.job.host_options import HostOptions
from recover.job.spec import JobSpec
from recover.launch.hosts import rendezvous as meetings
from recover.launch.hosts.options import HostPart, read_options
from recover.launch.hosts.rendezvous import HostPlan, Rendezvous
from recover.launch.hosts.run_directory import SeenDirectories, open_shared_run_dir, write_placement
from recover.launch.preflight import Refusal
from recover.train import supervision
from recover.train.preparation import PreparedRun
from recover.world.fabrics.etcd.client import EtcdClient
from recover.world.fabrics.etcd.host_lease import HostLease

LONG = 600.0  # seconds of leases that nothing but the test ends
pytestmark = pytest.mark.filterwarnings("ignore:.*is etcd 3:UserWarning")


@pytest.fixture
def meet(fabrics: Fabrics, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rendezvous]:
    """Makes the rendezvous of an agent, for a job of two hosts that hosts may rejoin."""
    monkeypatch.setattr(meetings, "LEASE", LONG)  # runs out when the test says so
    monkeypatch.setattr(meetings, "KEEP", 0.2)
    monkeypatch.setattr(meetings, "SETTLE", 0.5)
    prefix = f"meeting-{secrets.token_hex(4)}/"

    def make(host: str, token: str = TOKEN) -> Rendezvous:
        client = EtcdClient(fabrics.server.endpoint, prefix=prefix, token=token)
        part = HostPart(2, 2, 1, (fabrics.server.endpoint,), "j", host, None, token, returns=True)
        return Rendezvous(client, part, "10.0.0.1", {"the script": "same"}, 1)

    return make


def begin(one: Rendezvous) -> HostPlan:
    one.enter(lambda: False)
    return one.wait_for_plan(PATIENCE, lambda: False)


def lose_power(meeting: Rendezvous, lease: HostLease) -> None:
    """End the agent as a loss of power does: it does not leave, and renews no lease any more."""
    for part, threads in ((meeting, [meeting._keeper]), (lease, lease._threads)):
        part._left.set()
        for thread in threads:
            thread.join()


def test_host_with_another_token_is_refused_and_the_others_wait(
    meet: Callable[..., Rendezvous],
) -> None:
    first, second, stranger = meet("h1"), meet("h2"), meet("h3", "another token")
    first.enter(lambda: False)
    refusal = at_once(lambda: begin(stranger))[0]
    assert isinstance(refusal, Refusal)
    assert "a job of that name runs already, on h1, with another token; give all hosts" in str(refusal)
    stranger._client.put("meet/h3", b"it says that it is here all the same")
    second.enter(lambda: False)
    plans = at_once(*(lambda each=each: each.wait_for_plan(10.0, lambda: False) for each in (first, second)))
    assert [sorted(plan.hosts) for plan in plans] == [["h1", "h2"]] * 2
    assert [plan.token for plan in plans] == [""] * 2, "it is in no plan"
    for each in (first, second):
        each.leave()


@pytest.mark.guarantee(
    "Rejoining replicas",
    "A host that rejoins at once waits until its old lease is gone, and files it left do not block it.",
)
def test_host_that_rejoins_at_once_waits_until_its_old_lease_is_gone(
    meet: Callable[[str], Rendezvous], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = meet("h1"), meet("h2")
    at_once(lambda: begin(first), lambda: begin(second))
    assert (first.late, second.late) == (False, False)
    second_lease = HostLease(second._client, "h2", (), LONG)
    second_lease.start()
    lose_power(second, second_lease)
    with pytest.raises(ValueError, match="a host 'h2' is in this job already"):
        HostLease(first._client, "h2", (), LONG).start()
    back, looks = meet("h2"), [0]

    def look() -> Any:
        looks[0] += 1
        return Rendezvous._look(back)

    monkeypatch.setattr(back, "_look", look)
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(begin, back)
        assert wait_until(lambda: looks[0] > 3)
        assert not coming.done(), "its agent's lease has not run out"
        first._client.revoke(second._lease)
        plan = coming.result(PATIENCE)
    first._client.revoke(second_lease._lease)
    lease = HostLease(back._client, "h2", (), LONG)
    lease.start()  # the lost host had no ranks, so no member has declared it lost
    lease.leave()
    assert back.late
    assert plan.hosts["h2"]["id"] == back.me.id
    with pytest.raises(Refusal, match="a job of that name runs already"):
        meet("h3").enter(lambda: False)
    (tmp_path / "ranks").mkdir()
    (marker := tmp_path / "ranks" / "1.end").write_text("{}")
    run_dir, lock = open_shared_run_dir(tmp_path, "j")
    os.close(lock)
    first.leave()
    with SeenDirectories(run_dir, back) as directories, pytest.raises(Refusal, match="the job has ended"):
        directories.compare(back._client, plan, lambda: False)
    assert marker.exists(), "ids are not used again: it is of the job that it came back to"
    back.leave()


@pytest.mark.guarantee(
    "Rejoining replicas",
    "A host that rejoins at once waits until its old lease is gone, and files it left do not block it.",
)
@pytest.mark.parametrize(("job", "comes"), [("j", True), ("another", False)])
def test_files_left_by_a_host_do_not_block_its_rejoin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], job: str, comes: bool
) -> None:
    """The directory of a host without power has no owner. The rendezvous shows whether the job runs."""
    prepared: list[PreparedRun] = []
    monkeypatch.setattr(supervision, "run", lambda run, *_: prepared.append(run) or 0)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "steps.jsonl").write_text('{"step": 1}\n')
    write_placement(run_dir, "j", {}, {}, later=False)
    options = HostOptions(nnodes="2", nproc_per_node="1", rdzv_endpoint="h1", rdzv_id=job, returns=True)
    code = supervision.train([*small_world(tmp_path / "world"), "accum=2"], run_dir, hosts=options)
    assert (code, [run.joins for run in prepared]) == ((0, [True]) if comes else (2, []))
    assert ("holds a run already" in capfd.readouterr().err) != comes
    if comes:
        with pytest.raises(Refusal, match="whose job has ended meanwhile; go on with it by --resume"):
            supervision._check_hosts(prepared[0], read_options(options), JobSpec(2))


def test_second_agent_of_a_resumed_job_does_not_meet_the_job_before_it(tmp_path: Path) -> None:
    """A requeued job has another name and the same run directory, which its hosts share."""
    write_placement(tmp_path, "7.0", {}, {}, later=False)
    _, first = open_shared_run_dir(tmp_path, "7.1")
    _, second = open_shared_run_dir(tmp_path, "7.1")
    write_placement(tmp_path, "7.1", {}, {}, later=False)
    with pytest.raises(Refusal, match=r"is in use by job 7\.1"):  # while it runs
        open_shared_run_dir(tmp_path, "8.0")
    for lock in (first, second):
        os.close(lock)
