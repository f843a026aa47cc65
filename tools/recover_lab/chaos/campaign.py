"""`recover faults chaos`: runs of a training job under random fault schedules, and the invariants of each run.

Run number i draws its schedule from seed + i, so that each can be repeated alone by its own seed.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recover.faults import Fault
from recover.faults.draw import EVEN, EVERYWHERE, MOMENT, draw_by_clock, draw_schedule
from recover.faults.locations import (
    ANYTIME,
    IN_RECOVERY,
    JOIN_PHASES,
    OF_MICROBATCHES,
    OUTSIDE,
    REPAIR_PHASES,
)
from recover.faults.schedule import impossible, survivors, write_schedule
from recover.train.config import Config
from recover.train.preparation import prepare_run
from recover_lab.chaos.invariants import FinishedRun, leftovers, violations
from recover_lab.chaos.platforms import CampaignRun, Platform

ACTIONS = {
    "kill": 6.0,
    "exit": 2.0,
    "stop": 1.0,
    "pause:0.3": 1.0,
    "pause:1": 1.0,
    "hold:6": 1.0,  # longer than the hang limit
    "corrupt:weights": 1.0,
}
BY_CLOCK = {"kill": 4.0, "stop": 1.0, "pause:0.5": 1.0}
HANG_LIMIT = 5.0  # seconds: short, since every stopped rank costs this long
STALLED = 1.6  # times the hang limit: in some runs all replicas but one wait this long for their data
SLOW_SAMPLE = 1.5  # times the hang limit: a sample that takes this long on every replica
TO_JOINING_REPLICAS = {"kill": 6.0, "exit": 2.0, "stop": 1.0, "pause:0.5": 1.0}
NEWCOMERS = 12  # joining replicas that may be struck, at most
RETURN = ("--return", "--return-delay=0", "--forgive=0")
# Times the start of a replica: the length of a run with rejoining replicas, which is struck in its first third.
STARTS = 6.0
# A run counts as hung after so many seconds, or after so many times the run without faults.
PATIENCE, TIMES = 120.0, 10.0
GUARDIAN = 30.0  # seconds for the guardian of a killed launcher


class LocalMachine:
    """This machine. `returns`: lost replicas are restarted."""

    def __init__(self, returns: bool = False) -> None:
        self.returns = returns

    def check(self, config: Config) -> None:
        pass  # any config that `recover train` accepts

    def schedule(self, config: Config, seed: int) -> tuple[Fault, ...]:
        if not self.returns:
            return schedule_for(config, seed)
        return schedule_for(config, seed, last_struck(config)) + strike_joining_replicas(config, seed)

    def run(self, job: CampaignRun) -> FinishedRun:
        return run_job(job, RETURN if self.returns else ())

    def violations(
        self, run: FinishedRun, config: Config, faults: Sequence[Fault], calm: FinishedRun | None = None
    ) -> Iterator[str]:
        return violations(run, config, faults, calm)


@dataclass
class CampaignTally:
    """Results of all runs."""

    runs: int = 0
    faults: int = 0
    joined: int = 0
    bad_seeds: list[int] = field(default_factory=list)
    calm_is_broken: bool = False


def chaos(
    words: Sequence[str],
    seed: int,
    minutes: float | None,
    runs: int | None,
    replicas: tuple[int, int] | None = None,
    output: Path | None = None,
    platform: Platform | None = None,
) -> int:
    """Returns 0 if every run kept every invariant, otherwise 1; run directories with violations stay in `output`.

    A campaign with returns in which no replica has joined shows nothing of joins, and returns 1, too.
    """
    platform = platform or LocalMachine()
    if not any(word.startswith("hang_limit=") for word in words):
        words = [*words, f"hang_limit={HANG_LIMIT:g}"]
    config = prepare_run(words, (output or Path(tempfile.gettempdir())) / "calm", (), None).config
    low, high = replicas or (config.replicas, config.replicas)
    if not 2 <= low <= high:
        raise ValueError(
            f"--replicas {low}:{high}: one replica must be left; give a range from 2 on, such as 2:6"
        )
    jobs = {count: [*words, *_share_out(config.global_batch, count)] for count in range(low, high + 1)}
    for theirs in jobs.values():
        platform.check(
            prepare_run(theirs, None, (), None).config
        )  # refuses what cannot run before the first run
    place = output or Path(tempfile.mkdtemp(prefix="recover-chaos-"))
    place.mkdir(parents=True, exist_ok=True)
    started, tally = time.monotonic(), CampaignTally()
    try:
        calm = platform.run(CampaignRun(words, place / "calm"))
        if broken := list(platform.violations(calm, config, ())):
            tally.calm_is_broken = True
            print(
                f"the run without faults already breaks invariants: {'; '.join(broken)}; see {calm.run_dir}",
                flush=True,
            )
            return 1
        lasts = time.monotonic() - started
        if platform.returns:
            pace = pace_for_joins(config, *calm.took)
            lasts += pace * config.accum * config.steps
            jobs = {count: [*theirs, f"pace={pace:.3f}"] for count, theirs in jobs.items()}
        limit = max(PATIENCE, TIMES * lasts)
        while (runs is None or tally.runs < runs) and (
            minutes is None or time.monotonic() - started < minutes * 60
        ):
            number = seed + tally.runs
            count = random.Random(f"chaos/{number}").randint(low, high)
            tally.runs += 1
            _one(platform, jobs[count], number, place, calm, limit, tally)
    finally:
        if not tally.calm_is_broken:
            shutil.rmtree(place / "calm", ignore_errors=True)
        if output is None and not (tally.calm_is_broken or tally.bad_seeds):
            shutil.rmtree(place, ignore_errors=True)
    came = f"{tally.joined} replicas joined, " if platform.returns else ""
    print(
        f"chaos: {tally.runs} runs, {tally.faults} faults, {came}{len(tally.bad_seeds)} with a violation "
        f"{tally.bad_seeds or ''}, {(time.monotonic() - started) / 60:.1f} minutes",
        flush=True,
    )
    if platform.returns and not tally.joined:
        print(
            f"inconclusive: no replica joined in {tally.runs} runs, so joins were not tested; give more runs "
            f"(--runs, --minutes) or a longer job (steps=, it has {config.steps})",
            flush=True,
        )
        return 1
    return 1 if tally.bad_seeds else 0


def last_struck(config: Config) -> int:
    """The last step with a scheduled fault, where replicas are to rejoin afterwards."""
    return max(1, config.steps // 3)


def pace_for_joins(config: Config, start_up: float, training: float) -> float:
    """Seconds per microbatch (`pace`), so that lost replicas have time to start and to join.

    `start_up`, `training`: seconds of the run without faults before and after its first step. Raises ValueError where
    a microbatch would come near the hang limit.
    """
    wanted, most = STARTS * start_up, (config.hang_limit or HANG_LIMIT) / 10
    if training >= wanted:
        return config.pace
    pace = max(config.pace, wanted / (config.steps * config.accum))
    if pace > max(config.pace, most):
        raise ValueError(
            f"steps={config.steps} is too short for --return: a replica takes {start_up:.0f} s to start here, and a "
            f"microbatch may take {most:g} s; give steps={math.ceil(wanted / (most * config.accum))}"
        )
    return pace


def _share_out(global_batch: int, replicas: int) -> list[str]:
    return [f"replicas={replicas}", f"global_batch={global_batch}", f"accum={-(-global_batch // replicas)}"]


def _one(
    platform: Platform,
    words: list[str],
    seed: int,
    place: Path,
    calm: Any,
    limit: float,
    tally: CampaignTally,
) -> None:
    """One run. Violations are printed, and the run directory is kept."""
    run_dir = place / f"seed-{seed}"
    config = prepare_run(words, run_dir, (), None).config
    faults = platform.schedule(config, seed)
    began = time.monotonic()
    run = platform.run(CampaignRun(words, run_dir, limit, faults))
    broken = [f"the run hung: no end after {limit:.0f} s"] if run.code == -9 else []
    broken += platform.violations(run, config, faults, calm)
    told = "ok" if not broken else "VIOLATION"
    came = len(run.joined)
    tally.faults, tally.joined = tally.faults + len(faults), tally.joined + came
    joined = f" {came} joined," if platform.returns else ""
    print(
        f"seed {seed}: {config.replicas} replicas, {len(faults)} faults,{joined} {time.monotonic() - began:.1f} s: "
        f"{told}",
        flush=True,
    )
    if broken:
        tally.bad_seeds.append(seed)
        for law in broken:
            print(f"  {law}")
        print(f"  schedule: {' '.join(map(str, faults))}\n  evidence: {run_dir}", flush=True)
    else:
        shutil.rmtree(run_dir)


def schedule_for(config: Config, seed: int, last: int | None = None) -> tuple[Fault, ...]:
    """The faults of run number `seed`, up to step `last`.

    One run in five has faults by the clock: they strike at any instruction, not only at named locations.
    """
    last = last or config.steps
    rng = random.Random(f"schedule/{seed}")
    count = rng.randint(1, max(1, config.replicas - 1))
    if config.replicas > 1 and rng.random() < 0.2:
        mean = rng.choice((0.1, 0.3, 1.0))  # seconds; a fault after the last step does nothing
        return draw_by_clock(
            config.replicas, config.replica_size, seed, mtbf=mean, count=count, actions=BY_CLOCK
        )
    faults = _draw(config, seed, count, last)
    late = _hold_up(config, rng, faults, last)
    return faults + tuple(fault for fault in late if not list(impossible((*faults, fault))))


def strike_joining_replicas(
    config: Config, seed: int, actions: Mapping[str, float] = TO_JOINING_REPLICAS
) -> tuple[Fault, ...]:
    """Faults of joining replicas: while they ask, are admitted or receive the state, in their first step, or later.

    How many replicas join, and when, is not known in advance, so some of these faults do not strike.
    """
    rng = random.Random(f"newcomers/{seed}")
    found = []
    for replica in range(config.replicas, config.replicas + NEWCOMERS):
        local, what = rng.randrange(config.replica_size), rng.random()
        action = rng.choices(list(actions), list(actions.values()))[0]
        if what < 0.2:
            place = rng.choice(OUTSIDE)
            found.append(Fault(0, replica, place, local, asks=replica))
        elif what < 0.5:
            phase = rng.choice((*REPAIR_PHASES, *JOIN_PHASES))
            found.append(Fault(0, replica, "repair", local, phase, action, asks=replica))
        elif what < 0.7:
            place = rng.choice([each for each in EVEN if each not in (*IN_RECOVERY, *OF_MICROBATCHES)])
            found.append(Fault(0, replica, place, local, action=action, joined=replica))
        elif what < 0.85:
            after = round(rng.expovariate(1.0) + MOMENT, 2)
            found.append(Fault(0, replica, ANYTIME, local, after=after))
    return tuple(found)


def _hold_up(config: Config, rng: random.Random, faults: tuple[Fault, ...], last: int) -> Iterator[Fault]:
    """Faults of some runs: storage that stalls for all replicas but one, or a sample that is slow on every replica."""
    what, step, number = rng.random(), rng.randint(1, last), rng.randrange(config.replicas)
    limit = config.hang_limit or HANG_LIMIT
    drifts = any(fault.action == "corrupt:weights" for fault in faults)
    # A replica that reaches the stall after the others stalls alone at its end, and a single slow replica is fenced.
    early = any(fault.kind in ("hold", "pause", "stall", "slow") and fault.step <= step for fault in faults)
    if what < 0.1 and not early:
        for replica in sorted({*range(config.replicas)} - {number}):
            yield Fault(step, replica, "forward", action=f"stall:{STALLED * limit:g}")
    elif what < 0.2 and not drifts and survivors(faults, config.replicas) > 1:
        # The slow sample may cost a replica: one must be left, and a majority that recognises a corrupt one.
        yield Fault(step, number, "forward", action=f"sample:{SLOW_SAMPLE * limit:g}")


def _draw(config: Config, seed: int, count: int, last: int) -> tuple[Fault, ...]:
    locations = EVERYWHERE if config.checkpoint.every == 1 else EVEN
    return draw_schedule(
        config.replicas,
        config.replica_size,
        seed,
        count=count,
        steps=(1, last),
        locations=locations,
        actions=ACTIONS,
    )


def run_job(job: CampaignRun, options: Sequence[str] = ()) -> FinishedRun:
    """Run a job on this machine and kill it after its limit; schedule and output are in its run directory."""
    run_dir = job.run_dir
    if run_dir.exists():
        raise ValueError(
            f"{run_dir} exists, perhaps with violations of an earlier campaign; move it, or give another --output"
        )
    run_dir.mkdir(parents=True)
    schedule = run_dir / "faults.yaml"
    schedule.write_text(write_schedule(job.faults))
    command = [sys.executable, "-m", "recover.cli", "train", *options, *job.words, f"faults={schedule}"]
    command += ["--run-dir", str(run_dir)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RECOVER_")}
    with open(run_dir / "output.txt", "w") as said:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.STDOUT)
        processes = set() if job.running is None else job.running
        processes.add(process)
        try:
            process.wait(job.limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            _wait_for_guardian(FinishedRun(run_dir.absolute(), -9, process.pid))
        finally:
            if process.poll() is None:  # this campaign is being interrupted
                process.kill()
                process.wait()
            processes.discard(process)
    return FinishedRun(run_dir.absolute(), process.returncode, process.pid)


def _wait_for_guardian(run: FinishedRun) -> None:
    """Wait for the guardian of a killed launcher: it ends the ranks and removes their files."""
    deadline = time.monotonic() + GUARDIAN
    while list(leftovers(run)) and time.monotonic() < deadline:
        time.sleep(0.1)
