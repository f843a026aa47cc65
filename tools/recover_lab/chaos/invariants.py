"""Invariants of every run, with any faults, checked on its run directory."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recover.faults import Fault
from recover.faults.locations import IN_RECOVERY
from recover.launch.session import MEMORY
from recover.runs.records.job_log import job_lines
from recover.runs.records.json_lines import read
from recover.train.config import Config


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended: its run directory, and the exit code of its launcher."""

    run_dir: Path
    code: int
    pid: int  # of the `recover train` process

    def lines(self, name: str) -> list[dict[str, Any]]:
        return read(self.run_dir / name).whole

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return summary

    @property
    def took(self) -> tuple[float, float]:
        """Seconds from the start to the first step, and from the first step to the last."""
        steps = self.lines("steps.jsonl")
        begun = job_lines(self.run_dir)[0]["at"]
        return steps[0]["at"] - begun, steps[-1]["at"] - steps[0]["at"]

    @property
    def joined(self) -> set[int]:
        """Replicas that have joined."""
        lines = self.lines("incidents.jsonl")
        return {replica for line in lines for replica in line.get("joined_replicas") or ()}

    def ranks_that(self, ended: str) -> list[int]:
        """Ranks whose marker file has this ending."""
        ends = {
            int(path.stem): json.loads(path.read_text()) for path in (self.run_dir / "ranks").glob("*.end")
        }
        return [rank for rank, marker in sorted(ends.items()) if marker["end"] == ended]


def violations(
    run: FinishedRun, config: Config, faults: Sequence[Fault], calm: FinishedRun | None = None
) -> Iterator[str]:
    """Every invariant that the run has broken. `calm` is a run of the same job without faults."""
    yield from leftovers(run)
    if run.code != 0:
        yield f"exit code {run.code}"
        return
    if broken := list(_unreadable(run)):
        yield from broken
        return
    yield from _whole(run, config)
    yield from _losses(run, config, faults)
    if calm is not None and config.samples == "exact":
        digests = [[line["data_digest"] for line in each.lines("steps.jsonl")] for each in (run, calm)]
        if digests[0] != digests[1]:
            yield "other samples than in the run without failures"
        if config.reduction == "reproducible":
            if [line["loss"] for line in run.lines("steps.jsonl")] != [
                line["loss"] for line in calm.lines("steps.jsonl")
            ]:
                yield "other losses than in the run without failures"
            if run.summary["parameters_digest"] != calm.summary["parameters_digest"]:
                yield "other parameters than in the run without failures"


def _unreadable(run: FinishedRun) -> Iterator[str]:
    """Records that are missing or torn."""
    for name in ("steps.jsonl", "incidents.jsonl"):
        found = read(run.run_dir / name)
        if found.unreadable:
            yield f"{name} is torn: {found.unreadable} of its lines cannot be read"
        elif found.torn:
            yield f"the last line of {name} is torn"
    try:
        run.summary  # noqa: B018
    except (OSError, ValueError) as error:
        yield f"summary.json cannot be read: {error}"


def _whole(run: FinishedRun, config: Config) -> Iterator[str]:
    """No line is lost or doubled, and every step has B microbatches."""
    steps = run.lines("steps.jsonl")
    if [line["step"] for line in steps] != list(range(1, config.steps + 1)):
        yield f"steps.jsonl has the steps {[line['step'] for line in steps]} of {config.steps}"
    if config.policy != "adaptive" and (
        wrong := [line["step"] for line in steps if line["microbatches"] != config.global_batch]
    ):
        yield f"steps {wrong} were not taken on {config.global_batch} microbatches"
    keys = [(line["step"], line["epoch"]) for line in run.lines("incidents.jsonl")]
    if keys != sorted(set(keys)):
        yield f"incidents.jsonl is out of order: {keys}"


def _losses(run: FinishedRun, config: Config, faults: Sequence[Fault]) -> Iterator[str]:
    """Exactly the replicas with faults are lost, and all survivors have finished."""
    lost = {replica for line in run.lines("incidents.jsonl") for replica in line["dead_replicas"]}
    mortal = {fault.replica for fault in faults if fault.lethal}
    mortal |= set(_lost_over_a_slow_sample(run, config, faults))
    doomed = {fault.replica for fault in faults if must_strike(fault, config.steps)} & {
        *range(config.replicas)
    }
    if innocent := {rank // config.replica_size for rank in run.ranks_that("fenced")} & lost - mortal:
        yield f"replicas {sorted(innocent)} were killed by their peers, and nothing was wrong with them"
    if bystanders := lost - mortal:
        yield f"replicas {sorted(bystanders)} were lost, and nothing was scheduled to happen to them"
    if unharmed := doomed - lost:
        yield f"replicas {sorted(unharmed)} were not lost as scheduled"
    left = len({*range(config.replicas), *run.joined} - lost) * config.replica_size
    done = len(run.ranks_that("done"))
    # A fault by the clock may strike a rank that is already exiting.
    on_the_way_out = sum(
        fault.lethal and fault.after is not None and fault.replica not in lost for fault in faults
    )
    if not left - on_the_way_out <= done <= left:
        yield f"{done} ranks have finished; {left} should have"


def _lost_over_a_slow_sample(run: FinishedRun, config: Config, faults: Sequence[Fault]) -> Iterator[int]:
    """A sample that takes longer than the hang limit may cost the first replica that reads it, and no other."""
    notes = {int(path.stem): json.loads(path.read_text()) for path in (run.run_dir / "ranks").glob("*.slot")}
    for fault in faults:
        if fault.kind == "sample" and config.hang_limit and fault.amount > config.hang_limit:
            blamed = sorted(
                rank // config.replica_size for rank, note in notes.items() if note["step"] == fault.step
            )
            yield from blamed[:1]


def must_strike(fault: Fault, steps: int) -> bool:
    """Whether the run cannot end before this fault has struck. Faults by the clock, in a recovery, over a join or after
    the last comparison may not strike."""
    in_time = fault.step < steps or fault.action != "corrupt:weights"
    return fault.lethal and fault.step > 0 and fault.location not in IN_RECOVERY and in_time


def leftovers(run: FinishedRun) -> Iterator[str]:
    """Processes and directories of the job that are still there."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            environment = Path("/proc", name, "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # the process has ended, or belongs to another user
        if f"RECOVER_RUN_DIR={run.run_dir}".encode() in environment:
            yield f"process {name} of the run is still running"
    for place in (MEMORY, Path(tempfile.gettempdir())):
        for path in place.glob(f"recover-{run.pid}-*"):
            yield f"{path} was left behind"
