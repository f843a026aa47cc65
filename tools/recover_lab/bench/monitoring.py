"""`recover bench watch`: the cost of monitoring, by steps of one run with and without an open page and Prometheus.

It publishes no figure: a soak test runs it with bounds, and the command prints its numbers.
"""

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
from typing import Any

from recover.runs.records.json_lines import read_lines
from recover_lab.bench.measure import begin, machine_line, paired_ratio, summary, write
from recover_lab.peers.ended import BenchmarkError

SCRAPE = 5.0  # seconds between two requests for the metrics; Prometheus's own default is a minute
WARM = 10  # steps before the first turn
_STEPS = 8  # of a turn, at least: a turn with slow steps lasts longer
_START = 120.0  # seconds until the first turn, and for the steps of a turn, at most


class _Monitors:
    """An open page and a Prometheus, inside `with`."""

    def __init__(self, port: int) -> None:
        self._port, self._over = port, threading.Event()
        self._threads = [threading.Thread(target=self._listen), threading.Thread(target=self._scrape)]
        self.received = 0

    def __enter__(self) -> _Monitors:
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
            self.received += len(answer.read1(65536))
        connection.close()

    def _scrape(self) -> None:
        while not self._over.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
            connection.request("GET", "/metrics")
            connection.getresponse().read()
            connection.close()
            self._over.wait(SCRAPE)


def bench_watch(model: str, replicas: int, seconds: float, turns: int, output: Path | None) -> dict[str, Any]:
    """Turns of `seconds` with monitors, alternating with as many without."""
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
            job.terminate()  # the run saves a checkpoint and ends
            try:
                job.wait(60)
            except subprocess.TimeoutExpired:
                job.kill()  # the run's guardian ends the ranks
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
    facts: dict[str, Any] = {
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
        f"{statistics.median(alone):.1f} ms without monitors and {statistics.median(seen):.1f} ms with an open page "
        f"and a Prometheus that scrapes every {SCRAPE:g} s: {ratio - 1:+.2%} (95%: {low - 1:+.2%} to {high - 1:+.2%})"
    )
    console.print(
        f"the launcher computes {1e3 * more:.1f} ms more in a second: {share:+.2%} of the cores, which is the cost "
        "where the ranks use all of them"
    )
    console.print(machine_line())
    return facts


def _take_turns(
    run_dir: Path, job: subprocess.Popen[bytes], seconds: float, turns: int
) -> list[tuple[bool, float, float, float]]:
    """Take the turns. Returns of each: whether it was monitored, its begin and end, and CPU seconds per second of the
    launcher's processes."""
    deadline = time.monotonic() + _START
    while len(list(read_lines(run_dir / "steps.jsonl"))) < WARM:
        if job.poll() is not None or time.monotonic() > deadline:
            raise BenchmarkError(f"the run has not reached step {WARM}")
        time.sleep(0.1)
    port = int((run_dir / "page.url").read_text().rstrip("/\n").rpartition(":")[2])
    with _Monitors(port):
        time.sleep(seconds)  # the server starts at the first request
    windows = []
    for turn in range(2 * turns):
        watched = turn % 4 in (0, 3)  # neither kind always goes first
        begun = time.time()
        spent = _computed(job.pid)
        if watched:
            with _Monitors(port) as monitors:
                _wait(run_dir, job, begun, seconds)
            if not monitors.received:
                raise BenchmarkError("the page received no event")
        else:
            _wait(run_dir, job, begun, seconds)
        ended = time.time()
        windows.append((watched, begun, ended, (_computed(job.pid) - spent) / (ended - begun)))
    return windows


def _computed(launcher: int) -> float:
    """CPU seconds of a launcher and its children, without the ranks, which are children of mpirun."""
    total = 0
    threads = Path(f"/proc/{launcher}/task").glob("*/children")
    for pid in (launcher, *(int(child) for path in threads for child in path.read_text().split())):
        try:
            numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # the process has ended
        total += int(numbers[11]) + int(numbers[12])
    return total / os.sysconf("SC_CLK_TCK")


def _wait(run_dir: Path, job: subprocess.Popen[bytes], begun: float, seconds: float) -> None:
    """Wait until the turn has lasted `seconds` and has its steps."""
    deadline = time.monotonic() + _START
    time.sleep(seconds)
    while sum(begun < s["at"] - s["seconds"] for s in read_lines(run_dir / "steps.jsonl")) < _STEPS:
        if job.poll() is not None or time.monotonic() > deadline:
            raise BenchmarkError(f"a turn has not reached {_STEPS} steps")
        time.sleep(0.1)
