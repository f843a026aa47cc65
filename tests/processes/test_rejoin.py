"""Lost replicas rejoin, in their places or on slots that others left, and the bits are those of a calm run."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lab_jobs import LabJob, strike
from launching import OWN_STEP, Job
from patience import PATIENCE, wait_until
from rank_pids import ranks_of_run
from recover_lab.lab.hosts import Lab
from training import Trained, check_lines, finish, joins, losses, small_world, start, train

from recover.job.spec import JobSpec
from recover.launch.hosts.host_ranks import HostRanks
from recover.launch.hosts.placement import Seat
from recover.launch.hosts.replica_restarts import RestartedReplica
from recover.launch.hosts.slots import SETTLE, HostSlots
from recover.launch.session import Session
from recover.launch.supervisor import Supervisor
from recover.launch.verdict import write_marker
from recover.runs.records.job_log import job_lines
from recover.runs.records.json_lines import read

LR = ["lr=0.1", "warmup_steps=1000"]  # neither depends on how many steps there will be nor diverges in them
HSDP = ["parallel=hsdp", "shard=2", "microbatch_size=2"]


def replicas(run_dir: Path) -> int:
    path = run_dir / "steps.jsonl"
    lines = read(path).whole if path.exists() else []
    return lines[-1]["replicas"] if lines else 0


def wait(condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    assert wait_until(condition, seconds), what


def kill(run_dir: Path, rank: int) -> None:
    os.kill(ranks_of_run(run_dir)[rank][0], signal.SIGKILL)


def check_against_calm(run: Trained, calm_dir: Path, words: list[str], batch: int) -> None:
    """A run of one replica with the same B and as many steps has the same samples, and the same bits."""
    steps = len(run.steps)
    calm = train(calm_dir, *words, "replicas=1", f"accum={batch}", f"steps={steps}", limit=PATIENCE + steps)
    assert calm.code == 0, calm.output
    check_lines(run, steps, batch)
    for name in ("data_digest", "contents", "parameters_before", "loss", "lr"):
        assert [line[name] for line in run.steps] == [line[name] for line in calm.steps], name
    assert run.summary["parameters_digest"] == calm.summary["parameters_digest"]


@pytest.mark.guarantee("The batch", "Every step commits exactly B microbatches with the `gloo` carrier.")
@pytest.mark.guarantee(
    "Rejoining replicas",
    "A lost replica rejoins with `--return` and the bits of a failure-free run, and a slot that kills twice "
    "is named and not used again.",
)
@pytest.mark.parametrize(
    ("kind", "bits", "join"),
    [
        ("ddp", 64, "pause"),
        pytest.param("hsdp", 64, "pause", marks=pytest.mark.soak),
        pytest.param("ddp", 32, "pause", marks=pytest.mark.soak),
        pytest.param("hsdp", 32, "pause", marks=pytest.mark.soak),
        pytest.param("ddp", 64, "instalments", marks=pytest.mark.soak),
        pytest.param("hsdp", 32, "instalments", marks=pytest.mark.soak),
    ],
)
def test_rejoined_replica_leaves_failure_free_bits_and_a_bad_slot_is_named(
    tmp_path: Path, kind: str, bits: int, join: str
) -> None:
    """During a join in instalments checkpoints are made: agreements and sums between the steps of the join."""
    size = {"ddp": 1, "hsdp": 2}[kind]
    inside = [f"reduction_bits={bits}", *([] if size == 1 else HSDP)]
    words = [*small_world(tmp_path / "world"), *inside, *LR, "reduction=reproducible"]
    words += ["join=instalments", "checkpoint.every=3"] if join == "instalments" else []
    run_dir = tmp_path / "run"
    many = ["replicas=3", "accum=2", "steps=100000", "pace=0.05", "--return", "--return-delay=0"]
    process = start(run_dir, *words, *many)
    wait(lambda: replicas(run_dir) == 3, "no step")
    kill(run_dir, size)
    wait(lambda: joins(run_dir) == 1, "nobody comes back")
    kill(run_dir, 3 * size)
    wait(lambda: losses(run_dir) == 2, "the one that came back is not missed")
    time.sleep(1.0)  # in which a third attempt must not happen
    process.send_signal(signal.SIGTERM)
    run = finish(process, run_dir)
    assert run.code == 0, run.output
    assert [line.get("kind", "lost") for line in run.incidents] == ["lost", "joined", "lost"]
    joined = run.incidents[1]
    assert joined["joined_ranks"] == list(range(3 * size, 4 * size))
    assert joined["transfer_bytes"] > 0
    slot = 1 if size == 1 else 2
    assert f"slot {slot} of " in run.output
    assert "2 ranks have died there (killed by SIGKILL; killed by SIGKILL)" in run.output
    assert not (run_dir / "ranks" / f"{4 * size}.log").exists()
    seats = json.loads((run_dir / "hosts.json").read_text())["ranks"]
    assert seats[str(3 * size)]["slot"] == slot
    check_against_calm(run, tmp_path / "calm", words, 6)


LARGE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2}  # tens of instalments


@pytest.mark.guarantee(
    "Faults, hangs and stragglers",
    "A rank that joins in instalments never ends the last replica that holds the state, if that is stopped.",
)
@pytest.mark.soak
def test_last_member_is_stopped_while_a_replica_joins_in_instalments(tmp_path: Path) -> None:
    """The member is stopped for several times the hang limit. Neither the joining rank nor the launcher ends it; it
    goes on, and the joined replica has the bits of a calm run."""
    words = [*small_world(tmp_path / "world", **LARGE), *LR, "reduction=reproducible", "join=instalments"]
    run_dir = tmp_path / "run"
    many = ["replicas=2", "accum=1", "steps=100000", "pace=0.05", "hang_limit=2", "--return"]
    process = start(run_dir, *words, *many, "--return-delay=0")
    wait(lambda: replicas(run_dir) == 2, "no step")
    kill(run_dir, 0)
    wait(lambda: is_joining(run_dir), "no replica joins")
    strike(ranks_of_run(run_dir)[1][0], signal.SIGSTOP)
    assert is_joining(run_dir), "the replica has joined already"
    time.sleep(8.0)  # in which the stopped rank must not be ended
    strike(ranks_of_run(run_dir)[1][0], signal.SIGCONT)
    wait(lambda: joins(run_dir) == 1, "it does not join")
    process.send_signal(signal.SIGTERM)
    run = finish(process, run_dir)
    assert run.code == 0, run.output
    assert [line["dead_ranks"] for line in run.incidents] == [[0], []]
    assert run.incidents[1]["joining_steps"] > 3
    check_against_calm(run, tmp_path / "calm", words, 2)


def is_joining(run_dir: Path) -> bool:
    """Whether the record of the last step names a joining replica."""
    return bool(read(run_dir / "steps.jsonl").whole[-1].get("joining"))


WARMING_UP = """
import os, sys, time, recover
from pathlib import Path
from typing import Any
world = recover.init()
here = Path(os.environ["RECOVER_RUN_DIR"])
if world.outside:
    if world.rank == 3:
        raise ValueError("not the right GPU")
    (here / "warm").touch()
    time.sleep(1000)
