"""Campaigns before anything is launched: every cell is served, every draw can be had again."""

from __future__ import annotations

from pathlib import Path

import pytest
from training import small_world

from recover.chaos.campaign import schedule_for, strike_newcomers
from recover.chaos.cells import MODES, PLACES, RECOVERIES, ROLES, Cell, all_cells, lay_out
from recover.chaos.matrix import POLICY, insert, plan_launches, slice_of, table
from recover.faults import LOCATIONS, parse_fault
from recover.faults.locations import JOIN_PHASES, OF_MICROBATCHES, OUTSIDE, REPAIR_PHASES
from recover.faults.schedule import impossible, survivors
from recover.train.config import parse


def test_the_matrix_serves_every_cell_with_faults_that_can_strike() -> None:
    assert {place.partition(":")[0] for place in (*PLACES, *RECOVERIES)} == set(LOCATIONS) - set(OUTSIDE)
    launches = list(lay_out(all_cells(), 8, 2, "static"))
    served = set().union(*(launch.cells for launch in launches))
    # A spare that is not used up stays one: there is never extra work for it to die in.
    assert set(all_cells()) - served == {Cell("extra", "spare", "then")}
    for launch in launches:
        every = launch.checkpoint_every
        assert list(impossible(launch.faults, 8, 2, launch.steps, every)) == [], launch.faults
        assert len({fault.replica for fault in launch.faults}) == len(launch.faults) < 8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["replicas=1"], "replicas=1: nobody would be left"),
        (["replicas=4", "policy=balanced"], "leave it out"),
        (["replicas=4", "parallel=hsdp"], "add shard=2"),
    ],
)
def test_a_matrix_that_cannot_be_run_is_refused_before_anything_starts(
    tmp_path: Path, words: list[str], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        plan_launches([*POLICY, *small_world(tmp_path), *words], all_cells())
    config, whole = plan_launches([*POLICY, *small_world(tmp_path), "replicas=2", "accum=3"], all_cells())
    assert (config.replicas, {launch.global_batch for launch in whole}) == (2, {2, 3})


def test_a_drawn_run_can_be_had_again_by_its_seed() -> None:
    config = parse({"replicas": "5", "steps": "12"})
    schedules = [schedule_for(config, seed) for seed in range(300)]
    assert schedules == [schedule_for(config, seed) for seed in range(300)]
    faults = [fault for schedule in schedules for fault in schedule]
    assert {fault.location for fault in faults} >= set(LOCATIONS) - {"checkpoint", *OUTSIDE}
    assert {"kill", "exit", "stop", "corrupt:weights"} < {fault.action for fault in faults}
    assert {"hold", "stall", "sample"} < {fault.kind for fault in faults}
    for (
        schedule
    ) in schedules:  # at most one of those that live is not stalled; who is fenced may be the one spared
        if stalls := [fault for fault in schedule if fault.kind == "stall"]:
            dead = {fault.replica for fault in schedule if fault.lethal and fault.step <= stalls[0].step}
            assert len({*range(5)} - dead - {fault.replica for fault in stalls}) <= 1
        assert survivors(schedule, 5) > any(fault.kind == "sample" for fault in schedule)
    assert any(fault.after for fault in faults)
    assert all(list(impossible(schedule, 5, 1, 12)) == [] for schedule in schedules)


def test_those_who_come_back_are_struck_at_every_place_that_there_is_for_them() -> None:
    config = parse({"replicas": "4", "steps": "300"})
    schedules = [strike_newcomers(config, seed) for seed in range(300)]
    assert schedules == [strike_newcomers(config, seed) for seed in range(300)]
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


def test_a_matrix_is_run_in_slices_that_make_the_whole() -> None:
    whole = plan_launches([*POLICY, "replicas=8"], all_cells())[1]
    slices = [slice_of(whole, 3, skip) for skip in range(0, len(whole), 3)]
    assert [launch for each in slices for launch in each] == whole
    assert slice_of(whole, None, 0) == whole
    with pytest.raises(ValueError, match=f"--skip 999: the matrix takes {len(whole)} launches in all"):
        slice_of(whole, None, 999)


def test_the_table_goes_to_its_place_in_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- matrix: ddp -->\nold\n<!-- end of matrix: ddp -->\nafter\n")
    cells = {Cell("vote", "major", mode) for mode in MODES}
    insert(page, "ddp", list(table(cells, {Cell("vote", "major", "two")})))
    text = page.read_text()
    assert "| `vote` | 2/3 |" + " - |" * (len(ROLES) - 1) in text
    assert (text.startswith("before"), text.endswith("after\n"), "old" in text) == (True, True, False)
    with pytest.raises(ValueError, match="no place for this table"):
        insert(page, "hsdp", [])
