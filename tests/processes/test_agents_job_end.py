"""How a job on several hosts ends if it cannot go on: on all hosts, with the reason, and with a state to resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab_jobs import PROGRAMS, LabJob, etcd_on
from recover_lab.lab.hosts import Lab
from training import Trained, small_world, train

from recover.checkpoint import directory
from recover.runs.records.json_lines import read

pytestmark = pytest.mark.usefixtures("a_lab_can_be_made_here")


@pytest.mark.guarantee(
    "Several hosts",
    "A script that ends on one host while others are inside a step is named and evicted, and the others "
    "continue.",
)
def test_script_that_ends_early_on_one_host_is_evicted_on_all_hosts(tmp_path: Path) -> None:
    """The others would wait for its part of a sum for ever, and it for their last vote. It is left behind."""
    words = ["--nnodes", "2", "--rdzv-endpoint", "h1", "--rdzv-id", "j", "--lease", "5"]
    scenario = {"policy": "balanced", "samples": "exact", "accum": 2, "steps": 30, "ends": [3, 1]}
    with Lab(hosts=2, shared=[tmp_path]) as lab:
        job = LabJob(lab, tmp_path, ["run", *words, str(PROGRAMS / "train.py"), json.dumps(scenario)])
        job.start()
        codes = job.codes()
        assert 0 not in codes.values(), job.picture()
        assert len(set(codes.values())) == 1, "the same on all hosts"
        assert job.leftovers() == {}
    assert "the script has ended on rank 1 after step 3" in job.said("h2")
    assert [note["step"] for note in job.diary(0, "h1")] == list(range(1, 31)), "the other one goes on"


LOST = {"the etcd alone": False, "the host that it is on": True}


@pytest.mark.guarantee(
    "Several hosts",
    "A run that loses etcd for good resumes from the last commit, marked unconfirmed, with the bits of a "
    "failure-free run.",
)
@pytest.mark.soak
@pytest.mark.parametrize("with_its_host", LOST.values(), ids=LOST.keys())
def test_run_resumes_from_the_last_commit_after_permanent_loss_of_etcd(
    tmp_path: Path, with_its_host: bool
) -> None:
    """A single member, on the first of three hosts, that no agent owns; the hosts share no directory."""
    words = [
        *small_world(tmp_path / "world"),
        "accum=2",
        "reduction=reproducible",
        "lr=0.1",
        "warmup_steps=1000",
    ]
    hosts = ["--nnodes", "3", "--rdzv-endpoint", "h1", "--rdzv-id", "j", "--rdzv-patience", "4"]
    left = ("h2", "h3")
    with Lab(hosts=3, shared=[tmp_path]) as lab:
        server = etcd_on(lab, "h1")
        job = LabJob(lab, tmp_path, ["train", *hosts, *words, "steps=100000", "pace=0.05"])
        job.start()
        job.wait(lambda: len(read(job.run_dir("h2") / "steps.jsonl").whole) > 3, "no step")
        if with_its_host:
            lab["h1"].power_cut()
        else:
            server.kill()
            job.wait(lambda: server.poll() is not None)
        assert job.codes(*left) == dict.fromkeys(left, 1), job.picture()
        for host in left:
            assert "for 4 s (--rdzv-patience)" in job.said(host)
            assert "with a state that was saved in an emergency" in job.said(host)
        job.codes()
        own = {
            host: [line for line in lines if "recover-etcd" not in line]
            for host, lines in job.leftovers().items()
        }
        assert not any(own.values()), "what is left is of the etcd that was there before, and was killed"
        found = {host: directory.latest(job.run_dir(host)) for host in left}
    steps = [one.step for one in found.values() if one is not None and not one.is_confirmed]
    assert len(steps) == 2
    assert max(steps) - min(steps) <= 1, "one may have read a decision that another has not"
    assert sorted(steps) == sorted(len(read(job.run_dir(host) / "steps.jsonl").whole) for host in left)
    # On one host, as anywhere: the same bits as a run in which nothing was lost.
    last = next(host for host, one in found.items() if one is not None and one.step == max(steps))
    last_dir = job.run_dir(last)
    again = train(
        last_dir, f"steps={max(steps) + 3}", "replicas=2", "pace=0", "checkpoint.every=1", resume=last_dir
    )
    assert again.code == 0, again.output
    assert "no vote has compared it" in again.output
    calm = train(tmp_path / "calm", *words, "replicas=1", "accum=6", f"steps={max(steps) + 3}")
    assert calm.code == 0, calm.output
    run = Trained(0, "", last_dir)
    assert [line["loss"] for line in run.steps] == [line["loss"] for line in calm.steps]
    assert run.summary["parameters_digest"] == calm.summary["parameters_digest"]
    assert directory.unconfirmed(last_dir) == [], "what comes after it was compared"
