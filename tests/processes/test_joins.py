"""Replicas rejoin, as real processes: some are killed, new ones join, and the bits are those of the calm run."""

from __future__ import annotations

from pathlib import Path

import pytest
from joining_ranks import JoiningRanks
from patience import wait_until

from recover.world.fabrics.etcd.server import EtcdServer

INSTALMENT = 8_000  # bytes

pytestmark = pytest.mark.filterwarnings("ignore:.*is etcd 3:UserWarning")


@pytest.mark.guarantee(
    "Joining",
    "A run that loses replicas and admits others has the bits of a failure-free run, for plain, sharded and "
    "pipelined replicas.",
)
@pytest.mark.guarantee(
    "Joining", "State that is handed over in instalments, while the others train on, has the same bits."
)
@pytest.mark.parametrize(
    ("kind", "replica_size", "instalment"),
    [
        ("plain", 1, 0),
        ("hsdp", 2, 0),
        ("plain", 1, INSTALMENT),
        pytest.param("hsdp", 2, INSTALMENT, marks=pytest.mark.soak),
        *(pytest.param("pipeline", 2, each, marks=pytest.mark.soak) for each in (0, INSTALMENT)),
        *(pytest.param("grid", 4, each, marks=pytest.mark.soak) for each in (0, INSTALMENT)),
    ],
    ids=lambda value: str(value),
)
def test_run_with_losses_and_joins_has_the_bits_of_a_failure_free_run(
    kind: str, replica_size: int, instalment: int, server: EtcdServer, prefix: str, tmp_path: Path
) -> None:
    """Parameters, buffers, optimizer, learning rate, samples, loss and what the user has added, after every step. One
    of three replicas dies and another one joins; then a replica that sent it the state dies."""
    first = range(3 * replica_size)
    with JoiningRanks(
        server.endpoint,
        f"{prefix}rough/",
        tmp_path / "rough",
        len(first),
        kind,
        replica_size,
        instalment=instalment,
    ) as rough:
        rough.wait_for(0, 2)
        rough.kill(replica_size)
        came = rough.start_another()
        assert came[0] == len(first), "numbers are never used twice"
        rough.wait_for(came[0], 2)
        rough.kill(2 * replica_size)
        rough.wait_for(came[0], 4)
        left = [*first[:replica_size], *came]
        last = rough.finish(left)
    with JoiningRanks(
        server.endpoint,
        f"{prefix}calm/",
        tmp_path / "calm",
        replica_size,
        kind,
        replica_size,
        steps=last,
        pace=0.0,
    ) as calm:
        calm.wait_for_ends(range(replica_size))
        assert not rough.differences(calm, [*first, *came])
    told = [incident for line in rough.diary(0) for incident in line["incidents"]]
    assert [(incident["kind"], incident["joined"]) for incident in told] == [
        ("lost", []),
        ("joined", came),
        ("lost", []),
    ]
    assert told[1]["bytes"] > 50_000
    assert (told[1]["steps"] > 2) == bool(instalment)
    assert 0 < told[1]["transfer_ms"] < told[1]["stall_ms"]
    assert [line["step"] for line in rough.diary(came[0])] == list(
        range(rough.diary(came[0])[0]["step"], last + 1)
    )


@pytest.mark.guarantee("Joining", "A death during a join is handled like any other death.")
@pytest.mark.parametrize("victim", [0, 2])
def test_death_during_a_join_is_an_ordinary_death(
    victim: int, server: EtcdServer, prefix: str, tmp_path: Path
) -> None:
    """A third replica joins two others: a sender of the state dies, or the third in its first step."""
    place = "repair:state" if victim == 0 else "forward"
    faults = [f"{step}:{victim}:{place}" for step in range(1, 200)]
    with JoiningRanks(server.endpoint, prefix, tmp_path, 2, faults=faults) as ranks:
        came = ranks.start_another_after(1, 1)
        left = [1, came] if victim == 0 else [0, 1]
        assert wait_until(lambda: bool(ranks.diary(victim, "started")))
        if victim == 0:
            ranks.wait_for(came, 2)
        else:
            assert wait_until(
                lambda: any(i["kind"] == "lost" for line in ranks.diary(1) for i in line["incidents"])
            )
        ranks.finish(left)
        assert {line["weight"] for rank in left for line in ranks.diary(rank)} == {6.0}
        assert ranks.diary(left[0])[-1]["parameters"] == ranks.diary(left[1])[-1]["parameters"]


@pytest.mark.guarantee(
    "Joining",
    "A `step.on_first` call of a dead replica runs on a replica that knows of it, also if only a joined "
    "replica is left.",
)
def test_on_first_runs_although_only_a_joined_replica_is_left(
    server: EtcdServer, prefix: str, tmp_path: Path
) -> None:
    """Of two replicas that are joined by a third, one dies before it does its task, and the other one in the first step
    with the third, which knows nothing of that task."""
    faults = ["2asks:0:advance", "2joined:1:vote"]
    with JoiningRanks(server.endpoint, prefix, tmp_path, 2, faults=faults) as ranks:
        came = ranks.start_another_after(1, 1)
        ranks.wait_for(came, 3)
        last = ranks.finish([came])
        assert {rank: ranks.end(rank) for rank in (0, 1)} == {0: "", 1: ""}, "they were killed"
        done = sorted(line["step"] for rank in range(3) for line in ranks.diary(rank, "once"))
        assert done == list(range(1, last + 1))


@pytest.mark.guarantee("Joining", "A joining replica that hangs on the state it received is fenced.")
@pytest.mark.soak
def test_joining_replica_that_hangs_on_received_state_is_fenced(
    server: EtcdServer, prefix: str, tmp_path: Path
) -> None:
    with JoiningRanks(server.endpoint, prefix, tmp_path, 3, hang_limit=3.0, stuck=True) as ranks:
        came = ranks.start_another_after(0, 3)
        assert wait_until(lambda: ranks.end(came) == "fenced"), ranks.end(came)
        ranks.wait_for(0, len(ranks.diary(0)) + 3)
        ranks.finish(range(3))
        assert not ranks.diary(came)


@pytest.mark.guarantee(
    "Joining", "A joined replica that counts its own steps does not keep the others from ending."
)
def test_joined_replica_that_counts_its_own_steps_does_not_block_the_end(
    server: EtcdServer, prefix: str, tmp_path: Path
) -> None:
    """`for _ in range(steps)`: when the others are done, it wants more steps, and is left behind."""
    with JoiningRanks(server.endpoint, prefix, tmp_path, 2, steps=8, own_count=True) as ranks:
        came = ranks.start_another_after(1, 1)
        ranks.wait_for(came, 1)
        last = ranks.wait_for_ends([0, 1])
        assert wait_until(lambda: ranks.end(came) == "excluded"), ranks.end(came)
        assert ranks.diary(came)[-1]["step"] == last