if world.rank == 1:
    os.kill(os.getpid(), 9)
while world.agree(1) is None:
    world.repair()
while world.agree((here / "warm").exists()) != 1:
    time.sleep(0.01)
"""


@pytest.mark.guarantee(
    "Rejoining replicas",
    "A joining replica that raises or is not ready at the end costs the others nothing, not even the exit "
    "code.",
)
@pytest.mark.soak
def test_joining_replica_that_is_never_ready_costs_no_other(tmp_path: Path) -> None:
    """The first replica that is to join raises, the second one is not ready when the job ends."""
    job = Job(tmp_path, WARMING_UP, "-n", "3", "--return", "--return-delay", "0", "--forgive", "0")
    job.stdout, job.stderr = job.process.communicate(timeout=2 * PATIENCE)
    assert job.process.returncode == 0, job.stderr
    assert "rank 3 ended before it had joined: raised: ValueError: not the right GPU" in job.stderr
    assert "rank 4 is ended before it has joined: the job has come to its end" in job.stderr
    assert "done on ranks 0, 2; lost: rank 1 killed (logs" in job.stderr
    assert 4 not in ranks_of_run(job.run_dir)


@pytest.mark.guarantee(
    "Rejoining replicas", "A joining replica that is not ready in time returns its slot and strikes it."
)
def test_joining_replica_that_is_never_ready_returns_and_strikes_its_slot(tmp_path: Path) -> None:
    script, run_dir = tmp_path / "script.py", tmp_path / "run"
    script.write_text("import time\ntime.sleep(1000)\n")
    (run_dir / "ranks").mkdir(parents=True)
    slots, told = HostSlots(2, delay=0.0, forgive=600.0), list[tuple[int, str | None, str]]()
    with Session() as session:
        spec = JobSpec(1, run_dir=str(run_dir), session=str(session.directory), host="here", room=9)
        ranks = HostRanks(spec, {}, slots, 2, session, [str(script)], lambda *end: told.append(end))
        ranks.start()
        for rank in (1, 2):
            ranks.start_joining_ranks(RestartedReplica((rank,), (Seat("here", 1),)), across=False)
            for asked, limit in (([rank], 0.0), ([], 600.0), ([], 0.0)):
                ended = (run_dir / "ranks" / f"{rank}.end").exists()
                assert not ended, "it has been ready, or has time"
                ranks.end_ranks_not_ready(asked, limit)
            wait(lambda: ranks.reap() or not ranks.running, "it is not ended")
            rested = time.monotonic() + SETTLE
            assert slots.free(rested) == ([0, 1] if rank == 1 else [0]), "two strikes are enough"
        assert [end[:2] for end in told] == [(1, None), (2, None)]
    marker = json.loads((run_dir / "ranks" / "1.end").read_text())
    assert marker["end"] == "fenced"
    assert "it was not ready to join after 0 s (--warm-up)" in marker["detail"]


def test_exit_markers_of_ended_ranks_are_read_once(tmp_path: Path) -> None:
    """After weeks thousands of ranks have ended, and their agent looks twice a second."""
    run_dir, done = tmp_path / "run", {"end": "done", "detail": "", "time": ""}
    raised = {
        "end": "raised",
        "detail": "OSError: full",
        "kind": "OSError",
        "place": "a.py:1",
        "ordinary": False,
    }
    (run_dir / "ranks").mkdir(parents=True)
    (run_dir / "ranks" / "4.stack").write_text("Fatal Python error: Segmentation fault")
    with Session() as session:
        spec = JobSpec(3, run_dir=str(run_dir), session=str(session.directory), host="here", room=9)
        ranks = HostRanks(spec, {}, HostSlots(2, 0.0, 600.0), 2, session, [], lambda *_: None)
        nothing: Any = None
        supervisor = Supervisor(spec, ranks, session, nothing, [])
        supervisor.take_over({2: json.dumps(raised), 3: "", 4: ""})
        first = supervisor.verdict()
        assert (first.silent, first.crashed, list(first.raised)) == ([0, 1, 3, 4], [4], [2])
        for path in (run_dir / "ranks").iterdir():
            path.unlink()  # a second read of them would fail to find them
        supervisor.take_over({2: json.dumps(raised), 3: "", 4: ""})
        assert not list((run_dir / "ranks").iterdir())
        write_marker(run_dir, 1, done)
        second = supervisor.verdict()
    assert (second.raised, second.crashed) == (first.raised, first.crashed)
    assert (second.done, second.silent) == ([1], [0, 3, 4])
    assert second.losses() == "ranks 0, 3 killed; rank 2 raised: OSError: full; rank 4 crashed"


OWN = f"""{OWN_STEP}
while 3 not in world.members or world.outside:
    for batch in step.microbatches(Data()):
        if world.rank == 1 and step.index == 1:
            os.kill(os.getpid(), 9)
        step.backward(model(batch).sum())
    time.sleep(0.02)
