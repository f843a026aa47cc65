"""A death at every place of a join and of the steps around it, on real processes: an ordinary death, every time."""

from __future__ import annotations

from pathlib import Path

import pytest
from join_cells import AT_WORK, Cell, all_cells, cells_of_instalments, faults_of, lay_out, play
from joining_ranks import JoiningRanks

from recover.world.fabrics.etcd.server import EtcdServer

pytestmark = pytest.mark.filterwarnings("ignore:.*is etcd 3:UserWarning")
EVENTS = 16  # in one launch, at the most
BATCH = 12  # each of three survivors runs some of the slots of a fourth
SIZES = {"plain": 1, "hsdp": 2, "grid": 4}
INSTALMENT = 8_000  # bytes


def run(
    cells: list[Cell],
    server: EtcdServer,
    prefix: str,
    place: Path,
    kind: str,
    pace: float,
    instalment: int = 0,
) -> tuple[list[Cell], JoiningRanks, set[int]]:
    """Run one launch. Returns the cells that were served, the job, and the ranks that took part in it."""
    size, events = SIZES[kind], lay_out(cells, SIZES[kind])
    served: list[Cell] = []
    left = tuple(range(AT_WORK))
    with JoiningRanks(
        server.endpoint,
        prefix,
        place,
        AT_WORK * size,
        kind,
        size,
        batch=BATCH,
        pace=pace,
        faults=faults_of(events),
        instalment=instalment,
    ) as ranks:
        for replica in left:
            ranks.wait_for(replica * size, 2)
        for event in events:
            if not play(ranks, event):
                left = (*left, event.newcomer)  # the rest of the layout no longer holds
                break
            left = event.left
            served += [event.cell] if event.victims else []
        living = [rank for replica in left for rank in range(replica * size, (replica + 1) * size)]
        ranks.finish(living)
        everybody = range((events[-1].newcomer + 1) * size)
        for rank in everybody:  # no rank is lost but the planned victims and their peers
            if rank not in living:
                assert ranks.end(rank) in ("", "orphan"), (rank, ranks.end(rank))
            assert {line["weight"] for line in ranks.diary(rank)} <= {float(BATCH)}, rank
    return served, ranks, {rank for rank in everybody if ranks.diary(rank)}


@pytest.mark.guarantee(
    "Joining",
    "A death at every location of a join and of its neighbouring steps leaves the bits of a failure-free "
    "run.",
)
@pytest.mark.soak
@pytest.mark.parametrize("instalment", [0, INSTALMENT], ids=["pause", "instalments"])
@pytest.mark.parametrize("kind", SIZES)
def test_death_at_every_location_of_a_join_leaves_failure_free_bits(
    kind: str, instalment: int, server: EtcdServer, prefix: str, tmp_path: Path
) -> None:
    cells = [*cells_of_instalments(), *all_cells()] if instalment else all_cells()
    serve_and_compare(cells, server, prefix, tmp_path, kind, instalment)


@pytest.mark.guarantee(
    "Joining", "A death between two instalments of the state costs a repair, and any other member continues."
)
def test_deaths_between_instalments_leave_failure_free_bits(
    server: EtcdServer, prefix: str, tmp_path: Path
) -> None:
    serve_and_compare(cells_of_instalments(), server, prefix, tmp_path, "plain", INSTALMENT)


def serve_and_compare(
    cells: list[Cell], server: EtcdServer, prefix: str, place: Path, kind: str, instalment: int
) -> None:
    """Launch until every cell was served, and compare with a run without failures."""
    missing, launches, tries = cells, [], 0
    while missing:
        tries += 1
        assert tries < 60, f"never served: {missing}"
        served, *launch = run(
            missing[:EVENTS], server, f"{prefix}{tries}/", place / str(tries), kind, 0.03, instalment
        )
        # A cell that was missed goes to the end, so that the others have their turn.
        rest = [cell for cell in missing if cell not in served]
        missing = rest[1:] + rest[:1] if len(served) < len(missing[:EVENTS]) else rest
        launches.append(launch)
        print(f"{kind}: launch {tries}, {len(served)} deaths, {len(missing)} cells to go", flush=True)
    last = max(ranks.diary(rank)[-1]["step"] for ranks, took_part in launches for rank in took_part)
    with JoiningRanks(
        server.endpoint,
        f"{prefix}calm/",
        place / "calm",
        SIZES[kind],
        kind,
        SIZES[kind],
        steps=last,
        batch=BATCH,
        pace=0.0,
    ) as calm:
        calm.wait_for_ends(range(SIZES[kind]))
        for ranks, took_part in launches:
            assert not ranks.differences(calm, took_part)
