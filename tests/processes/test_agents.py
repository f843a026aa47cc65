"""Jobs on several hosts that are real to the software: what is struck is lost, and nothing else."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from causes_told import first_causes, why
from lab_jobs import PROGRAMS, LabJob, etcd_on, strike
from recover_lab.lab.hosts import Lab
from training import small_world

from recover.checkpoint import directory
from recover.runs.records.job_log import job_lines
from recover.runs.records.json_lines import read
from recover.runs.report.recorded_runs import read_runs

pytestmark = pytest.mark.usefixtures("a_lab_can_be_made_here")
THREE = "h1:2379,h2:2379,h3:2379"
OWN = {"seconds", "location"}  # what each rank saw by its own clock, in its own place


@pytest.mark.guarantee(
    "Several hosts",
    "A host that loses power costs only its own replicas, also the first host with its etcd member, and "
    "every step has B microbatches.",
)
@pytest.mark.guarantee("Several hosts", "An agent declares its killed rank dead at once.")
@pytest.mark.guarantee(
    "Several hosts", "Records and checkpoints are on every surviving host with the same content."
)
@pytest.mark.guarantee(
    "Several hosts",
    "SIGUSR1 to one agent, or SIGTERM where its host cannot leave, ends training on all hosts after the step with a "
    "checkpoint, and another script at once.",
)
@pytest.mark.guarantee(
    "Several hosts",
    "`recover why` names a lost host as the first cause with time and advice, and lists its ranks.",
)
def test_lost_host_costs_only_its_own_replicas_and_no_record(tmp_path: Path) -> None:
    """`recover train` on three hosts that share no directory, with an etcd of three members that the agents start. A
    rank dies, then the first host loses its power; then one agent is asked to stop."""
    with Lab(hosts=3, shared=[tmp_path]) as lab:
        words = ["--nnodes", "3", "--nproc-per-node", "2", "--rdzv-endpoint", THREE, "--rdzv-id", "j"]
        keys = [*small_world(tmp_path / "world"), "accum=2", "steps=100000", "checkpoint.every=100000"]
        job = LabJob(lab, tmp_path, ["train", *words, "--lease", "4", *keys])
        steps = {host: job.run_dir(host) / "steps.jsonl" for host in ("h2", "h3")}

        def replicas() -> int:
            return (read(steps["h2"]).whole or [{"replicas": 0}])[-1]["replicas"]

        job.start()
        job.wait(lambda: replicas() == 6, "no step")
        strike(job.ranks("h3")[5], signal.SIGKILL)
        job.wait(lambda: replicas() == 5, "rank 5 is not missed")
        lab["h1"].power_cut()
        job.wait(lambda: replicas() == 3, "h1 is not missed")
        job.agents["h2"].send_signal(signal.SIGUSR1)
        assert job.codes("h2", "h3") == {"h2": 0, "h3": 0}, job.picture()
        assert job.leftovers() == {}
        assert "ranks 0-1 on h1 lost" in job.said("h3")
    _lost_first(job)
    runs = read_runs([job.run_dir("h2"), job.run_dir("h3")])
    for run in runs:
        assert [line["step"] for line in run.steps] == list(range(1, len(run.steps) + 1))
        assert {line["microbatches"] for line in run.steps} == {12}
        assert {tuple(line["dead_ranks"]) for line in run.incidents} == {(5,), (0, 1)}
        assert run.summary["parameters_digest"] == runs[0].summary["parameters_digest"]
    first, second = ([_facts(line) for line in (*run.steps, *run.incidents)] for run in runs)
    assert first == second
    for host in ("h2", "h3"):
        assert json.loads((job.run_dir(host) / "hosts.json").read_text())["ranks"]["3"] == {
            "host": "h2",
            "slot": 1,
        }
        found = directory.latest(job.run_dir(host))
        assert found is not None
        assert found.step == len(runs[0].steps)
        found.verify()


def _lost_first(job: LabJob) -> None:
    """`recover why` on either host names the rank that was killed, and the host that lost its power."""
    for host, killed in (("h2", "elsewhere"), ("h3", "killed")):
        assert first_causes(job.run_dir(host)) == {5: killed, 0: "host"}
        (of_host,) = (story for story in why(job.run_dir(host)) if story["first"][0]["rank"] == 0)
        (first,), (followed,) = of_host["first"], of_host["followed"]
        assert "host h1 was lost, with ranks 0, 1" in first["text"]
        assert "look at h1" in first["advice"]
        assert abs(first["at"] - of_host["record"]["at"]) < 60, "by the clock, about when the others knew"
        assert (followed["rank"], followed["because_of"]) == (1, 0)


def _facts(line: dict[str, object]) -> dict[str, object]:
    kept = [name for name in line if name not in (*OWN, "at") and not name.endswith("_ms")]
    return {name: line[name] for name in kept}


@pytest.mark.guarantee(
    "Several hosts",
    "SIGUSR1 to one agent, or SIGTERM where its host cannot leave, ends training on all hosts after the step with a "
    "checkpoint, and another script at once.",
)
@pytest.mark.guarantee(
    "Several hosts",
    "An agent that is killed or stopped takes its ranks along, leaves no process and never rejoins.",
)
@pytest.mark.guarantee("Several hosts", "A host that is cut off never commits again and ends itself.")
@pytest.mark.soak
def test_agent_killed_stopped_or_cut_off_takes_its_ranks_along(tmp_path: Path) -> None:
    """Of four hosts, one agent is killed, one stopped, one host cut off from the others; the last one trains on."""
    with Lab(hosts=4, shared=[tmp_path]) as lab:
        etcd_on(lab, "h1")
        words = [
            "--nnodes",
            "4",
            "--rdzv-endpoint",
            "h1:2379",
            "--rdzv-id",
            "j",
            "--lease",
            "4",
            "--rdzv-patience",
            "6",
        ]
        scenario = {"policy": "balanced", "samples": "exact", "accum": 2, "steps": 100_000}
        job = LabJob(lab, tmp_path, ["run", *words, str(PROGRAMS / "train.py"), json.dumps(scenario)])
        job.start()
        job.wait(lambda: job.diary(0, "h1"), "no step")

        def replicas() -> list[int]:
            return job.diary(0, "h1")[-1]["replicas"]

        job.agents["h2"].kill()
        job.wait(lambda: replicas() == [0, 2, 3], "h2 is not missed")
        job.wait(lambda: not lab["h2"].processes(), "h2 is not empty")
        job.agents["h3"].send_signal(signal.SIGSTOP)
        job.wait(lambda: replicas() == [0, 3], "h3 is not missed")
        job.wait(lambda: not job.ranks("h3"), "the ranks of h3 do not end")
        lab["h4"].cut()
        job.wait(lambda: replicas() == [0], "h4 is not missed")
        assert job.codes("h4") == {"h4": 1}
        assert "(--rdzv-patience)" in job.said("h4")
        job.agents["h3"].send_signal(signal.SIGCONT)
        assert job.codes("h3") == {"h3": 1}
        assert "host h3 was declared lost" in job.said("h3")
        lab["h4"].heal()
        assert read(job.run_dir("h1") / "steps.jsonl").whole[-1]["replicas"] == 1  # of a user's script
        story = [note["step"] for note in job.diary(0, "h1") if 3 in note["replicas"]]
        assert [note["step"] for note in job.diary(3, "h4")] == story[: len(job.diary(3, "h4"))]
        job.agents["h1"].send_signal(signal.SIGTERM)
        assert job.codes("h1") == {"h1": 143}
        assert job.leftovers().keys() == {"h1"}  # the etcd that was started before the job
        assert all("etcd" in line for line in job.leftovers()["h1"])


ACROSS = """
import os, torch, torch.distributed as dist, recover
from recover.parallel.torch_world import init_replica_world
world = recover.init()
init_replica_world(world)
total = torch.tensor([10.0 ** world.shard])
dist.all_reduce(total)
assert world.agree(1) == 1
print("replica", world.replica, "has", total.item(), "by local rank", os.environ["LOCAL_RANK"], flush=True)
"""


@pytest.mark.guarantee(
    "Several hosts", "A replica may span several hosts, and an etcd started by agents ends with them."
)
@pytest.mark.guarantee(
    "User code",
    "Every rank has `LOCAL_RANK`, its index on its host, under every launcher and after a restart.",
)
def test_replica_may_span_several_hosts(tmp_path: Path) -> None:
    """Three slots on one host, one on the other: the first replica is on one host, and the second on both. The etcd is
    the agents' own, and the token is in a file."""
    (tmp_path / "script.py").write_text(ACROSS)
    (tmp_path / "token").write_text("a secret")
    words = ["--nnodes", "2", "--rdzv-endpoint", "h2", "--rdzv-id", "j", "--replica-size", "2"]
    words += ["--token-file", str(tmp_path / "token"), str(tmp_path / "script.py")]
    with Lab(hosts=2, shared=[tmp_path]) as lab:
        job = LabJob(lab, tmp_path, ["run", *words], shared=True)
        job.start("h1", more=["--nproc_per_node", "3"])
        job.start("h2", more=["--nproc_per_node=1"])
        assert job.codes() == {"h1": 0, "h2": 0}, job.picture()
        assert job.leftovers() == {}
    said = job.picture()
    assert said.count("replica 0 has 11.0") == said.count("replica 1 has 11.0") == 2
    seats = json.loads((job.run_dir("h1") / "hosts.json").read_text())["ranks"]
    assert [seat["host"] for seat in seats.values()] == ["h1", "h1", "h1", "h2"]
    assert "a secret" not in job.picture()
    # Each agent labels the output by rank, and records what it sees of its ranks: of one launch.
    assert "[rank 3] replica 1 has 11.0 by local rank 0" in job.said("h2")
    assert "[rank 2] replica 1 has 11.0 by local rank 2" in job.said("h1")
    lines = job_lines(job.run_dir("h1"))
    assert [lines[0]["what"], lines[-1]["what"]] == ["start", "end"]
    assert [line["what"] for line in lines].count("start") == 1
    assert sorted(line["rank"] for line in lines if line["what"] == "exit") == [0, 1, 2, 3]


def test_train_on_hosts_with_different_numbers_of_ranks(tmp_path: Path) -> None:
    """One rank on h1, two on h2, and the key replicas on both."""
    with Lab(hosts=2, shared=[tmp_path]) as lab:
        words = ["--nnodes", "2", "--rdzv-endpoint", "h1", "--rdzv-id", "j"]
        keys = [*small_world(tmp_path / "world"), "replicas=3", "accum=2", "steps=3"]
        job = LabJob(lab, tmp_path, ["train", *words, *keys])
        for number, host in enumerate(("h1", "h2"), start=1):
            job.start(host, more=["--nproc-per-node", str(number)])
        assert job.codes() == {"h1": 0, "h2": 0}, job.picture()
    steps = read(job.run_dir("h2") / "steps.jsonl").whole
    assert [(line["replicas"], line["microbatches"]) for line in steps] == [(3, 6)] * 3
