"""Links that break between members while all of them live and can still agree."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from causes_told import why
from lab_jobs import LabJob
from launching import Job
from recover_lab.chaos.lab_strikes import members_on
from recover_lab.lab.hosts import Lab
from training import small_world

from recover.faults import lab_requests
from recover.runs.records.json_lines import read

SCRIPT = """
import time, torch, recover
from recover.world.carriers.contract import CarrierError

SLOW, CUT, STEPS = 2, 4, 5
world = recover.init()
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
step = recover.Step(world, model, torch.optim.SGD(model.parameters(), lr=0.1), 6)
cross, wire, slept = world.cross, world.cross._carrier, []


def lost(source, out):
    while cross.error is None:  # as over a link that is cut: nothing comes, and nothing goes
        time.sleep(0.01)
    raise CarrierError("freed")


def data(index):
    if step.index + 1 == SLOW and world.rank and not slept:
        slept.append(True)
        time.sleep(3)  # most ranks are slow, for longer than the link timeout
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(index))


while step.index < STEPS:
    if step.index + 1 == CUT and world.rank == 1:
        wire.sum = lost
    for index in step.microbatches(range(10**6)):
        step.backward(model(data(index)).square().mean())
    print("step", step.index, "epoch", world.epoch, "replicas", *world.replicas, flush=True)
