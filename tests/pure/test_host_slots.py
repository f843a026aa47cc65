"""Slots of a host: which are used again after a loss, and which are not."""

from __future__ import annotations

import json
import signal

import pytest

from recover.job.host_options import HostOptions, room_for
from recover.launch.hosts.options import HostPart, read_options
from recover.launch.hosts.slots import SETTLE, UNREACHED, HostSlots
from recover.launch.preflight import Refusal
from recover.world.membership import ExcludedError
from recover.world.rank_exit import UNFIT, End

KILLED = -signal.SIGKILL


def marker(end: End, detail: str = "") -> str:
    return json.dumps({"end": str(end), "detail": detail})


def lose(slots: HostSlots, at: float, left: str = "", code: int = KILLED, slot: int = 0) -> str:
    slots.take(slot, at)
    return slots.leave(slot, left, code, at + 1)


def test_rank_ids_suffice_for_a_thousand_rejoins() -> None:
    assert [room_for(size) for size in (1, 8, 10, 64)] == [10_000, 10_000, 10_000, 64_000]


@pytest.mark.guarantee(
    "Rejoining replicas",
    "A slot is free after a first loss and rests after another, and slots of one replica become free "
    "together.",
)
def test_slot_is_free_after_a_first_loss_and_rests_after_another() -> None:
    slots = HostSlots(2, delay=5, forgive=0)
    assert slots.free(0) == [0, 1]
    assert slots.next_free_in(0) == float("inf")
    for died, rests in ((10, SETTLE), (20, 5), (30, 5)):
        slots.take(0, died - 1)
        assert slots.free(died) == [1]
        assert slots.leave(0, "", KILLED, died) == ""
        assert slots.next_free_in(died) == pytest.approx(rests)
        assert slots.free(died + rests - 0.01) == [1]
        assert slots.free(died + rests) == [0, 1]


@pytest.mark.guarantee(
    "Rejoining replicas",
    "A slot is free after a first loss and rests after another, and slots of one replica become free "
    "together.",
)
def test_slots_of_one_replica_become_free_together() -> None:
    """Otherwise a replica would be assembled from the first of these slots and a free slot on another host."""
    slots = HostSlots(4, delay=0, forgive=600)
    for slot in range(4):
        slots.take(slot, 0)
    for number, slot in enumerate((2, 0, 3, 1)):
        slots.leave(slot, "", KILLED, 10 + number * SETTLE / 2)
    last = 10 + 3 * SETTLE / 2
    assert slots.free(last + SETTLE * 0.99) == []
    assert slots.free(last + SETTLE) == [0, 1, 2, 3]


def test_slot_that_kills_twice_is_not_used_again_and_is_named() -> None:
    slots = HostSlots(1, delay=0, forgive=600)
    assert lose(slots, 0) == ""
    why = lose(slots, 10, marker(End.RAISED, "ValueError: no"))
    assert why.startswith("2 ranks have died there (killed by SIGKILL; raised: ValueError: no)")
    assert slots.free(1e9) == []


@pytest.mark.guarantee(
    "Rejoining replicas",
    "A slot stays good after a loss caused by others, is retired at once for broken hardware, and recovers "
    "after long work.",
)
@pytest.mark.parametrize("end", [End.ORPHAN, End.EXCLUDED, End.UNNEEDED, End.LEFT])
def test_slot_of_a_rank_lost_because_of_others_stays_good(end: End) -> None:
    slots = HostSlots(1, delay=0, forgive=600)
    for number in range(10):
        assert lose(slots, 10 * number, marker(end)) == ""
    assert slots.free(1e9) == [0]


def test_slot_of_a_rank_behind_a_broken_link_rests_and_stays_good() -> None:
    """The replica may join again when the link has healed, and does not try without a pause until then."""
    slots = HostSlots(1, delay=0, forgive=600)
    for number in range(10):
        slots.take(0, 100 * number)
        evicted = json.dumps(
            {"end": "excluded", "detail": "rank 1 was evicted: its link is broken to rank 0; so"}
        )
        assert slots.leave(0, evicted, -9, 100 * number) == ""
        assert slots.free(100 * number + UNREACHED / 2) == []
        assert slots.free(100 * number + UNREACHED + 1) == [0]


@pytest.mark.guarantee(
    "Membership",
    "Joining ranks are removed before members when all fail to build a carrier, and the slot of such a rank "
    "is struck.",
)
def test_slot_of_a_rank_that_cannot_build_a_carrier_is_struck() -> None:
    """A new rank there would fail again and again, and each time the others would wait for it."""
    slots = HostSlots(1, delay=0, forgive=600)
    reason = f"{UNFIT} 3 rounds of a repair (the carrier failed here)"
    left = marker(End.EXCLUDED, str(ExcludedError(3, (0, 1), False, reason)))
    assert lose(slots, 0, left) == ""
    assert "the carrier failed here" in lose(slots, 10, left)
    assert slots.free(1e9) == []


@pytest.mark.guarantee(
    "Rejoining replicas",
    "A slot stays good after a loss caused by others, is retired at once for broken hardware, and recovers "
    "after long work.",
)
def test_slot_deaths_are_forgotten_after_long_work() -> None:
    slots = HostSlots(1, delay=0, forgive=600)
    for number in range(5):
        slots.take(0, 1000 * number)
        assert slots.leave(0, "", KILLED, 1000 * number + 600) == ""
    assert lose(slots, 10_000) != "", "the last one has not worked for long"


@pytest.mark.guarantee(
    "Rejoining replicas",
    "A slot stays good after a loss caused by others, is retired at once for broken hardware, and recovers "
    "after long work.",
)
@pytest.mark.parametrize(
    ("left", "code"),
    [
        ("", -signal.SIGBUS),
        (marker(End.RAISED, "RuntimeError: CUDA error: uncorrectable ECC error encountered"), KILLED),
        (marker(End.RAISED, "OSError: [Errno 5] Input/output error"), KILLED),
    ],
)
def test_slot_with_suspected_broken_hardware_is_retired_at_once(left: str, code: int) -> None:
    slots = HostSlots(2, delay=0, forgive=0)
    assert "broken hardware" in lose(slots, 0, left, code, slot=1)
    assert slots.free(1e9) == [0]


def part(**more: object) -> HostPart:
    options = {"nnodes": "2:3", "nproc_per_node": "4", "rdzv_endpoint": "h", "rdzv_id": "j"}
    return read_options(HostOptions(**options | more), {})  # type: ignore[arg-type]


def test_standbys_imply_rejoin_and_invalid_counts_are_refused() -> None:
    assert part(standby=1).returns
    assert part(returns=True).returns
    assert not part().returns
    for name, value in (("standby", -1), ("return_delay", -1.0), ("forgive", float("nan"))):
        with pytest.raises(Refusal, match=f"--{name.replace('_', '-')} is"):
            part(**{name: value})
