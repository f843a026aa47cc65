"""`recover faults matrix`: a death at every location, of every role, alone, in pairs and during recoveries."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from recover.bench.cells import MODES, PLACES, RECOVERIES, ROLES, Cell, Launch, all_cells, lay_out
from recover.bench.chaos import run_job
from recover.bench.invariants import violations
from recover.train.plan import make_plan

POLICY = ("policy=static", "samples=partitioned")  # the one with all roles
LIMIT = 180.0  # seconds for one launch: then it hangs
BEGIN, END = "<!-- matrix: {} -->", "<!-- end of matrix: {} -->"


def matrix(words: Sequence[str], launches: int | None, write: Path | None) -> int:
    """Returns 0 if every cell held, otherwise 1. `launches`: only so many, those that serve most cells."""
    started, served, broken = time.monotonic(), set[Cell](), set[Cell]()
    place = Path(tempfile.mkdtemp(prefix="recover-matrix-"))
    words = [*POLICY, *words]
    config = make_plan(words, place / "run", (), None).config
    if config.policy != "static":
        raise ValueError(
            f"policy={config.policy!r}: the roles of the matrix are those of policy=static; leave it out"
        )
    plan = list(islice(lay_out(all_cells(), config.replicas, config.replica_size, "static"), launches))
    for number, launch in enumerate(plan, start=1):
        run_dir = place / f"launch-{number}"
        began, laws = time.monotonic(), list(run_launch(words, launch, run_dir))
        served |= launch.cells
        print(
            f"launch {number} of {len(plan)}: {len(launch.faults)} deaths, {len(launch.cells)} cells, "
            f"{time.monotonic() - began:.1f} s: {'ok' if not laws else '; '.join(laws)}",
            flush=True,
        )
        if laws:
            broken |= launch.cells
            print(f"  schedule: {' '.join(map(str, launch.faults))}\n  evidence: {run_dir}", flush=True)
        else:
            shutil.rmtree(run_dir)
    seconds = time.monotonic() - started
    deaths = sum(len(launch.faults) for launch in plan)
    text = [
        f"`parallel={config.parallel}`: {len(served - broken)} of {len(served)} cells held; {deaths} deaths in "
        f"{len(plan)} launches of {config.replicas} x {config.replica_size} ranks, {seconds:.0f} s.",
        "",
        *table(served, broken),
    ]
    print("\n".join(text))
    if write is not None:
        insert(write, config.parallel, text)
    if not broken:
        shutil.rmtree(place)
    return 1 if broken else 0


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


def insert(page: Path, name: str, lines: Sequence[str]) -> None:
    """Replace what stands between the marks of this name."""
    text = page.read_text()
    begin, end = BEGIN.format(name), END.format(name)
    if begin not in text or end not in text:
        raise ValueError(f"{page} has no place for this table; put the lines {begin} and {end} into it")
    before, rest = text.split(begin, 1)
    after = rest.split(end, 1)[1]
    page.write_text(f"{before}{begin}\n" + "\n".join(lines) + f"\n{end}{after}")
