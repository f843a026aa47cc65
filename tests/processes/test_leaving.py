"""Hosts that leave a running job on notice: the others go on, nothing is computed again, and the bits are those of a
calm run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lab_jobs import ROOT, LabJob, etcd_on, strike
from recover_lab.lab.hosts import Lab
from test_rejoin import HSDP, LARGE, LR, check_against_calm, is_joining, replicas
from training import Trained, finish, small_world, start

from recover.checkpoint import directory
from recover.runs.records.json_lines import read

pytestmark = pytest.mark.usefixtures("a_lab_can_be_made_here")
SLOW = 240.0  # seconds for six ranks of sharded replicas to start on a few busy cores


def a_job(lab: Lab, place: Path, words: list[str], *options: str, shared: bool = True) -> LabJob:
    hosts = ["--nnodes", str(len(list(lab))), "--rdzv-endpoint", "h1", "--rdzv-id", "j"]
    return LabJob(lab, place, ["train", *hosts, *options, *words, "steps=100000", "pace=0.05"], shared)


def recover(*words: str) -> str:
    """The output of a `recover` command."""
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-m", "recover.cli", *words]
    return subprocess.run(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ).stdout


def ends(run_dir: Path) -> dict[int, str]:
    markers = (run_dir / "ranks").glob("*.end")
    return {int(path.stem): json.loads(path.read_text())["end"] for path in markers}


@pytest.mark.guarantee(
    "Leaving",
    "A host that leaves on notice costs no microbatch and no other rank, its agent exits with code 0, and the run has "
    "the bits of a run in which no host left.",
)
def test_hosts_leave_one_after_the_other_and_the_last_one_saves(tmp_path: Path) -> None:
    """By SIGTERM, then by an operator. The last host cannot leave: SIGTERM stops the job there."""
    words = [*small_world(tmp_path / "world"), *LR, "accum=2", "reduction=reproducible"]
    with Lab(hosts=3, shared=[tmp_path]) as lab:
        etcd_on(lab, "h1")
        job = a_job(lab, tmp_path, words)
        job.start()
        run_dir = job.run_dir("h1")
        job.wait(lambda: replicas(run_dir) == 3, "no step")
        job.agents["h2"].send_signal(signal.SIGTERM)
        assert job.codes("h2") == {"h2": 0}, job.picture()
        job.wait(lambda: replicas(run_dir) == 2, "the others do not go on")
        assert "leaves after its step" in recover("leave", str(run_dir), "--host", "h3")
        assert job.codes("h3") == {"h3": 0}, job.picture()
        job.wait(lambda: replicas(run_dir) == 1, "the last one does not go on")
        assert "no other host holds a whole replica" in recover("leave", str(run_dir), "--host", "h1")
        assert "left on notice" in recover("status", str(run_dir))
        assert ends(run_dir) == {1: "left", 2: "left"}
        job.agents["h1"].send_signal(signal.SIGTERM)
        assert job.codes() == dict.fromkeys(job.agents, 0), job.picture()
        own = {
            host: [line for line in lines if "etcd" not in line] for host, lines in job.leftovers().items()
        }
        assert not any(own.values()), own
    run = Trained(0, job.picture(), run_dir)
    first, second = run.incidents
    assert (first["kind"], first["left_ranks"], first["dead_ranks"]) == ("left", [1], [])
    assert (second["kind"], second["left_ranks"], second["dead_ranks"]) == ("left", [2], [])
    assert first["extra_microbatches"] == second["extra_microbatches"] == 0
    assert (run.summary["failures"], run.summary["left"], run.summary["replicas_end"]) == (0, 2, 1)
    assert "rank 1 on h2 left on notice" in job.said("h1")
    assert "host h2 has left job j as asked; the job continues on h1, h3" in job.said("h2")
    assert "the whole job is asked to stop" in job.said("h1")
    assert "no rank was lost" in (told := recover("why", str(run_dir)))
    assert "replica 1 left on notice" in told
    check_against_calm(run, tmp_path / "calm", words, 6)


@pytest.mark.guarantee(
    "Leaving",
    "If all hosts are asked to leave, or the host of the only etcd, or if fewer than `min_replicas` would stay, the "
    "job saves a checkpoint and ends.",
)
@pytest.mark.parametrize(
    "noticed",
    [
        pytest.param(["h1", "h2"], id="all hosts"),
        pytest.param(["h1"], id="the host of the only etcd", marks=pytest.mark.soak),
        pytest.param(["h2"], id="too few would stay", marks=pytest.mark.soak),
    ],
)
def test_job_saves_and_ends_if_it_cannot_go_on_without_a_host(tmp_path: Path, noticed: list[str]) -> None:
    """The job's own etcd is on h1, unless all hosts leave. `min_replicas` is 2 where h2 leaves. Ranks that get SIGTERM,
    too, leave the answer to their agent."""
    words = [*small_world(tmp_path / "world"), "accum=2"]
    words += ["min_replicas=2"] if noticed == ["h2"] else []
    with Lab(hosts=2, shared=[tmp_path]) as lab:
        if noticed == ["h1", "h2"]:
            etcd_on(lab, "h1")
        job = a_job(lab, tmp_path, words)
        job.start()
        run_dir = job.run_dir("h1")
        job.wait(lambda: replicas(run_dir) == 2, "no step")
        if noticed != ["h1", "h2"]:
            assert "SIGTERM to this host stops the whole job: it runs the job's only etcd" in job.said("h1")
        for pid in [pid for host in noticed for pid in job.ranks(host).values()]:
            strike(pid, signal.SIGTERM)
        for host in noticed:
            job.agents[host].send_signal(signal.SIGTERM)
        assert job.codes() == {"h1": 0, "h2": 0}, job.picture()
    run = Trained(0, job.picture(), run_dir)
    if noticed == ["h1", "h2"]:  # one of them may have left after a step, before the other was asked
        assert not any(line["dead_ranks"] for line in run.incidents)
    else:
        assert (run.incidents, run.summary["replicas_end"]) == ([], 2)
    assert run.checkpoints == [f"step-{run.summary['steps']}"]


@pytest.mark.guarantee(
    "Leaving",
    "A host that is asked twice, or whose step outlasts `--grace`, leaves at once, as if it had died.",
)
@pytest.mark.soak
@pytest.mark.parametrize("twice", [True, False])
def test_host_leaves_at_once_if_asked_twice_or_its_step_is_too_long(tmp_path: Path, twice: bool) -> None:
    """In a step that never ends by itself: a rank of another host is stopped meanwhile."""
    words = [*small_world(tmp_path / "world"), *LR, "accum=2", "reduction=reproducible", "hang_limit=600"]
    with Lab(hosts=3, shared=[tmp_path]) as lab:
        etcd_on(lab, "h1")
        job = a_job(lab, tmp_path, words, "--grace", "600" if twice else "0.5")
        job.start()
        run_dir = job.run_dir("h1")
        job.wait(lambda: replicas(run_dir) == 3, "no step")
        (stopped,) = job.ranks("h3").values()
        strike(stopped, signal.SIGSTOP)
        for _ in range(1 + twice):
            job.agents["h2"].send_signal(signal.SIGTERM)
            job.wait(lambda: "SIGTERM: host h2 leaves" in job.said("h2"))
        assert job.codes("h2") == {"h2": 143}, job.picture()
        strike(stopped, signal.SIGCONT)
        job.wait(lambda: replicas(run_dir) == 2, "the others do not go on")
        job.agents["h1"].send_signal(signal.SIGINT)
        assert job.codes("h1", "h3") == {"h1": 130, "h3": 0}, job.picture()
    run = Trained(0, job.picture(), run_dir)
    (lost,) = run.incidents
    assert (lost["dead_ranks"], lost.get("left_ranks")) == ([1], None)
    why = "it was asked twice" if twice else "its step took longer than its grace period of 0.5 s"
    assert f"left on notice at once, because {why}" in recover("why", str(run_dir))
    check_against_calm(run, tmp_path / "calm", words, 6)


@pytest.mark.guarantee(
    "Leaving",
    "If all hosts are asked to leave in a step that does not end, the last commit is saved at once, and a resumed run "
    "has the bits of a calm one.",
)
@pytest.mark.soak
def test_state_before_a_long_step_is_saved_if_all_hosts_are_asked_to_leave(tmp_path: Path) -> None:
    """One after the other: nothing is saved before all were asked. The rank of h2 is stopped in a step."""
    words = [*small_world(tmp_path / "world"), *LR, "accum=2", "reduction=reproducible", "hang_limit=600"]
    with Lab(hosts=2, shared=[tmp_path]) as lab:
        etcd_on(lab, "h1")
        job = a_job(lab, tmp_path, words, "--grace", "600")
        job.start()
        run_dir = job.run_dir("h1")
        job.wait(lambda: replicas(run_dir) == 2, "no step")
        (stopped,) = job.ranks("h2").values()
        strike(stopped, signal.SIGSTOP)
        job.agents["h2"].send_signal(signal.SIGTERM)
        job.wait(lambda: "SIGTERM: host h2 leaves" in job.said("h2"))
        assert directory.latest(run_dir) is None
        job.agents["h1"].send_signal(signal.SIGTERM)
        job.wait(lambda: directory.latest(run_dir) is not None, "nothing is saved")
        for host in ("h1", "h2"):
            job.agents[host].send_signal(signal.SIGTERM)
        assert job.codes() == {"h1": 143, "h2": 143}, job.picture()
    found, last = directory.latest(run_dir), len(read(run_dir / "steps.jsonl").whole)
    assert found is not None
    assert (found.path.name, found.step) == (f"unconfirmed-{last}", last)
    assert f"all hosts are asked to leave in step {last + 1}: the state before it is saved in" in job.said(
        "h1"
    )
    steps = last + 3
    resumed = finish(start(run_dir, f"steps={steps}", "replicas=1", "pace=0", resume=run_dir), run_dir)
    assert resumed.code == 0, resumed.output
    assert [line["step"] for line in resumed.steps] == list(range(1, steps + 1))
    check_against_calm(resumed, tmp_path / "calm", words, 4)


@pytest.mark.guarantee(
    "Leaving",
    "A replica that spans hosts leaves whole, the other host keeps its agent and slots, and hosts that have left may "
    "return.",
)
@pytest.mark.soak
def test_replica_across_hosts_leaves_whole_and_hosts_return(tmp_path: Path) -> None:
    """HSDP: replica 0 on h1 and h2, replica 1 on h3 and h4. h4 leaves and returns, then h1, whose replica writes all
    records, and a checkpoint after every step."""
    words = [*small_world(tmp_path / "world"), *LR, *HSDP, "accum=2", "reduction=reproducible"]
    with Lab(hosts=4, shared=[tmp_path]) as lab:
        etcd_on(lab, "h2")
        hosts = [
            "--nnodes",
            "4",
            "--rdzv-endpoint",
            "h2",
            "--rdzv-id",
            "j",
            "--return",
            "--return-delay",
            "0",
        ]
        keys = [*words, "steps=100000", "pace=0.05", "checkpoint.every=1", "checkpoint.keep=2"]
        job = LabJob(lab, tmp_path, ["train", *hosts, *keys], shared=True)
        run_dir = job.run_dir("h1")
        job.start()
        job.wait(lambda: replicas(run_dir) == 2, "no step", SLOW)
        for leaver, peer in (("h4", "h3"), ("h1", "h2")):
            job.agents[leaver].send_signal(signal.SIGTERM)
            assert job.codes(leaver) == {leaver: 0}, job.picture()
            job.wait(lambda: replicas(run_dir) == 1, "the replica has not left")
            job.wait(lambda peer=peer: not job.ranks(peer), "half of the replica stays")
            assert job.agents[peer].poll() is None, job.picture()
            job.start(leaver)
            job.wait(lambda: replicas(run_dir) == 2, f"{leaver} and {peer} do not make a replica again", SLOW)
        job.agents["h3"].send_signal(signal.SIGUSR1)
        assert job.codes() == dict.fromkeys(job.agents, 0), job.picture()
    run = Trained(0, job.picture(), run_dir)
    assert [line["left_ranks"] for line in run.incidents if line["kind"] == "left"] == [[2, 3], [0, 1]]
    assert not any(line["dead_ranks"] or line["extra_microbatches"] for line in run.incidents), run.incidents
    assert ends(run_dir) == dict.fromkeys(range(4), "left") | dict.fromkeys(range(4, 8), "done")
    found = directory.latest(run_dir)
    assert found is not None
    assert found.step == run.summary["steps"]
    found.verify()
    check_against_calm(run, tmp_path / "calm", words, 4)


@pytest.mark.guarantee(
    "Leaving", "A notice during a repair or during a join takes effect after the step that follows."
)
@pytest.mark.soak
def test_notice_during_a_repair_and_during_a_join(tmp_path: Path) -> None:
    """Replica 3 dies, and rank 0 stops for a while inside the repair: h2 is asked to leave then. Replica 3 is started
    again on h4, which is asked to leave before it has joined, or when it just has."""
    words = [*small_world(tmp_path / "world"), *LR, "accum=2", "reduction=reproducible"]
    faults = ["--kill", "4:3:in-reduce", "--kill", "4:0:repair:members=pause:3"]
    with Lab(hosts=4, shared=[tmp_path]) as lab:
        etcd_on(lab, "h1")
        job = a_job(lab, tmp_path, words, *faults, "--return", "--return-delay", "0")
        job.start()
        run_dir = job.run_dir("h1")
        job.wait(lambda: job.ranks("h1"), "no rank")
        (first,) = job.ranks("h1").values()
        job.wait(lambda: state_of(first) == "T", "no repair")
        job.agents["h2"].send_signal(signal.SIGTERM)
        job.wait(lambda: "is started on slot 0 of h4, to join" in job.said("h4"), "nothing is started again")
        job.agents["h4"].send_signal(signal.SIGTERM)
        assert job.codes("h2", "h4") == {"h2": 0, "h4": 0}, job.picture()
        steps = len(read(run_dir / "steps.jsonl").whole)
        job.wait(lambda: len(read(run_dir / "steps.jsonl").whole) > steps + 3, "no more steps")
        assert replicas(run_dir) == 2
        job.agents["h1"].send_signal(signal.SIGUSR1)
        assert job.codes() == dict.fromkeys(job.agents, 0), job.picture()
    run = Trained(0, job.picture(), run_dir)
    lost = [line for line in run.incidents if line["dead_ranks"]]
    assert [(line["step"], line["dead_ranks"]) for line in lost] == [(4, [3])]
    assert [1] in [line.get("left_ranks") for line in run.incidents]
    check_against_calm(run, tmp_path / "calm", words, 8)


@pytest.mark.guarantee(
    "Leaving",
    "A replica that is asked to leave while it joins in instalments leaves at the next vote, and no microbatch is "
    "computed again.",
)
@pytest.mark.soak
def test_host_leaves_while_its_replica_joins_in_instalments(tmp_path: Path) -> None:
    """HSDP, in a join of tens of steps: the agent has ended before the replica could hold the state."""
    words = [*small_world(tmp_path / "world", **LARGE), *LR, *HSDP, "accum=1", "reduction=reproducible"]
    words += ["join=instalments"]
    with Lab(hosts=2, shared=[tmp_path]) as lab:
        etcd_on(lab, "h1")
        job = a_job(lab, tmp_path, words, "--nproc-per-node", "2", "--return", "--return-delay", "0")
        job.start()
        run_dir = job.run_dir("h1")
        job.wait(lambda: replicas(run_dir) == 2, "no step", SLOW)
        strike(min(job.ranks("h2").values()), signal.SIGKILL)
        job.wait(lambda: is_joining(run_dir), "no replica joins", SLOW)
        job.agents["h2"].send_signal(signal.SIGTERM)
        assert job.codes("h2") == {"h2": 0}, job.picture()
        steps = len(read(run_dir / "steps.jsonl").whole)
        job.wait(lambda: len(read(run_dir / "steps.jsonl").whole) > steps + 3, "no more steps")
        job.agents["h1"].send_signal(signal.SIGUSR1)
        assert job.codes() == dict.fromkeys(job.agents, 0), job.picture()
    run = Trained(0, job.picture(), run_dir)
    lost, left = run.incidents
    assert (lost["dead_ranks"], left["kind"]) == ([2, 3], "left")
    assert (left["left_ranks"], left["dead_ranks"], left["extra_microbatches"]) == ([4, 5], [], 0)
    assert ends(run_dir)[4] == ends(run_dir)[5] == "left"
    check_against_calm(run, tmp_path / "calm", words, 2)


def state_of(pid: int) -> str:
    """The state of a process: T is stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
