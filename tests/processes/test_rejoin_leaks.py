"""A week in small: hundreds of deaths and rejoins, after which nothing has grown."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from joining_ranks import JoiningRanks
from test_rejoin import check_against_calm, replicas, wait
from test_rejoin_chaos import keys, living
from training import finish, small_world, start

from recover.runs.records.json_lines import read
from recover.world.fabrics.etcd.client import EtcdClient
from recover.world.fabrics.etcd.server import EtcdServer

DEATHS = int(os.environ.get("TEST_WEEK_DEATHS", "200"))
SETTLED = 0.1  # share of the deaths after which resources are first counted: nothing may grow from there
STEPS = 10 * DEATHS
QUIET = 6  # steps from being whole again to the next deaths: undisturbed steps, whose time is measured
SEED = 11
LR = ["lr=1", "warmup_steps=100000"]  # the same in each step, however many there will be
# Allowed beyond two more: each of four ranks may have opened or closed its connections, Go's runtime makes threads as
# it needs them, and a prewarmed process has three pipes.
MARGIN = Counter({("etcd", "files"): 8, ("etcd", "threads"): os.cpu_count() or 1, ("launcher", "files"): 3})
SLOWER = 2.0  # how many times longer a step may take at the end: the machine has other load


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def held(pid: int) -> dict[str, int]:
    """Resources of a process: memory in MiB, open files, threads."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
    )
    return {
        "MiB": int(status["VmRSS"].split()[0]) >> 10,
        "files": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
    }


def most_memory(name: str, first: int) -> float:
    """The most memory in MiB that a process may have at the end. Etcd keeps its last 10,000 requests in memory, so it
    goes up and down. A process that kept 0.6 kB of each step had 7 MiB more at the end, of 60; others settle."""
    return 256 if name == "etcd" else 1.02 * first + 3


def look(run_dir: Path, launcher: int) -> dict[str, Any]:
    """Resources of the launcher, its etcd, and a rank that was there from the start; keys and files of the job."""
    ranks = living(run_dir)
    etcd = next(
        pid for pid in children(launcher) if "etcd" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]
    )
    session = ranks[0][1].parent
    found = keys(run_dir)
    for kind in ("anew", "free", "notes", ""):  # the places of joined ranks, and single keys
        del found[kind]
    # Etcd makes the first of its snapshots when it has served 10,000 requests, and keeps one.
    files = [path for path in session.rglob("*") if path.is_file() and path.suffix != ".snap"]
    processes = {"launcher": launcher, "etcd": etcd, "rank 0": ranks[0][0]}
    return {name: held(pid) for name, pid in processes.items()} | {
        "keys": found,
        "files": Counter(path.name.partition("-")[0] for path in files),
    }


def newest(run_dir: Path) -> int:
    return int(read(run_dir / "steps.jsonl").whole[-1]["step"])


def pace(run_dir: Path, steps: slice) -> float:
    """Median seconds of an undisturbed step on all replicas."""
    disturbed = {line["step"] + after for line in read(run_dir / "incidents.jsonl").whole for after in (0, 1)}
    lines = [line for line in read(run_dir / "steps.jsonl").whole if line["replicas"] == 4]
    return median([line["seconds"] for line in lines if line["step"] not in disturbed][steps])


