"""`recover faults matrix`: a death at every location, of every role, alone, in pairs and during recoveries."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Protocol, TypeVar

from recover.faults import Fault
from recover.job.machine import machine
from recover.train.config import Config
from recover.train.preparation import prepare_run
from recover_lab.chaos.campaign import run_job
from recover_lab.chaos.cells import MODES, PLACES, RECOVERIES, ROLES, Cell, Launch, all_cells, lay_out
from recover_lab.chaos.invariants import violations
from recover_lab.chaos.platforms import CampaignRun

POLICY = ("policy=static", "samples=partitioned")  # the only policy with all roles
LIMIT = 180.0  # seconds after which a launch counts as hung
BEGIN, END = "<!-- matrix: {} -->", "<!-- end of matrix: {} -->"
L = TypeVar("L", bound="PlannedLaunch")


def matrix(
    words: Sequence[str],
    launches: int | None = None,
    write: Path | None = None,
    jobs: int = 1,
    cells: Sequence[Cell] | None = None,
    skip: int = 0,
) -> int:
    """Returns 0 if every cell held, otherwise 1.

    Launches with the most cells come first. Skips the first `skip` launches, and runs `launches` at most.
    """
    config, whole = plan_launches([*POLICY, *words], cells or all_cells())
    if write is not None:
        split_at_table(write, config.parallel)
    plan = slice_of(whole, launches, skip)
    started = time.monotonic()

    def run(launch: Launch, run_dir: Path, running: set[subprocess.Popen[bytes]]) -> list[str]:
        return list(run_launch([*POLICY, *words], launch, run_dir, LIMIT * jobs, running))

    broken = run_launches(plan, run, jobs)
    text = list(_summary(config, whole, plan, broken, jobs, time.monotonic() - started))
    print("\n".join(text))
    if write is not None:
        insert(write, config.parallel, text)
    return 1 if broken else 0


def slice_of(whole: Sequence[L], launches: int | None, skip: int) -> Sequence[L]:
    """The launches of a plan that this call runs."""
    if skip >= len(whole):
        raise ValueError(f"--skip {skip}: the matrix takes {len(whole)} launches in all; skip fewer")
    return whole[skip:][:launches]


class PlannedLaunch(Protocol):
    """One launch of a plan."""

    faults: list[Fault]
    cells: set[Any]


def run_launches(
    plan: Sequence[L], run: Callable[[L, Path, set[subprocess.Popen[bytes]]], list[str]], jobs: int
) -> set[Any]:
    """Run all launches, `jobs` at a time. Returns the cells of those with violations, whose run directories stay."""
    broken = set[Any]()
    place = Path(tempfile.mkdtemp(prefix="recover-matrix-"))
    running: set[subprocess.Popen[bytes]] = set()

    def run_one(number: int) -> tuple[int, float, list[str]]:
        began, run_dir = time.monotonic(), place / f"launch-{number + 1}"
        laws = run(plan[number], run_dir, running)
        return number, time.monotonic() - began, laws

    def tell(number: int, seconds: float, laws: Sequence[str]) -> None:
        launch, run_dir = plan[number], place / f"launch-{number + 1}"
        print(
            f"launch {number + 1} of {len(plan)}: {len(launch.faults)} {_named(launch)}, {len(launch.cells)} cells, "
            f"{seconds:.1f} s: {'ok' if not laws else '; '.join(laws)}",
            flush=True,
        )
        if laws:
            broken.update(launch.cells)
            print(f"  schedule: {' '.join(map(str, launch.faults))}\n  evidence: {run_dir}", flush=True)
        else:
            shutil.rmtree(run_dir)

    try:
        with ThreadPoolExecutor(jobs) as pool:
            try:
                for done in as_completed([pool.submit(run_one, number) for number in range(len(plan))]):
                    tell(*done.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in tuple(running):
                    process.kill()
                raise
    finally:
        if not broken:
            shutil.rmtree(place, ignore_errors=True)
    return broken


def _named(launch: PlannedLaunch) -> str:
    return "deaths" if all(fault.action == "kill" for fault in launch.faults) else "faults"


def plan_launches(words: Sequence[str], cells: Sequence[Cell]) -> tuple[Config, list[Launch]]:
    """Config and launches. Raises ValueError for what cannot run, before anything is started."""
    config = prepare_run(words, None, (), None).config
    if config.policy != "static":
        raise ValueError(
            f"policy={config.policy!r}: the roles of the matrix are those of policy=static; leave it out"
        )
    whole = list(lay_out(cells, config.replicas, config.replica_size, "static"))
    if not whole:
        raise ValueError(
            f"replicas={config.replicas}: no replica would be left; give more, such as replicas=8"
        )
    for launch in whole:
        prepare_run(launch_words(words, launch, config.replicas), None, [str(f) for f in launch.faults], None)
    return config, whole


def _summary(
    config: Config,
    whole: Sequence[Launch],
    plan: Sequence[Launch],
    broken: set[Cell],
    jobs: int,
    seconds: float,
) -> Iterator[str]:
    """Cells that held, cells that were not tested, and the machine."""
    served, reachable = (set[Cell]().union(*(each.cells for each in some)) for some in (plan, whole))
    sizes = [
        f" {key}={getattr(config, key)}"
        for key in ("shard", "tp", "pp", "ep")
        if (getattr(config, key) or 1) > 1
    ]
    here = machine()
    yield (
        f"`parallel={config.parallel}{''.join(sizes)}`: {len(served - broken)} of {len(served)} cells held; "
        f"{sum(len(each.faults) for each in plan)} deaths in {len(plan)} launches of {config.replicas} x "
        f"{config.replica_size} ranks, {jobs} at a time, {seconds:.0f} s on {here['cores']} cores, "
        f"torch {here['torch']}."
    )
    if untried := len(reachable - served):
        yield f"The other {untried} cells take {len(whole) - len(plan)} more launches, and were not tried."
    yield ""
    yield from table(served, broken)


def launch_words(words: Sequence[str], launch: Launch, replicas: int) -> list[str]:
    return [
        *words,
        f"global_batch={launch.global_batch}",
        f"accum={-(-launch.global_batch // replicas)}",
        f"steps={launch.steps}",
        f"checkpoint.every={launch.checkpoint_every}",
        "checkpoint.keep=1",
    ]


def run_launch(
    words: Sequence[str],
    launch: Launch,
    run_dir: Path,
    limit: float = LIMIT,
    running: set[subprocess.Popen[bytes]] | None = None,
) -> Iterator[str]:
    """Run one launch. Yields every invariant that was broken."""
    replicas = prepare_run(words, None, (), None).config.replicas
    theirs = launch_words(words, launch, replicas)
    config = prepare_run(theirs, None, [str(fault) for fault in launch.faults], None).config
    run = run_job(CampaignRun(theirs, run_dir, limit, launch.faults, running))
    if run.code == -9:
        yield f"the run hung: no end after {limit:.0f} s"
    laws = list(violations(run, config, launch.faults))
    yield from laws
    if not laws:  # here deaths in a recovery must have happened, too
        lost = {replica for line in run.lines("incidents.jsonl") for replica in line["dead_replicas"]}
        if missed := {fault.replica for fault in launch.faults} - lost:
            yield f"replicas {sorted(missed)} were not lost as scheduled"


def table(served: set[Cell], broken: set[Cell]) -> Iterator[str]:
    """One row per location: modes that held, of those that were tested, for each role."""
    yield f"| location | {' | '.join(ROLES)} |"
    yield f"|---|{'---|' * len(ROLES)}"
    for location in (*PLACES, *RECOVERIES):
        row = []
        for role in ROLES:
            tried = {Cell(location, role, mode) for mode in MODES} & served
            row.append(f"{len(tried - broken)}/{len(tried)}" if tried else "-")
        yield f"| `{location}` | {' | '.join(row)} |"


def insert(page: Path, name: str, lines: Sequence[str]) -> None:
    """Replace the text between the marks of this name."""
    before, after = split_at_table(page, name)
    page.write_text(before + "\n".join(lines) + "\n" + after)


def split_at_table(page: Path, name: str) -> tuple[str, str]:
    """The text up to the opening mark of a table, and from its closing mark on. Raises ValueError without marks."""
    text = page.read_text()
    begin, end = BEGIN.format(name), END.format(name)
    if begin not in text or end not in text:
        raise ValueError(f"{page} has no place for this table; put the lines {begin} and {end} into it")
    return text.split(begin, 1)[0] + begin + "\n", end + text.split(end, 1)[1]