"""


@pytest.mark.guarantee(
    "Several hosts",
    "All members abort a reduction in which all wait and nothing travels for the link timeout, and never "
    "for a slow rank.",
)
@pytest.mark.parametrize("carrier", ["mpi", pytest.param("gloo", marks=pytest.mark.soak)])
def test_reduction_over_a_cut_link_is_aborted_and_slow_ranks_are_not(tmp_path: Path, carrier: str) -> None:
    job = Job(tmp_path, SCRIPT, "-n", "3", "--carrier", carrier, "--link-timeout", "2", "--timeout", "300")
    job.process.wait(400)
    assert job.finish() == 0, job.stderr
    seen = set(job.stdout.splitlines())
    assert seen == {f"step {step} epoch {1 + (step >= 4)} replicas 0 1 2" for step in range(1, 6)}, job.stdout
    logs = [(job.run_dir / "ranks" / f"{rank}.log").read_text() for rank in range(3)]
    told = [log for log in logs if "gave up a reduction: no byte has travelled between ranks 0, 1, 2" in log]
    assert told, logs  # the first rank frees the others, which may not have noticed by themselves


class CutJob(LabJob):
    """Training on hosts h1, h2, ... on an etcd of three members."""

    def __init__(self, lab: Lab, place: Path, slots: int, *options: str) -> None:
        words = ["--nnodes", str(len(lab)), "--nproc-per-node", str(slots), "--rdzv-id", "j", "--page", "off"]
        words += ["--rdzv-endpoint", "h1:2379,h2:2379,h3:2379"]
        keys = ["accum=2", "steps=100000", "link_timeout=5", "pace=0.05"]
        super().__init__(lab, place, ["train", *words, *options, *small_world(place / "world"), *keys])

    def last(self, host: str) -> dict[str, int]:
        lines = read(self.run_dir(host) / "steps.jsonl").whole
        return lines[-1] if lines else {"step": 0, "replicas": 0}

    def lost(self, host: str) -> dict[str, list[int]]:
        """Ranks that were lost until now, and those of them that were evicted."""
        lines = read(self.run_dir(host) / "incidents.jsonl").whole
        return {
            "lost": sorted(rank for line in lines for rank in line["dead_ranks"]),
            "evicted": sorted(int(rank) for line in lines for rank in line.get("evicted", ())),
        }

    def wait_for_steps(self, *hosts: str) -> None:
        """Wait for a few more steps on each of these hosts."""
        step = self.last(hosts[0])["step"]
        self.wait(lambda: min(self.last(host)["step"] for host in hosts) > step + 5, "no step", 300)

    def cut(self, one: int, other: int, both: bool = True) -> None:
        """Frames between these two hosts are lost, or those from the first to the second; all other links stay."""
        self.lab[f"h{one}"].cut_link(self.lab[f"h{other}"])
        if both:
            self.lab[f"h{other}"].cut_link(self.lab[f"h{one}"])

    def heal(self, one: int, other: int, both: bool = True) -> None:
        self.lab[f"h{one}"].heal_link(self.lab[f"h{other}"])
        if both:
            self.lab[f"h{other}"].heal_link(self.lab[f"h{one}"])


@pytest.mark.guarantee(
    "Several hosts",
    "Hosts that cannot reach each other, while etcd is reachable, cost the fewest replicas, and the others go on.",
)
@pytest.mark.usefixtures("a_lab_can_be_made_here")
@pytest.mark.soak
@pytest.mark.parametrize("both", [True, False], ids=["both ways", "one way"])
def test_hosts_evict_one_of_two_that_cannot_reach_each_other(tmp_path: Path, both: bool) -> None:
    """When the link has healed, the evicted replica joins again."""
    with Lab(hosts=3, shared=[tmp_path]) as lab:
        job = CutJob(lab, tmp_path, 1, "--return", "--return-delay", "0")
        job.start()
        job.wait(lambda: job.last("h3")["step"] > 3, "no step", 300)
        job.cut(1, 2, both)
        job.wait(lambda: job.last("h3")["replicas"] == 2, "nobody was left out", 300)
        step = job.last("h3")["step"]
        job.wait(lambda: min(job.last(host)["step"] for host in ("h1", "h3")) > step + 5, "no step", 300)
        (lost,) = (line for line in read(job.run_dir("h3") / "incidents.jsonl").whole if line["dead_ranks"])
        assert lost["evicted"] == {
            "1": "its link is broken to rank 0; the others reach each other without it"
        }
        (told,) = (one for one in why(job.run_dir("h2")) if one["first"])
        assert told["first"][0]["cause"] == "link", told
        assert "look at the network" in told["first"][0]["advice"]
        job.heal(1, 2, both)
        job.wait(lambda: job.last("h3")["replicas"] == 3, "it does not join again", 300)
        for agent in job.agents.values():
            agent.kill()


@pytest.mark.guarantee(
    "Several hosts",
    "Hosts that cannot reach each other, while etcd is reachable, cost the fewest replicas, and the others go on.",
)
@pytest.mark.usefixtures("a_lab_can_be_made_here")
@pytest.mark.soak
@pytest.mark.parametrize("at_start", [False, True], ids=["while it trains", "at the start"])
def test_links_broken_between_hosts_cost_the_replicas_of_one_host(tmp_path: Path, at_start: bool) -> None:
    """Two replicas on each of three hosts: no single replica is an end of all links between the first two."""
    with Lab(hosts=3, shared=[tmp_path]) as lab:
        job = CutJob(lab, tmp_path, 2)
        if at_start:
            job.cut(1, 2)
        job.start()
        if not at_start:
            job.wait(lambda: job.last("h3")["replicas"] == 6, "no step", 300)
            job.cut(1, 2)
        job.wait(lambda: job.last("h3")["replicas"] == 4, "nobody was left out", 300)
        step = job.last("h3")["step"]
        job.wait(lambda: min(job.last(host)["step"] for host in ("h1", "h3")) > step + 5, "no step", 300)
        dead = {
            rank for line in read(job.run_dir("h3") / "incidents.jsonl").whole for rank in line["dead_ranks"]
        }
        assert dead == {2, 3}
        for agent in job.agents.values():
            agent.kill()


@pytest.mark.guarantee(
    "Several hosts",
    "A link that breaks while a death is repaired costs the fewest replicas besides the dead one.",
)
@pytest.mark.usefixtures("a_lab_can_be_made_here")
@pytest.mark.soak
@pytest.mark.parametrize("phase", ["members", "census", "carrier", "closing"])
def test_link_that_breaks_in_a_repair_costs_the_replicas_of_one_host(tmp_path: Path, phase: str) -> None:
    requests, faults = tmp_path / "requests", tmp_path / "faults.yaml"
    requests.mkdir()
    faults.write_text(
        "- {step: 4, replica: 5, location: in-reduce}\n"
        f"- {{step: 4, replica: 0, location: 'repair:{phase}', action: 'lab:link'}}\n"
    )
    with Lab(hosts=3, shared=[tmp_path]) as lab:
        job = CutJob(lab, tmp_path, 2, f"faults={faults}")
        job.start(environment={lab_requests.VARIABLE: str(requests)})
        job.wait(lambda: lab_requests.asked_for(requests), "no repair", 300)
        job.cut(1, 2)
        lab_requests.is_done(requests, *lab_requests.asked_for(requests))
        job.wait(lambda: job.last("h3")["replicas"] == 3, "nobody was left out", 300)
        job.wait_for_steps("h1", "h3")
        assert job.lost("h3") == {"lost": [2, 3, 5], "evicted": [2, 3]}
        for agent in job.agents.values():
            agent.kill()


@pytest.mark.guarantee(
    "Several hosts", "Two ranks of one replica that cannot reach each other cost this replica."
)
@pytest.mark.usefixtures("a_lab_can_be_made_here")
@pytest.mark.soak
def test_link_inside_a_replica_costs_this_replica(tmp_path: Path) -> None:
    """HSDP: replica 0 on h1 and h2, replica 1 on h3 and h4."""
    with Lab(hosts=4, shared=[tmp_path]) as lab:
        job = CutJob(lab, tmp_path, 1, "parallel=hsdp", "shard=2", "microbatch_size=2")
        job.start()
        job.wait(lambda: job.last("h4")["replicas"] == 2, "no step", 300)
        job.cut(1, 2)
        job.wait(lambda: job.last("h4")["replicas"] == 1, "nobody was left out", 300)
        job.wait_for_steps("h3", "h4")
        assert job.lost("h4")["lost"] == [0, 1]
        (told,) = (one for one in why(job.run_dir("h1")) if one["first"])
        assert told["first"][0]["cause"] == "link", told
        for agent in job.agents.values():
            agent.kill()


@pytest.mark.guarantee(
    "Several hosts", "A link that breaks while no etcd answers costs the fewest replicas once etcd answers."
)
@pytest.mark.usefixtures("a_lab_can_be_made_here")
@pytest.mark.soak
def test_link_that_breaks_while_etcd_does_not_answer_costs_the_replicas_of_one_host(tmp_path: Path) -> None:
    with Lab(hosts=3, shared=[tmp_path]) as lab:
        job = CutJob(lab, tmp_path, 2)
        job.start()
        job.wait(lambda: job.last("h3")["replicas"] == 6, "no step", 300)
        members = [pid for host in lab for pid in members_on(host)]
        for pid in members:
            os.kill(pid, signal.SIGSTOP)
        job.cut(1, 2)
        time.sleep(8)  # longer than leases
        for pid in members:
            os.kill(pid, signal.SIGCONT)
        job.wait(lambda: job.last("h3")["replicas"] == 4, "nobody was left out", 300)
        job.wait_for_steps("h1", "h3")
        assert job.lost("h3") == {"lost": [2, 3], "evicted": [2, 3]}
        for agent in job.agents.values():
            agent.kill()