print("step", step.index, "of", world.members)
"""


@pytest.mark.guarantee(
    "Rejoining replicas",
    "A rejoined replica of a user's own script is labelled, recorded and its end witnessed.",
)
@pytest.mark.soak
def test_own_script_replica_rejoins_labelled_and_recorded(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path, OWN, "-n", "3", "--return", "--return-delay", "0")
    assert job.finish() == 0, job.stderr
    steps, incidents = (read(job.run_dir / f"{name}.jsonl").whole for name in ("steps", "incidents"))
    last = len(steps)
    assert [line["step"] for line in steps] == list(range(1, last + 1))
    assert {line["microbatches"] for line in steps} == {6}
    assert sorted(job.stdout.splitlines()) == [f"step {last} of (0, 2, 3)"] * 3
    assert job.rank_file("3.out").read_text() == f"step {last} of (0, 2, 3)\n"
    assert [line.get("kind", "lost") for line in incidents] == ["lost", "joined"]
    for words in ("lost rank 1: killed", "step 2: lost replica 1", "rank 3 is started on slot 1 of "):
        assert f"recover: {words}" in job.stderr
    ends = {line["rank"]: line for line in job_lines(job.run_dir) if line["what"] == "exit"}
    assert ends.keys() == {0, 1, 2, 3}
    assert ends[1]["step"] == 2, "what it was doing"
    assert ends[3]["words"]["end"] == "done"


TWO_STEPS = """
import os
import torch
import recover

