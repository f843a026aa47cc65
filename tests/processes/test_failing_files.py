"""Real jobs on disks that fail: no rank is lost for a record, and no record while there is room later."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from lab_jobs import LabJob, etcd_on
from launching import OWN_STEP, Job
from left_out import leave_out
from recover_lab.lab.hosts import Lab
from training import small_world

from recover.runs.records.json_lines import read

PROGRAMS = Path(__file__).parents[1] / "programs"
OPERATIONS = ("append", "replace", "read", "read_end", "truncate", "remove", "modified", "open_to_append")
ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.ENOENT)

# The disk fails from step 5 on; replica 1 dies after that, and the job ends when another has joined in its place.
LOSS = f"""{OWN_STEP}
def fails():
    if os.environ.get("TEST_DISK_FAILS"):
        open(trigger, "w").close()
        return
    with open(trigger, "wb", buffering=0) as file:
        try:
            while True: file.write(bytes(4096))
        except OSError: pass
trigger = os.environ.get("TEST_DISK_FAILS", "").rpartition(":")[2]
trigger = trigger or os.path.join(os.environ["RECOVER_RUN_DIR"], "filler")
while step.index < 8 or max(world.replicas) < 3:
    for batch in step.microbatches(Data()):
        if step.index == 7 and world.rank == 1:
            os.kill(os.getpid(), 9)
        step.backward(model(batch).sum())
        time.sleep(0.05)  # there must be room for all lines of the steps that the newcomer takes to start
    if step.index == 5:
        step.on_first(fails)
step.on_first(os.remove, trigger)
"""


def check_records(run_dir: Path) -> None:
    """All steps, the loss, the replica that joined and the ends of all ranks are recorded."""
    steps = read(run_dir / "steps.jsonl").whole
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    assert {line["microbatches"] for line in steps} == {6}
    incidents = read(run_dir / "incidents.jsonl").whole
    assert [(line["dead_ranks"], line.get("joined_ranks")) for line in incidents] == [([1], None), ([], [3])]
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == len(steps)
    assert json.loads((run_dir / "hosts.json").read_text())["ranks"].keys() == {"0", "1", "2", "3"}
    ends = {rank: json.loads((run_dir / "ranks" / f"{rank}.end").read_text())["end"] for rank in (0, 2, 3)}
    assert set(ends.values()) == {"done"}


@pytest.mark.guarantee("The launcher", "A replica that dies on a full disk is replaced and recorded.")
@pytest.mark.soak  # below a run ends on a full disk, and here one goes on
def test_dead_replica_is_replaced_on_a_full_disk(tmp_path: Path) -> None:
    """On a small file system of its own, in a namespace of its own."""
    script, disk = tmp_path / "script.py", tmp_path / "disk"
    script.write_text(textwrap.dedent(LOSS))
    disk.mkdir()
    commands = f"""
        mount -t tmpfs -o size=16m tmpfs {disk} || exit 77
        {sys.executable} -P -m recover.cli run -n 3 --return --timeout 300 --page off --run-dir {disk}/run {script}
        code=$?
        cp -r {disk}/run {tmp_path}/kept
        exit $code
    """
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", textwrap.dedent(commands)], capture_output=True, text=True, timeout=600
    )
    if done.returncode == 77 or "unshare failed" in done.stderr:
        leave_out("mounts", f"no file system can be mounted (by root alone): {done.stderr}")
    assert done.returncode == 0, done.stderr
    assert "kept in memory until they can be written" in done.stderr, "there was room: the test shows nothing"
    check_records(tmp_path / "kept")


@pytest.mark.guarantee(
    "The launcher",
    "A run that ends on a full disk waits for space, its last checkpoint without limit, and names what was "
    "lost.",
)
def test_ending_run_waits_for_disk_space_and_loses_no_step(tmp_path: Path) -> None:
    """A run whose disk is full when it ends loses neither a record nor the last checkpoint."""
    disk, kept, output = tmp_path / "disk", tmp_path / "kept", tmp_path / "out"
    disk.mkdir()
    train = [sys.executable, "-P", "-m", "recover.cli", "train", *small_world(tmp_path / "world")]
    train += ["replicas=2", "accum=1", "steps=100000", "checkpoint.every=1000000", "pace=0.02"]
    program = [sys.executable, PROGRAMS / "full_disk.py", disk, kept, output, *train]
    done = subprocess.run(["unshare", "-m", *program], capture_output=True, text=True, timeout=900)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        leave_out("mounts", f"no file system can be mounted (by root alone): {done.stderr}")
    assert done.returncode == 0, done.stderr + output.read_text()
    (stopped,) = re.findall(r"stopped after step (\d+) as asked", output.read_text())
    steps = read(kept / "steps.jsonl").whole
    assert [line["step"] for line in steps] == list(range(1, int(stopped) + 1))
    assert (kept / "checkpoints" / f"step-{stopped}").exists()
    ends = {json.loads(path.read_text())["end"] for path in (kept / "ranks").glob("*.end")}
    assert ends == {"done"}


@pytest.mark.guarantee(
    "The launcher",
    "A failing file operation on a record, log, marker or placement file raises nothing, is reported once "
    "and repeated until it succeeds.",
)
@pytest.mark.soak
@pytest.mark.parametrize("number", ERRORS, ids=lambda number: errno.errorcode[number])
@pytest.mark.parametrize("operation", [*OPERATIONS, "all"])
def test_dead_replica_is_replaced_while_a_file_operation_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, number: int
) -> None:
    """The operation fails in every process of the job, until a replica has joined in place of the dead one."""
    monkeypatch.setenv("TEST_DISK_FAILS", f"{operation}:{number}:{tmp_path / 'fails'}")
    monkeypatch.setenv("PYTHONPATH", f"{PROGRAMS / 'failing_disk'}:{PROGRAMS.parents[1]}")
    job = Job(tmp_path, LOSS, "-n", "3", "--return", "--page", "off")
    assert job.finish(120) == 0, job.stderr
    check_records(job.run_dir)
    assert job.leftovers() == []


HOSTS = """
import os, time, torch, recover
torch.set_num_threads(1); torch.manual_seed(0)
class Stream:
    def __getitem__(s, i): return torch.randn(8, 4, generator=torch.Generator().manual_seed(i))
