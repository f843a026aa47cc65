"""What being looked at costs: steps of one run while a page and Prometheus read along, and while nobody does."""

from __future__ import annotations

import http.client
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from recover.runs.records.json_lines import read_lines
from recover_lab.bench.measure import begin, paired_ratio, place, summary, write
from recover_lab.peers.ended import BenchmarkError

SCRAPE = 5.0  # seconds between two questions for the metrics; Prometheus's own default is a minute
WARM = 10  # steps before anything counts
_STEPS = 8  # in a turn, at least: it lasts longer where they take long
_START = 120.0  # seconds that the run may take to get there


class _Onlookers:
    """A page that is open and a Prometheus that asks, while `with` lasts."""

    def __init__(self, port: int) -> None:
        self._port, self._over = port, threading.Event()
        self._threads = [threading.Thread(target=self._listen), threading.Thread(target=self._scrape)]
        self.heard = 0

    def __enter__(self) -> _Onlookers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _listen(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        connection.request("GET", "/events")
        answer = connection.getresponse()
        while not self._over.is_set():
            self.heard += len(answer.read1(65536))
        connection.close()

    def _scrape(self) -> None:
        while not self._over.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
            connection.request("GET", "/metrics")
            connection.getresponse().read()
            connection.close()
            self._over.wait(SCRAPE)


def bench_watch(model: str, replicas: int, seconds: float, turns: int, output: Path | None) -> None:
    """So many turns with onlookers, and as many without, in between, each of so many seconds."""
    console = begin(output)
    with tempfile.TemporaryDirectory(prefix="recover-bench-") as directory:
        run_dir = Path(directory, "run")
        words = [f"model={model}", f"replicas={replicas}", "steps=1000000", "checkpoint.every=0"]
        job = subprocess.Popen(
            [sys.executable, "-m", "recover.cli", "train", *words, "--run-dir", str(run_dir), "--page", "0"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            windows = _take_turns(run_dir, job, seconds, turns)
            lines = list(read_lines(run_dir / "steps.jsonl"))
        finally:
            job.terminate()  # it saves a checkpoint, and ends
            try:
                job.wait(60)
            except subprocess.TimeoutExpired:
                job.kill()  # its guardian ends the ranks
                job.wait()
    spans: dict[bool, list[list[float]]] = {True: [], False: []}
    beside: dict[bool, list[float]] = {True: [], False: []}
    for watched, begun, ended, computed in windows:
        beside[watched].append(computed)
        within = [s["seconds"] * 1e3 for s in lines if begun < s["at"] - s["seconds"] and s["at"] < ended]
        spans[watched].append(within)
    alone, seen = ([statistics.median(turn) for turn in spans[watched]] for watched in (False, True))
    ratio, low, high = paired_ratio(seen, alone)
    more = statistics.mean(beside[True]) - statistics.mean(beside[False])
    share = more / (os.cpu_count() or 1)
    facts = {
        "model": model,
        "replicas": replicas,
        "alone_ms": summary([step for turn in spans[False] for step in turn]),
        "watched_ms": summary([step for turn in spans[True] for step in turn]),
        "ratio": {"mean": ratio, "low": low, "high": high, "turns": turns},
        "share_of_cores": share,
    }
    write(output, {"watch": facts})
    console.print(
        f"{model}, {replicas} replicas, {turns} turns of {seconds:g} s each: a step takes "
        f"{statistics.median(alone):.1f} ms while nobody looks and {statistics.median(seen):.1f} ms while a page is "
        f"open and Prometheus asks every {SCRAPE:g} s: {ratio - 1:+.2%} (95%: {low - 1:+.2%} to {high - 1:+.2%})"
    )
    console.print(
        f"beside the ranks {1e3 * more:.1f} ms more are computed in a second: {share:+.2%} of the cores, which is what "
        "it costs where the ranks take all of them"
    )
    console.print(place())


def _take_turns(
    run_dir: Path, job: subprocess.Popen[bytes], seconds: float, turns: int
) -> list[tuple[bool, float, float, float]]:
    """Whether it was looked at, from when to when, and how much was computed beside the ranks, per second."""
    deadline = time.monotonic() + _START
    while len(list(read_lines(run_dir / "steps.jsonl"))) < WARM:
        if job.poll() is not None or time.monotonic() > deadline:
            raise BenchmarkError(f"the run has not come to step {WARM}")
        time.sleep(0.1)
    port = int((run_dir / "page.url").read_text().rstrip("/\n").rpartition(":")[2])
    with _Onlookers(port):
        time.sleep(seconds)  # the server starts when the first one asks
    windows = []
    for turn in range(2 * turns):
        watched = turn % 4 in (0, 3)  # neither always goes first
        begun = time.time()
        spent = _computed(job.pid)
        if watched:
            with _Onlookers(port) as onlookers:
                _wait(run_dir, job, begun, seconds)
            if not onlookers.heard:
                raise BenchmarkError("the page was told nothing")
        else:
            _wait(run_dir, job, begun, seconds)
        ended = time.time()
        windows.append((watched, begun, ended, (_computed(job.pid) - spent) / (ended - begun)))
    return windows


def _computed(launcher: int) -> float:
    """Seconds that a launcher and the processes beside it have computed, its ranks aside: they are mpirun's."""
    total = 0
    threads = Path(f"/proc/{launcher}/task").glob("*/children")
    for pid in (launcher, *(int(child) for path in threads for child in path.read_text().split())):
        try:
            numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        total += int(numbers[11]) + int(numbers[12])
    return total / os.sysconf("SC_CLK_TCK")


def _wait(run_dir: Path, job: subprocess.Popen[bytes], begun: float, seconds: float) -> None:
    """Until a turn has lasted for so long, and has its steps."""
    deadline = time.monotonic() + _START
    time.sleep(seconds)
    while sum(begun < s["at"] - s["seconds"] for s in read_lines(run_dir / "steps.jsonl")) < _STEPS:
        if job.poll() is not None or time.monotonic() > deadline:
            raise BenchmarkError(f"a turn has not come to {_STEPS} steps")
        time.sleep(0.1)