class Data:
    def __init__(self, shift): self.shift = shift
    def __len__(self): return 10**6
    def __getitem__(self, i): return torch.ones(1, 2) * ((i + self.shift) % 5)

def make():
    model = torch.nn.Linear(2, 1)
    return model, recover.Step(world, model, torch.optim.SGD(model.parameters(), lr=0.01), global_batch=6)

world = recover.init()
torch.manual_seed(1)
pairs = [make(), make()]
rounds = 0  # since a replica has asked to join
while True:
    rounds += bool(rounds or world.asking)
    for number, (model, step) in enumerate(pairs):
        for batch in step.microbatches(Data(number)):
            if world.rank == 1 and step.index == 1:
                os.kill(os.getpid(), 9)
            step.backward(((model(batch) - number) ** 2).sum())
        if rounds > 5:
            step.request_stop()
    if pairs[1][1].stop_agreed:
        break
print("of", world.members)
"""


@pytest.mark.guarantee("Joining", "A script with several `recover.Step` objects admits no replica.")
@pytest.mark.soak
def test_join_is_refused_in_a_script_with_two_steps(
    tmp_path: Path,
) -> None:
    """Both Steps have the same shape: the state of one would fit into the other."""
    job = Job(tmp_path, TWO_STEPS, "-n", "3", "--return", "--return-delay", "0")
    job.stdout, job.stderr = job.process.communicate(timeout=2 * PATIENCE)
    assert job.process.returncode == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == ["[rank 0] of (0, 2)", "[rank 2] of (0, 2)"]
    assert "rank 3 is ended before it has joined: the job has come to its end" in job.stderr


@pytest.mark.guarantee(
    "Rejoining replicas",
    "Ranks left of two broken replicas form one replica, and a host that arrives later is used.",
)
@pytest.mark.soak
@pytest.mark.usefixtures("a_lab_can_be_made_here")
def test_ranks_left_of_two_replicas_become_one_and_a_late_host_adds_one(
    tmp_path: Path,
) -> None:
    """Three replicas of two ranks on three hosts. One rank of each of two replicas dies as if its hardware were broken;
    then a fourth host arrives; it loses its power, and rejoins."""
    words = [*small_world(tmp_path / "world"), *LR, *HSDP, "reduction=reproducible"]
    with Lab(hosts=4, shared=[tmp_path]) as lab:
        hosts = ["--nnodes", "3:4", "--nproc-per-node", "2", "--rdzv-endpoint", "h1:2379", "--rdzv-id", "j"]
        more = ["--lease", "4", "--return", "--return-delay", "0"]
        batch = ["accum=2", "steps=100000", "pace=0.05"]
        job = LabJob(lab, tmp_path, ["train", *hosts, *more, *words, *batch], shared=True)
        run_dir = job.run_dir("h1")
        job.start("h1", "h2", "h3")
        job.wait(lambda: replicas(run_dir) == 3, "no step")
        for host, rank in (("h2", 2), ("h3", 4)):
            strike(job.ranks(host)[rank], signal.SIGBUS)
        job.wait(lambda: replicas(run_dir) == 1, "nobody is missed")
        job.wait(lambda: replicas(run_dir) == 2, "what is left does not become a replica")
        assert job.ranks("h2").keys() == {6}
        assert job.ranks("h3").keys() == {7}
        job.start("h4")
        job.wait(lambda: replicas(run_dir) == 3, "the job does not grow")
        assert job.ranks("h4").keys() == {8, 9}
        lab["h4"].power_cut()
        job.wait(lambda: replicas(run_dir) == 2, "h4 is not missed")
        lab["h4"].power_on()
        job.start("h4")
        job.wait(lambda: replicas(run_dir) == 3, "h4 does not come back")
        job.agents["h1"].send_signal(signal.SIGTERM)
        assert job.codes() == dict.fromkeys(job.agents, 0), job.picture()
        assert job.leftovers() == {}
    assert "slot 0 of h2 is set aside: its rank died as of broken hardware" in job.said("h2")
    run = Trained(0, job.picture(), run_dir)
    assert [line["joined_ranks"] for line in run.incidents if line.get("kind") == "joined"] == [
        [6, 7],
        [8, 9],
        [10, 11],
    ]
    seats = json.loads((run_dir / "hosts.json").read_text())["ranks"]
    assert [seats[str(rank)]["host"] for rank in range(6, 12)] == ["h2", "h3", "h4", "h4", "h4", "h4"]
    check_against_calm(run, tmp_path / "calm", words, 8)
