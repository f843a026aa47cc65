"""The cost of several hosts and of rejoins: arithmetic on events made by hand, with known answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from recover_lab.bench import measure, rejoin, rejoin_hosts
from recover_lab.bench.peers import judge
from recover_lab.bench.rejoin import _away
from recover_lab.bench.several_hosts import kill_samples, link_sample, strikes_on, without_the_lost
from recover_lab.peers.costs import RejoinCosts, RestartCosts
from recover_lab.peers.ended import BenchmarkError
from recover_lab.peers.host_stage import LocalPool
from recover_lab.peers.rejoin import joins, rejoin_times, stages
from recover_lab.peers.scene import VOCAB, Scene, hidden_for
from recover_lab.peers.torchft_runs import TorchftUnavailable

from recover.runs.records.kinds import Event


def event(at: float, what: str, rank: int = 0, **facts: Any) -> Event:
    return {"at": at, "what": what, "rank": rank, "life": 0, **facts}


def incident(kind: str = "lost", **facts: float) -> dict[str, Any]:
    zeros = dict.fromkeys(
        ("detect", "repair", "restore", "redo", "noticed_at", "transfer", "stall", "warm_up"), 0.0
    )
    return {"kind": kind, "bytes": 0, "discarded": 0, **zeros, **facts}


def step_end(at: float, step: int, replicas: int, rank: int = 0, **facts: Any) -> Event:
    whole = {"microbatches": 6, "redone": 0.0, "incidents": [], **facts}
    return event(at, "step-end", rank, step=step, replicas=replicas, **whole)


def returning_run() -> list[Event]:
    """A run with steps of one second: one of three replicas dies at 3.5, in the step that ends at 4.2, and has joined
    again in the step that ends at 8."""
    join = incident("joined", stall=0.7, repair=0.1, transfer=0.5, bytes=5_000_000, warm_up=1.5)
    return [
        *(step_end(float(step), step, 3) for step in (1, 2, 3)),
        event(3.5, "failure", 2, step=4),
        step_end(4.1, 4, 2),
        step_end(4.2, 4, 2, rank=1),
        *(event(at, what, 3) for at, what in ((3.9, "start"), (4.4, "imported"), (5.0, "built"))),
        step_end(5.2, 5, 2),
        step_end(6.2, 6, 2),
        step_end(7.9, 7, 3, rank=3, incidents=[incident("joined", stall=0.2, bytes=5_000_000)]),
        step_end(8.0, 7, 3, incidents=[join]),
        step_end(9.0, 8, 3),
    ]


def test_rejoin_is_timed_from_the_death_to_the_first_complete_step() -> None:
    back = rejoin_times(returning_run(), lambda each: each["replicas"] == 3)
    assert (back.again, back.whole, back.wait) == pytest.approx((0.7, 4.5, 0.8))
    assert _away(returning_run(), 3) == pytest.approx([4.4]), "when the first one of all has committed it"
    (join,) = joins(returning_run())
    assert (join["stall"], join["bytes"]) == (0.7, 5_000_000), "of those who waited, not of the one who came"
    assert list(stages(returning_run()).values()) == pytest.approx([0.4, 0.5, 0.6, 0.4, 2.5])
    with pytest.raises(BenchmarkError, match="has not rejoined"):
        rejoin_times(returning_run(), lambda each: each["replicas"] == 4)


def test_rejoin_time_excludes_a_step_the_dead_rank_had_voted_for() -> None:
    late = [
        step_end(3.55, 4, 3) if each["what"] == "step-end" and each["step"] == 4 else each
        for each in returning_run()
    ]
    back = rejoin_times(late, lambda each: each["replicas"] == 3)
    assert (back.again, back.whole) == pytest.approx((1.7, 4.5))
    restarted = rejoin_times(late, lambda each: True)  # where a step is all or nothing
    assert restarted.again == restarted.whole == pytest.approx(0.05)


def test_kill_time_is_that_of_the_slowest_survivor_without_redone_work() -> None:
    slow = incident(noticed_at=10.1, detect=0.05, repair=0.2, restore=0.01, redo=0.5)
    events = [
        event(10.0, "failure", 2, step=4),
        step_end(10.8, 4, 2, incidents=[incident()], redone=0.3),
        step_end(10.9, 4, 2, rank=1, incidents=[slow], redone=0.4),
    ]
    (sample,) = kill_samples(events, 6)
    assert sample == pytest.approx(
        {
            "whole": 0.9,
            "less_redone": 0.5,
            "notice": 0.1,
            "drain": 0.05,
            "repair": 0.2,
            "restore": 0.01,
            "redo": 0.5,
            "discarded": 0,
        }
    )
    with pytest.raises(BenchmarkError, match="not committed on 7 microbatches"):
        kill_samples(events, 7)


def test_loss_time_excludes_a_step_without_missing_replicas() -> None:
    events = [
        event(10.0, "failure", 4, step=7),
        step_end(10.04, 7, 6, microbatches=6),
        event(15.1, "discarded", step=8),
        step_end(15.5, 8, 4, microbatches=4),
    ]
    assert judge(without_the_lost(events, 6)) == {"seconds": 5.5, "microbatches": 4, "discarded": 1}


def test_host_bench_strikes_every_host_and_spares_one_rank_of_the_first() -> None:
    strikes = strikes_on(LocalPool(3, "10.0.0.1"), 2)
    assert [(strike.what, strike.host, strike.replica) for strike in strikes] == [
        ("rank", "h3", 5),
        ("rank", "h2", 3),
        ("rank", "h1", 1),
        ("host", "h3", 4),
    ]
    assert strikes[0].words() == "4:5:in-reduce"
    assert strikes[-1].words() == "13:4:in-reduce=stall:120"
    with pytest.raises(BenchmarkError, match="no link can be cut"):
        LocalPool(3, "10.0.0.1").cut("h3")


def costs(**changes: float) -> RejoinCosts:
    pieces = {"recovery": 0.1, "join": 0.15, "away": 6.0, "full": 1.0, "less": 1.25} | changes
    return RejoinCosts(5, RestartCosts(step=1.0, save=0.05, stall=9.0), **pieces)


def test_absent_replica_costs_its_share_of_the_steps() -> None:
    # A failure every 1000 steps: for 6 s one of five replicas is missing.
    assert costs().ours(1000) == pytest.approx(1000 + 0.1 + 0.15 + 6.0 / 5, rel=1e-3)
    assert costs().missing(1000) == pytest.approx(6.0 / 1001, rel=0.01)
    # A failure every second: as each replica is away for 6 s, several are away at once, and never all of them.
    assert 1 < costs().missing(1) < 5
    assert costs().ours(1) > 1.25


def test_rejoining_replicas_beat_a_restart_at_every_failure_rate() -> None:
    assert costs().crossing() is None
    assert costs().calm_ratio == 1.0
    assert costs(full=1.1, less=1.4).calm_ratio == pytest.approx(1 / 1.1)
    assert costs(join=60.0).crossing() is not None, "a join that stalls for a minute is worse than a restart"


@pytest.mark.parametrize("megabytes", [1, 5, 50, 200])
def test_host_bench_scene_has_the_requested_size(megabytes: float, tmp_path: Path) -> None:
    wide = hidden_for(megabytes)
    words = Scene(hidden=wide).words(tmp_path)
    shape = json.loads((tmp_path / "model.json").read_text())
    assert words[0] == f"model={tmp_path / 'model.json'}"
    assert shape["hidden_size"] == wide
    layer = 3 * wide * wide + 3 * wide * shape["intermediate_size"]
    state = 12 * (2 * layer + 2 * VOCAB * wide)
    assert megabytes * 0.9 < state / 1e6 < megabytes * 1.4


@pytest.fixture
def on_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up facts of a machine, so that the bench does not examine this one."""
    machine = dict.fromkeys(("cores", "processor", "architecture", "torch", "openmpi"), "of paper")
    monkeypatch.setattr(measure, "origin", lambda: {"machine": machine})


