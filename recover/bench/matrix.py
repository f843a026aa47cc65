"""`recover faults matrix`: a death at every location, of every role, alone, in pairs and during recoveries."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path

from recover.bench.cells import MODES, PLACES, RECOVERIES, ROLES, Cell, Launch, all_cells, lay_out
from recover.bench.chaos import run_job
from recover.bench.invariants import violations
from recover.train.config import Config
from recover.train.plan import make_plan

POLICY = ("policy=static", "samples=partitioned")  # the one with all roles
LIMIT = 180.0  # seconds for one launch: then it hangs
BEGIN, END = "<!-- matrix: {} -->", "<!-- end of matrix: {} -->"


def matrix(words: Sequence[str], launches: int | None, write: Path | None, jobs: int = 1) -> int:
    """Returns 0 if every cell held, otherwise 1. `launches`: only so many, those that serve most cells."""
    words = [*POLICY, *words]
    config = make_plan(words, Path(tempfile.gettempdir()) / "matrix", (), None).config
    if config.policy != "static":
        raise ValueError(
            f"policy={config.policy!r}: the roles of the matrix are those of policy=static; leave it out"
        )
    if write is not None:
        insert(write, config.parallel, None)
    started, broken = time.monotonic(), set[Cell]()
    place = Path(tempfile.mkdtemp(prefix="recover-matrix-"))
    whole = list(lay_out(all_cells(), config.replicas, config.replica_size, "static"))
    plan = whole[:launches]

    def run(number: int) -> tuple[int, float, list[str]]:
        began = time.monotonic()
        laws = list(run_launch(words, plan[number], place / f"launch-{number + 1}"))
        return number, time.monotonic() - began, laws

    def tell(number: int, seconds: float, laws: Sequence[str]) -> None:
        launch, run_dir = plan[number], place / f"launch-{number + 1}"
        print(
            f"launch {number + 1} of {len(plan)}: {len(launch.faults)} deaths, {len(launch.cells)} cells, "
            f"{seconds:.1f} s: {'ok' if not laws else '; '.join(laws)}",
            flush=True,
        )
        if laws:
            broken.update(launch.cells)
            print(f"  schedule: {' '.join(map(str, launch.faults))}\n  evidence: {run_dir}", flush=True)
        else:
            shutil.rmtree(run_dir)

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for done in as_completed([pool.submit(run, number) for number in range(len(plan))]):
                tell(*done.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    text = list(_summary(config, whole, plan, broken, jobs, time.monotonic() - started))
    print("\n".join(text))
    if write is not None:
        insert(write, config.parallel, text)
    if not broken:
        shutil.rmtree(place)
    return 1 if broken else 0


def _summary(
    config: Config,
    whole: Sequence[Launch],
    plan: Sequence[Launch],
    broken: set[Cell],
    jobs: int,
    seconds: float,
) -> Iterator[str]:
    """What held, what was not tried, and on what machine."""
    served, reachable = (set[Cell]().union(*(each.cells for each in some)) for some in (plan, whole))
    sizes = [
        f" {key}={getattr(config, key)}"
        for key in ("shard", "tp", "pp", "ep")
        if (getattr(config, key) or 1) > 1
    ]
    yield (
        f"`parallel={config.parallel}{''.join(sizes)}`: {len(served - broken)} of {len(served)} cells held; "
        f"{sum(len(each.faults) for each in plan)} deaths in {len(plan)} launches of {config.replicas} x "
        f"{config.replica_size} ranks, {jobs} at a time, {seconds:.0f} s on {os.cpu_count()} cores, "
        f"torch {version('torch')}."
    )
    if untried := len(reachable - served):
        yield f"The other {untried} cells take {len(whole) - len(plan)} more launches, and were not tried."
    yield ""
    yield from table(served, broken)


def run_launch(words: Sequence[str], launch: Launch, run_dir: Path) -> Iterator[str]:
    """Every law that was broken."""
    theirs = [word for word in words if not word.startswith("accum=")]
    theirs += [f"global_batch={launch.global_batch}", f"steps={launch.steps}"]
    theirs += [f"checkpoint.every={launch.checkpoint_every}", "checkpoint.keep=1"]
    config = make_plan(theirs, run_dir, [str(fault) for fault in launch.faults], None).config
    run = run_job(theirs, run_dir, LIMIT, launch.faults)
    if run.code == -9:
        yield f"it hung for {LIMIT:.0f} s"
    yield from violations(run, config, launch.faults)
    lost = {replica for line in run.lines("incidents.jsonl") for replica in line["dead_replicas"]}
    if missed := {fault.replica for fault in launch.faults} - lost:
        yield f"replicas {sorted(missed)} were not lost as scheduled"


def table(served: set[Cell], broken: set[Cell]) -> Iterator[str]:
    """One row per location: how many modes held, of those that were tried, for each role."""
    yield f"| location | {' | '.join(ROLES)} |"
    yield f"|---|{'---|' * len(ROLES)}"
    for location in (*PLACES, *RECOVERIES):
        row = []
        for role in ROLES:
            tried = {Cell(location, role, mode) for mode in MODES} & served
            row.append(f"{len(tried - broken)}/{len(tried)}" if tried else "-")
        yield f"| `{location}` | {' | '.join(row)} |"


def insert(page: Path, name: str, lines: Sequence[str] | None) -> None:
    """Replace what stands between the marks of this name; without lines, only see that there is such a place."""
    text = page.read_text()
    begin, end = BEGIN.format(name), END.format(name)
    if begin not in text or end not in text:
        raise ValueError(f"{page} has no place for this table; put the lines {begin} and {end} into it")
    if lines is None:
        return
    before, rest = text.split(begin, 1)
    after = rest.split(end, 1)[1]
    page.write_text(f"{before}{begin}\n" + "\n".join(lines) + f"\n{end}{after}")