@pytest.mark.guarantee(
    "Rejoining replicas",
    "Memory, files, threads, keys and step time do not grow over hundreds of deaths and rejoins.",
)
@pytest.mark.soak
def test_launcher_and_etcd_do_not_grow_over_a_week_of_deaths_and_rejoins(tmp_path: Path) -> None:
    words, run_dir = [*small_world(tmp_path / "world"), *LR, "reduction=reproducible"], tmp_path / "run"
    many = ["replicas=4", "accum=2", "steps=100000", "pace=0.02"]
    options = "--return", "--return-delay=0", "--forgive=0", "--page=off"
    process = start(run_dir, *words, *many, *options, quiet=True)
    wait(lambda: replicas(run_dir) == 4, "no step")
    rng, deaths, first = random.Random(SEED), 0, None
    while deaths < DEATHS:
        ranks = living(run_dir)
        victims = rng.sample(sorted(set(ranks) - {0}), min(3, DEATHS - deaths))
        for victim in victims:
            os.kill(ranks[victim][0], signal.SIGKILL)
        wait(lambda: replicas(run_dir) < 4, "nobody is missed")  # a step may end before
        wait(lambda: replicas(run_dir) == 4, f"not whole again after {deaths} deaths")
        deaths += len(victims)
        until = newest(run_dir) + QUIET
        wait(lambda until=until: newest(run_dir) >= until, f"no step after {deaths} deaths")
        if first is None and deaths >= SETTLED * DEATHS:
            first = look(run_dir, process.pid)
    wait(lambda: newest(run_dir) >= STEPS, "too few steps", 300)
    last = look(run_dir, process.pid)
    process.send_signal(signal.SIGTERM)
    run = finish(process, run_dir)
    assert run.code == 0, run.output
    print(f"{deaths} deaths, {run.summary['joined']} returns, {len(run.steps)} steps\n{first}\n{last}")
    assert run.summary["joined"] == deaths
    assert first is not None
    for name in ("launcher", "etcd", "rank 0"):
        for what in ("files", "threads"):
            assert last[name][what] <= first[name][what] + 2 + MARGIN[name, what], (name, what, first, last)
        assert last[name]["MiB"] <= most_memory(name, first[name]["MiB"]), (name, first, last)
    assert last["keys"] == first["keys"]
    assert last["files"] == first["files"]
    early, late = pace(run_dir, slice(20, 120)), pace(run_dir, slice(-100, None))
    print(f"a step takes {early:.3f} s at the beginning, {late:.3f} s at the end")
    assert late < SLOWER * early
    check_against_calm(run, tmp_path / "calm", words, 8)


@pytest.mark.guarantee(
    "Rejoining replicas",
    "A rank has its initial threads, sockets and files after any number of deaths, also without garbage "
    "collection of cycles.",
)
@pytest.mark.guarantee(
    "Rejoining replicas",
    "Memory, files, threads, keys and step time do not grow over hundreds of deaths and rejoins.",
)
@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:.*is etcd 3:UserWarning")
def test_surviving_rank_does_not_grow_over_hundreds_of_rejoins(
    server: EtcdServer, prefix: str, tmp_path: Path
) -> None:
    """The same without a launcher, with ranks that are forked: a rejoin takes moments, so there can be many."""
    rng, deaths, first, work = random.Random(SEED), 0, None, set(range(4))  # replicas at work

    etcd = EtcdClient(server.endpoint, prefix=prefix, token="secret")

    def is_whole() -> bool:
        return set(ranks.diary(0)[-1]["replicas"]) == work

    def look() -> dict[str, Any]:
        kinds = Counter(found.key.rpartition("/")[0] for found in etcd.get_all()[0])
        pids = {"etcd": server.pid, "rank 0": ranks.diary(0, "started")[0]["pid"]}
        steady = {kind: count for kind, count in kinds.items() if kind not in ("vote", "mail")}
        return {name: held(pid) for name, pid in pids.items()} | {"keys": steady}

    with JoiningRanks(server.endpoint, prefix, tmp_path, 4, batch=8, pace=0.01) as ranks:
        ranks.wait_for(0, 2)
        while deaths < DEATHS:
            victims = rng.sample(sorted(work - {0}), min(3, DEATHS - deaths))
            for victim in victims:
                ranks.kill(victim)
            work.difference_update(victims)
            work.update(rank for _ in victims for rank in ranks.start_another())
            wait(is_whole, f"not whole after {deaths} deaths", 120)
            deaths += len(victims)
            if first is None and deaths >= SETTLED * DEATHS:
                first = look()
        wait(lambda: len(ranks.diary(0)) >= STEPS, "too few steps", 900)
        last = look()
        ranks.finish(work)
        steps = ranks.diary(0)
    times = [b["at"] - a["at"] for a, b in pairwise(steps) if not a["incidents"] and not b["incidents"]]
    early, late = median(times[20:120]), median(times[-100:])
    print(
        f"{deaths} deaths and returns, {len(steps)} steps of {early:.3f}, then {late:.3f} s\n{first}\n{last}"
    )
    assert first is not None
    for name in ("etcd", "rank 0"):
        for what in ("files", "threads"):
            assert last[name][what] <= first[name][what] + 2 + MARGIN[name, what], (name, what, first, last)
        assert last[name]["MiB"] <= most_memory(name, first[name]["MiB"]), (name, first, last)
    assert last["keys"] == first["keys"]
    assert late < SLOWER * early
    assert {line["weight"] for line in steps} == {8.0}