def failing_run(scene: Scene, away: int) -> list[Event]:
    """A run of ReCoVer: steps of a second, and of 1.5 s while a replica is away, `away` steps after each failure."""
    events, at, lost_until = list[Event](), 0.0, 0
    kills = dict(scene.kills)
    for number in range(1, scene.steps + 1):
        events.append(event(at, "step-begin", step=number))
        less = number < lost_until
        took, incidents = 1.5 if less else 1.0, []
        if number in kills:
            events.append(event(at + 0.9, "failure", kills[number], step=number))
            took, lost_until, less = took + 0.2, number + away, True
            incidents = [incident()]
        if number == lost_until:
            incidents, took = [incident("joined", stall=0.25, bytes=1)], took + 0.25
        at += took
        replicas = scene.replicas - less
        events.append(step_end(at, number, replicas, incidents=incidents, loss=1.0))
    return events


def restarting_run(scene: Scene) -> list[Event]:
    """A run of checkpoint-restart: steps of a second, a stall of 8 s after each failure, and back to the last
    checkpoint."""
    events, at, life, number, kills = list[Event](), 0.0, 0, 1, dict(scene.kills)
    while number <= scene.steps:
        told = {"life": life, "step": number}
        events.append(event(at, "step-begin") | told)
        if number in kills:
            del kills[number]
            events.append(event(at + 0.9, "failure") | told)
            at, life, number = at + 8.9, life + 1, (number - 1) // scene.save_every * scene.save_every + 1
            events.append(event(at - 4, "start") | {"life": life})
            continue
        at += 1.0
        events.append(event(at, "step-end", loss=1.0) | told)
        if not number % scene.save_every:
            for what, late in (("save-begin", 0.0), ("save-end", 0.1)):
                events.append(event(at + late, what) | told)
            at += 0.1
        number += 1
    return events


