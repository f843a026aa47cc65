"""Jobs on several hosts that regain what they have lost, or grow beyond it, with the bits of a calm run."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from lab_jobs import LabJob, strike
from recover_lab.lab.hosts import Lab
from test_rejoin import LR, check_against_calm, replicas
from training import CAN_BE_CUT, Trained, small_world

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("a_lab_can_be_made_here")]
TWELVE = 240.0  # seconds for twelve ranks to start, or some of them next to the others, on a few busy cores
GRID = ["parallel=3d", "tp=2", "pp=2", "microbatch_size=2"]


def a_job(
    lab: Lab, place: Path, words: list[str], nnodes: str, slots: int, batch: list[str], shared: bool
) -> LabJob:
    hosts = ["--nnodes", nnodes, "--nproc-per-node", str(slots), "--rdzv-endpoint", "h1", "--rdzv-id", "j"]
    more = ["--lease", "4", "--return", "--return-delay", "0", "steps=100000", "pace=0.05"]
    return LabJob(lab, place, ["train", *hosts, *more, *words, *batch], shared)


def ended(job: LabJob) -> Trained:
    """Stop the job. Returns the run as the first host recorded it."""
    job.agents["h1"].send_signal(signal.SIGTERM)
    assert job.codes() == dict.fromkeys(job.agents, 0), job.picture()
    assert job.leftovers() == {}
    return Trained(0, job.picture(), job.run_dir("h1"))


@pytest.mark.guarantee(
    "Rejoining replicas",
    "A job with `--nnodes N:M` grows when another host arrives, with or without a shared run directory.",
)
@pytest.mark.parametrize("shared", [True, False])
def test_job_grows_when_an_additional_host_arrives(tmp_path: Path, shared: bool) -> None:
    """`--nnodes 2:3`: no rank is lost. B stays, and so do the bits."""
    words = [*small_world(tmp_path / "world"), *LR, "reduction=reproducible"]
    with Lab(hosts=3, shared=[tmp_path]) as lab:
        job = a_job(lab, tmp_path, words, "2:3", 1, ["accum=2"], shared)
        job.start("h1", "h2")
        run_dir = job.run_dir("h1")
        job.wait(lambda: replicas(run_dir) == 2, "no step")
        job.start("h3")
        job.wait(lambda: replicas(run_dir) == 3, "the job does not grow")
        assert job.ranks("h3").keys() == {2}
        run = ended(job)
    (joined,) = run.incidents
    assert (joined["kind"], joined["joined_ranks"], joined["dead_ranks"]) == ("joined", [2], [])
    assert run.summary["failures"] == 0
    assert "job j is at work, on h1, h2; this host brings free slots" in job.said("h3")
    check_against_calm(run, tmp_path / "calm", words, 6)


@pytest.mark.guarantee(
    "Rejoining replicas", "Ranks left of two replicas of 2 x 2 ranks form one replica without a new machine."
)
def test_ranks_left_of_two_grid_replicas_form_a_replica_again(tmp_path: Path) -> None:
    """Three replicas of 2 x 2 ranks, each on a host of its own. In two of them a rank dies as if its hardware were
    broken."""
    size, words = 4, [*small_world(tmp_path / "world", **CAN_BE_CUT), *GRID, *LR, "reduction=reproducible"]
    with Lab(hosts=3, shared=[tmp_path]) as lab:
        job = a_job(lab, tmp_path, words, "3", size, ["accum=2"], shared=True)
        job.start()
        run_dir = job.run_dir("h1")
        job.wait(lambda: replicas(run_dir) == 3, "no step", TWELVE)
        for host, rank in (("h2", size), ("h3", 3 * size - 1)):
            strike(job.ranks(host)[rank], signal.SIGBUS)
        job.wait(lambda: replicas(run_dir) == 1, "nobody is missed")
        job.wait(lambda: replicas(run_dir) == 2, "what is left does not become a replica", TWELVE)
        living = [job.ranks(host).keys() for host in ("h1", "h2", "h3")]
        run = ended(job)
    assert living[0] == set(range(size))
    assert living[1] | living[2] == set(range(3 * size, 4 * size)), "of the places that are good still"
    assert all(living)
    assert [line["joined_replicas"] for line in run.incidents if line.get("kind") == "joined"] == [[3]]
    seats = json.loads((run_dir / "hosts.json").read_text())["ranks"]
    assert {seats[str(rank)]["host"] for rank in range(3 * size, 4 * size)} == {"h2", "h3"}
    for host, slot in (("h2", 0), ("h3", size - 1)):
        assert f"slot {slot} of {host} is set aside: its rank died as of broken hardware" in job.said(host)
    check_against_calm(run, tmp_path / "calm", words, 6)