world = recover.init()
model = torch.nn.Linear(4, 1)
step = recover.Step(world, model, torch.optim.SGD(model.parameters(), lr=0.02), global_batch=6)
place = os.path.dirname(__file__)
while not step.stop_agreed:
    if os.path.exists(os.path.join(place, "end")):
        step.request_stop()
    for x in step.microbatches(Stream()):
        time.sleep(0.01)
        if world.rank == 1 and os.path.exists(os.path.join(place, "raise")):
            raise RuntimeError("as it was asked to")
        step.backward(((model(x) - x.sum(1, keepdim=True)) ** 2).mean())
"""

# In the agent of one host: once a file exists, `HostRanks.reap` raises in every call.
BREAKS = """
import os
from recover.launch.hosts import host_ranks
from recover.job.supervised import Supervised

Supervised.__init__.__defaults__ = (0.5,)
reap = host_ranks.HostRanks.reap

def failing(self):
    if os.path.exists(os.path.join(os.path.dirname(os.path.dirname(__file__)), "break")):
        raise KeyError("x")
    return reap(self)

host_ranks.HostRanks.reap = failing
"""


@pytest.fixture
def hosts(a_lab_can_be_made_here: None, tmp_path: Path) -> Any:
    (tmp_path / "own.py").write_text(HOSTS)
    return tmp_path


def last(job: LabJob, host: str = "h1") -> dict[str, Any]:
    return (read(job.run_dir(host) / "steps.jsonl").whole or [{"step": 0, "replicas": 0}])[-1]


def goes_on(job: LabJob, replicas: int, host: str = "h1") -> None:
    job.wait(lambda: last(job, host)["replicas"] == replicas, f"not {replicas} replicas")
    before = last(job, host)["step"]
    job.wait(lambda: last(job, host)["step"] > before + 5, "it stands still")


@pytest.mark.guarantee(
    "Several hosts",
    "A host with a failing disk survives deaths and fences, and a host whose agent fails is lost like any "
    "host.",
)
@pytest.mark.soak
def test_host_with_a_full_disk_survives_deaths_and_fences(hosts: Path) -> None:
    """The disk of a host is full, or its directory is moved away, while a rank of another host dies, and one of its own
    hangs."""
    with Lab(hosts=2, shared=[hosts]) as lab:
        etcd_on(lab, "h1")
        words = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-endpoint", "h1:2379", "--rdzv-id", "j"]
        words += ["--page", "off", "--hang-limit", "4"]
        job = LabJob(lab, hosts, ["run", *words, str(hosts / "own.py")])
        place = job.run_dir("h2")
        place.mkdir()
        mount = lab["h2"].start(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)])
        assert mount.wait() == 0
        job.start()
        goes_on(job, 4)
        lab["h2"].start(
            ["dd", "if=/dev/zero", f"of={place}/filler", "bs=4k"], stderr=subprocess.DEVNULL
        ).wait()
        (hosts / "raise").touch()
        goes_on(job, 3)
        os.kill(job.ranks("h2")[3], signal.SIGSTOP)
        goes_on(job, 2)
        assert list(job.ranks("h2")) == [2]
        lab["h2"].start(["rm", f"{place}/filler"]).wait()
        lab["h2"].start(["mv", f"{place}/ranks", f"{place}/elsewhere"]).wait()
        goes_on(job, 2)
        assert job.agents["h2"].poll() is None
        (hosts / "end").touch()
        assert job.codes() == {"h1": 0, "h2": 0}, job.picture()  # it was inside of a step
        assert "fenced" in job.said("h2")


@pytest.mark.guarantee(
    "Several hosts",
    "A host with a failing disk survives deaths and fences, and a host whose agent fails is lost like any "
    "host.",
)
@pytest.mark.soak
def test_agent_that_fails_ends_its_host_and_blocks_no_other(hosts: Path) -> None:
    """The part of the agent that notices the ends of its ranks raises in every call."""
    (hosts / "broken").mkdir()
    (hosts / "broken" / "sitecustomize.py").write_text(textwrap.dedent(BREAKS))
    with Lab(hosts=2, shared=[hosts]) as lab:
        etcd_on(lab, "h1")
        words = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", "h1:2379", "--rdzv-id", "j"]
        job = LabJob(lab, hosts, ["run", *words, "--page", "off", str(hosts / "own.py")])
        job.start("h1")
        job.start("h2", environment={"PYTHONPATH": f"{hosts / 'broken'}:{PROGRAMS.parents[1]}"})
        goes_on(job, 2)
        (hosts / "break").touch()
        goes_on(job, 1)
        assert job.codes("h2") == {"h2": 1}
        assert "the agent of host h2 has failed" in job.said("h2")
        assert "rank 1 on h2 lost" in job.said("h1")
        assert "has lost its lease" not in job.said("h1"), "it was missed, not declared"
        (hosts / "end").touch()
        assert job.codes("h1") == {"h1": 0}, job.picture()


@pytest.mark.guarantee(
    "On etcd",
    "Late and repeated requests of an agent change nothing: hosts, ranks, ends, slots, plans, torch's store "
    "and a successor of the same name.",
)
@pytest.mark.guarantee(
    "Several hosts",
    "A paused host that wakes next to its successor of the same name ends, and the successor keeps its "
    "ranks.",
)
@pytest.mark.soak
def test_paused_host_that_wakes_next_to_its_successor_ends(hosts: Path) -> None:
    """A paused host is declared lost, one of its name joins, then the first wakes: the successor keeps its ranks."""
    with Lab(hosts=3, shared=[hosts]) as lab:
        etcd_on(lab, "h1")
        words = ["--nnodes", "2:3", "--nproc-per-node", "1", "--rdzv-endpoint", "h1:2379", "--rdzv-id", "j"]
        words += ["--page", "off", "--return", str(hosts / "own.py")]
        job = LabJob(lab, hosts, ["run", *words])
        job.start()
        goes_on(job, 3)
        paused = list(lab["h3"].processes())
        for pid in paused:
            os.kill(pid, signal.SIGSTOP)
        goes_on(job, 2)
        (hosts / "second").mkdir()
        successor = LabJob(lab, hosts / "second", ["run", *words])
        successor.start("h3")
        goes_on(job, 3)
        for pid in paused:
            os.kill(pid, signal.SIGCONT)
        assert job.codes("h3") == {"h3": 1}
        assert "host h3 was declared lost, and the other hosts go on without it" in job.said("h3")
        goes_on(job, 3)
        assert successor.agents["h3"].poll() is None
        members = {line["replicas"] for line in read(job.run_dir("h1") / "steps.jsonl").whole[-10:]}
        assert members == {3}
        (hosts / "end").touch()
        assert job.codes("h1", "h2") == {"h1": 0, "h2": 0}, job.picture()
        assert successor.codes() == {"h3": 0}, successor.picture()