@pytest.mark.usefixtures("on_paper")
def test_tokens_per_hour_are_compared_from_the_first_failure_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(replicas=4, accum=1)
    monkeypatch.setattr(rejoin, "calibrate", lambda scene: RestartCosts(1.0, 0.1, 8.0))
    monkeypatch.setattr(rejoin, "run_ours_rejoining", lambda scene, place: failing_run(scene, 4))
    monkeypatch.setattr(rejoin, "run_baseline", lambda scene, place: restarting_run(scene))
    results = rejoin.bench_multi_rejoining(scene, 12, (1, 2), tmp_path / "rejoin.json")
    assert [duel["interval"] for duel in results["duels"]] == [12, 24]
    first, second = results["duels"]
    assert first["away"] == pytest.approx([6.05, 6.05]), (
        "a step struck, three with one less, and one that it joins"
    )
    assert first["ratio"] > second["ratio"] > 1
    assert results["calm_ratio"] == pytest.approx(1.0)
    assert results["crossing"] is None
    costs = results["costs"]
    assert (costs["full"], costs["less"], costs["join"]) == pytest.approx((1.0, 1.5, 0.25))
    assert json.loads((tmp_path / "rejoin.json").read_text())["returning"]["crossing"] is None
    monkeypatch.setattr(rejoin, "run_ours_rejoining", lambda scene, place: failing_run(scene, 1000))
    with pytest.raises(BenchmarkError, match="no replica rejoined within 12 steps"):
        rejoin.bench_multi_rejoining(scene, 12, (1,), None)


@pytest.mark.usefixtures("on_paper")
def test_rejoin_table_compares_systems_and_names_absent_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*_: object) -> Path:
        raise TorchftUnavailable("it has no wheel for oak")

    monkeypatch.setattr(rejoin_hosts, "install_torchft", absent)
    monkeypatch.setattr(
        rejoin_hosts, "run_ours_rejoining", lambda scene, place, awaited, ready: returning_run()
    )
    baseline = Scene(replicas=3, steps=10, kills=((6, 2),), save_every=2)
    monkeypatch.setattr(rejoin_hosts, "run_baseline", lambda scene, place: restarting_run(baseline))
    results = rejoin_hosts.bench_return(3, 0.1, (1,), 2, None, tmp_path / "return.json")
    (size,) = results["sizes"]
    assert size["bytes"] == 5_000_000
    assert size["bound"] == max(0.15, 1.3 * size["bytes"] / size["link_bytes_per_second"])
    assert size["ours"]["stall"]["median"] == pytest.approx(0.7)
    assert size["ours"]["rest"]["median"] == pytest.approx(0.1)
    assert size["restart"]["wait"] == pytest.approx(8.0)
    assert size["torchft"] == {"not_measured": "it has no wheel for oak"}


def test_broken_link_is_timed_from_its_detection_to_the_commit_of_the_last_survivor() -> None:
    noticed = [incident(noticed_at=15.0, repair=7.0)]
    events = [
        step_end(9.0, 4, 6),
        event(10.0, "failure", 10**6, step=4),
        step_end(22.5, 5, 4, incidents=noticed),
        step_end(23.0, 5, 4, rank=1, incidents=noticed),
        step_end(24.0, 6, 4),
    ]
    sample = link_sample(events, 6)
    assert (sample["notice"], sample["after"], sample["whole"]) == (5.0, 8.0, 13.0)
    for wrong in (events[:2] + events[4:], [*events, step_end(25.0, 7, 4, microbatches=4)]):
        with pytest.raises(BenchmarkError):
            link_sample(wrong, 6)
