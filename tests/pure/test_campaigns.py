"""Campaigns before anything is launched: every cell is served, and every draw can be repeated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from recover_lab.chaos.campaign import (
    LocalMachine,
    chaos,
    pace_for_joins,
    schedule_for,
    strike_joining_replicas,
)
from recover_lab.chaos.cells import MODES, PLACES, RECOVERIES, ROLES, Cell, all_cells, lay_out
from recover_lab.chaos.matrix import POLICY, insert, plan_launches, slice_of, table
from recover_lab.chaos.platforms import CampaignRun
from training import small_world

from recover.faults import LOCATIONS, parse_fault
from recover.faults.locations import (
    IN_INSTALMENTS,
    JOIN_PHASES,
    OF_MICROBATCHES,
    OUTSIDE,
    REPAIR_PHASES,
    VERIFIED,
)
from recover.faults.schedule import impossible, survivors
from recover.train.config import parse


def test_matrix_serves_every_cell_with_faults_that_can_strike() -> None:
    assert {place.partition(":")[0] for place in (*PLACES, *RECOVERIES)} == set(LOCATIONS) - {
        *OUTSIDE,
        *VERIFIED,
        *IN_INSTALMENTS,
    }
    launches = list(lay_out(all_cells(), 8, 2, "static"))
    served = set().union(*(launch.cells for launch in launches))
    # A spare that is not needed for its sum stays a spare: it never gets extra work in which it could die.
    assert set(all_cells()) - served == {Cell("extra", "spare", "then")}
    for launch in launches:
        every = launch.checkpoint_every
        assert list(impossible(launch.faults, 8, 2, launch.steps, every)) == [], launch.faults
        assert len({fault.replica for fault in launch.faults}) == len(launch.faults) < 8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["replicas=1"], "replicas=1: no replica would be left"),
        (["replicas=4", "policy=balanced"], "leave it out"),
        (["replicas=4", "parallel=hsdp"], "add shard=2"),
    ],
)
def test_matrix_that_cannot_run_is_refused_before_the_start(
    tmp_path: Path, words: list[str], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        plan_launches([*POLICY, *small_world(tmp_path), *words], all_cells())
    config, whole = plan_launches([*POLICY, *small_world(tmp_path), "replicas=2", "accum=3"], all_cells())
    assert (config.replicas, {launch.global_batch for launch in whole}) == (2, {2, 3})


def test_drawn_run_is_reproduced_by_its_seed() -> None:
    config = parse({"replicas": "5", "steps": "12"})
    schedules = [schedule_for(config, seed) for seed in range(300)]
    assert schedules == [schedule_for(config, seed) for seed in range(300)]
    faults = [fault for schedule in schedules for fault in schedule]
    assert {fault.location for fault in faults} >= set(LOCATIONS) - {
        "checkpoint",
        *OUTSIDE,
        *VERIFIED,
        *IN_INSTALMENTS,
    }
    assert {"kill", "exit", "stop", "corrupt:weights"} < {fault.action for fault in faults}
    assert {"hold", "stall", "sample"} < {fault.kind for fault in faults}
    for (
        schedule
    ) in schedules:  # at most one living replica is not stalled; a fenced one may be the one spared
        if stalls := [fault for fault in schedule if fault.kind == "stall"]:
            dead = {fault.replica for fault in schedule if fault.lethal and fault.step <= stalls[0].step}
            assert len({*range(5)} - dead - {fault.replica for fault in stalls}) <= 1
        assert survivors(schedule, 5) > any(fault.kind == "sample" for fault in schedule)
    assert any(fault.after for fault in faults)
    assert all(list(impossible(schedule, 5, 1, 12)) == [] for schedule in schedules)


def test_drawn_faults_strike_rejoining_replicas_at_every_location() -> None:
    config = parse({"replicas": "4", "steps": "300"})
    schedules = [strike_joining_replicas(config, seed) for seed in range(300)]
    assert schedules == [strike_joining_replicas(config, seed) for seed in range(300)]
    faults = [fault for schedule in schedules for fault in schedule]
    assert {fault.location for fault in faults if fault.asks} == {"repair", *OUTSIDE}
    assert {fault.detail for fault in faults if fault.location == "repair"} == {*REPAIR_PHASES, *JOIN_PHASES}
    assert {fault.location for fault in faults if fault.joined} == (
        set(PLACES) - {"checkpoint", *OF_MICROBATCHES}
    )
    assert any(fault.after for fault in faults)
    for seed, schedule in enumerate(schedules):
        everything = (*schedule_for(config, seed), *schedule)
        assert list(impossible(everything, 4, 1, 300, later=1000)) == []
        assert tuple(map(parse_fault, map(str, schedule))) == schedule


@dataclass
class Run:
    """The files of a run of `FakeGround` that a campaign reads."""

    run_dir: Path
    joined: set[int]
    code: int = 0
    took: tuple[float, float] = (4.0, 1.0)


class FakeGround(LocalMachine):
    """Runs nothing; in run number i the replicas `joins[i]` have joined. The first run is the one without faults."""

    def __init__(self, returns: bool, joins: Sequence[set[int]] = ()) -> None:
        super().__init__(returns)
        self.joins, self.jobs = [set(), *joins], list[CampaignRun]()

    def run(self, job: CampaignRun) -> Any:
        job.run_dir.mkdir(parents=True)
        self.jobs.append(job)
        return Run(job.run_dir, self.joins[len(self.jobs) - 1])

    def violations(self, *_: Any) -> Iterator[str]:
        return iter(())


@pytest.mark.parametrize(
    ("returns", "joins", "code", "said"),
    [
        (True, [{4}, {4, 5}], 0, "2 runs, {} faults, 3 replicas joined, 0 with a violation"),
        (True, [set(), set()], 1, "inconclusive: no replica joined in 2 runs"),
        (False, [set(), set()], 0, "2 runs, {} faults, 0 with a violation"),
    ],
)
def test_campaign_with_rejoins_is_inconclusive_without_a_join(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], returns: bool, joins: Any, code: int, said: str
) -> None:
    platform = FakeGround(returns, joins)
    words = [*small_world(tmp_path / "world"), "replicas=4", "accum=2", "steps=60"]
    assert chaos(words, 7, None, 2, output=tmp_path / "kept", platform=platform) == code
    faults = sum(len(job.faults) for job in platform.jobs)
    assert said.format(faults) in capsys.readouterr().out
    assert not list((tmp_path / "kept").iterdir())


def test_campaign_runs_with_rejoins_last_until_lost_replicas_can_join(tmp_path: Path) -> None:
    """Faults strike in the first third of a run, and steps are so slow that six replicas could start one after the
    other."""
    platform = FakeGround(True, [{4}] * 40)
    words = [*small_world(tmp_path / "world"), "replicas=4", "accum=2", "steps=60"]
    assert chaos(words, 0, None, 40, output=tmp_path / "kept", platform=platform) == 0
    (calm, *struck) = platform.jobs
    assert not any(word.startswith("pace=") for word in calm.words)
    assert {word for job in struck for word in job.words if word.startswith("pace=")} == {"pace=0.200"}
    by_step = [fault.step for job in struck for fault in job.faults if fault.step]
    assert 15 < max(by_step) <= 20
    config = parse({"replicas": "4", "accum": "2", "steps": "60", "pace": "0.1"})
    assert pace_for_joins(config, 4.0, 24.0) == 0.1, "long enough by itself"
    with pytest.raises(
        ValueError, match=r"steps=60 is too short for --return: .* 200 s to start .* give steps="
    ):
        pace_for_joins(config, 200.0, 12.0)


def test_matrix_slices_make_up_the_whole() -> None:
    whole = plan_launches([*POLICY, "replicas=8"], all_cells())[1]
    slices = [slice_of(whole, 3, skip) for skip in range(0, len(whole), 3)]
    assert [launch for each in slices for launch in each] == whole
    assert slice_of(whole, None, 0) == whole
    with pytest.raises(ValueError, match=f"--skip 999: the matrix takes {len(whole)} launches in all"):
        slice_of(whole, None, 999)


def test_matrix_table_is_written_into_its_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- matrix: ddp -->\nold\n<!-- end of matrix: ddp -->\nafter\n")
    cells = {Cell("vote", "major", mode) for mode in MODES}
    insert(page, "ddp", list(table(cells, {Cell("vote", "major", "two")})))
    text = page.read_text()
    assert "| `vote` | 2/3 |" + " - |" * (len(ROLES) - 1) in text
    assert (text.startswith("before"), text.endswith("after\n"), "old" in text) == (True, True, False)
    with pytest.raises(ValueError, match="no place for this table"):
        insert(page, "hsdp", [])
