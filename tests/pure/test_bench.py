"""The arithmetic of the evaluation, on events made by hand with known answers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from recover_lab.bench import measure as measuring
from recover_lab.bench import suite
from recover_lab.bench.figures import FIGURES
from recover_lab.bench.measure import BenchmarkError
from recover_lab.bench.trajectory import distance, lines_of, throughput, totals
from recover_lab.peers.costs import Costs, RestartCosts, rerun_steps
from recover_lab.peers.events import Events, read_events
from recover_lab.peers.metrics import (
    advantage,
    failures,
    interval_throughput,
    progress,
    recoveries,
    recovery_seconds,
    restart_costs,
    restarts,
    step_seconds,
    steps_by_alive,
    tokens_at,
    warm_steps,
)
from recover_lab.peers.scene import Scene, inside
from recover_lab.publish import measured_sources
from recover_lab.publish.measured_sources import measured, sources
from recover_lab.publish.page import build

from recover.runs.records.kinds import Event

TOKENS = 100  # tokens in a step


def event(at: float, what: str, rank: int = 0, life: int = 0, **facts: Any) -> Event:
    return {"at": at, "what": what, "rank": rank, "life": life, **facts}


def step(number: int, begin: float, end: float, life: int = 0, **facts: Any) -> list[Event]:
    """The events of a step on two ranks, of which the second one is always a tenth of a second later."""
    return [
        event(at + late, what, rank, life, step=number, **(facts if what == "step-end" else {}))
        for rank, late in ((0, 0.0), (1, 0.1))
        for at, what in ((begin, "step-begin"), (end - 0.1, "step-end"))
    ]


def restarted_run() -> list[Event]:
    """A run with a checkpoint every 2 steps: saved after step 2, killed in step 3, run again from step 3; steps of one
    second."""
    return sorted(
        [
            *step(1, 10, 11),
            *step(2, 11, 12),
            event(12.0, "save-begin", step=2),
            event(12.1, "save-begin", rank=1, step=2),
            event(12.2, "save-end", step=2),
            event(12.3, "save-end", rank=1, step=2),
            event(12.3, "step-begin", step=3),
            event(12.4, "step-begin", rank=1, step=3),
            event(13.0, "failure", rank=1, step=3),
            event(13.5, "start", rank=1, life=1),
            event(13.6, "start", life=1),
            event(16.0, "imported", life=1),
            event(16.2, "imported", rank=1, life=1),
            event(16.3, "joined", life=1),
            event(16.4, "joined", rank=1, life=1),
            event(18.0, "load-begin", life=1),
            event(18.1, "load-begin", rank=1, life=1),
            event(19.0, "load-end", life=1),
            event(19.2, "load-end", rank=1, life=1),
            *step(3, 19.3, 20.4, life=1),
            *step(4, 20.4, 21.4, life=1),
        ],
        key=lambda each: each["at"],
    )


def surviving_run() -> list[Event]:
    """A run of two replicas; one is killed in step 3, and the other one does its work too."""
    incident = {
        "noticed_at": 12.55,
        "detect": 0.05,
        "repair": 0.2,
        "restore": 0.1,
        "redo": 0.6,
        "discarded": 0,
    }
    return sorted(
        [
            *step(1, 10, 11, replicas=2, incidents=[], loss=3.0),
            *step(2, 11, 12, replicas=2, incidents=[], loss=2.0),
            event(12.0, "step-begin", step=3),
            event(12.5, "failure", rank=1, step=3),
            event(13.6, "step-end", step=3, replicas=1, incidents=[incident], loss=1.0),
            event(13.6, "step-begin", step=4),
            event(15.6, "step-end", step=4, replicas=1, incidents=[], loss=0.5),
        ],
        key=lambda each: each["at"],
    )


def test_restart_timestamps_match_the_paper() -> None:
    (restart,) = restarts(restarted_run())
    stamps = [getattr(restart, letter) for letter in "ABCDEFGH"]
    assert stamps == pytest.approx([12.0, 12.3, 13.0, 13.5, 18.0, 19.2, 19.4, 20.4])
    assert restart.pieces() == pytest.approx(
        {"save": 0.3, "normal": 0.7, "handling": 0.5, "load": 1.2, "restart": 4.7, "rerun": 1.0}
    )
    assert sum(restart.pieces().values()) == pytest.approx(restart.H - restart.A)
    assert restart.stall == pytest.approx(6.4)
    assert restart.inside_restart() == pytest.approx({"import": 2.7, "join": 0.2, "build": 1.6, "begin": 0.2})
    assert sum(restart.inside_restart().values()) == pytest.approx(restart.pieces()["restart"])


def test_restart_without_a_checkpoint_begins_at_the_first_step() -> None:
    events = [each for each in restarted_run() if "save" not in each["what"] and "load" not in each["what"]]
    (restart,) = restarts([*events, *step(1, 15, 16, life=1), *step(2, 16, 17, life=1)])
    assert (restart.A, restart.B) == (10.0, 10.0)
    assert restart.pieces()["load"] == 0.0


def test_checkpoint_cut_off_and_written_again_counts_once() -> None:
    """The checkpoint of step 4 is incomplete when the job dies in step 5; the job resumes from step 2, saves step 4
    again, and dies once more in step 5."""
    again = [
        event(each["at"] + 2.0, each["what"], each["rank"], 1, step=4)
        for each in (event(20.0, "save-begin"), event(20.2, "save-end"))
    ]
    events = [
        *restarted_run(),
        event(12.5, "save-begin", step=4),
        event(12.6, "save-end", step=4),
        *again,
        event(23.0, "failure", rank=1, life=1, step=5),
        event(24.0, "start", life=2),
        event(24.5, "load-begin", life=2),
        event(25.0, "load-end", life=2),
        *step(5, 25.0, 26.0, life=2),
    ]
    second = restarts(sorted(events, key=lambda each: each["at"]))[1]
    assert (second.A, second.B) == (22.0, 22.2)


def test_recovery_timestamps_match_the_paper() -> None:
    (recovery,) = recoveries(surviving_run(), since=2)
    assert recovery.pieces() == pytest.approx(
        {"normal": 0.5, "detect": 0.1, "repair": 0.2, "restore": 0.1, "redo": 0.7}
    )
    assert sum(recovery.pieces().values()) == pytest.approx(13.6 - 12.0)
    assert recovery.to_json()["stamps"] == {"failure": 0.5, "recovered": 0.9, "complete": 1.6}


def test_restart_cost_is_taken_from_all_runs_with_a_restart() -> None:
    costs = restart_costs([restarted_run(), restarted_run()])
    assert (costs.step, costs.save, costs.stall) == pytest.approx((1.0, 0.3, 6.4))


def test_step_time_excludes_steps_with_deaths() -> None:
    assert step_seconds(surviving_run()) == pytest.approx({1: 1.0, 2: 1.0, 4: 2.0})
    assert steps_by_alive(surviving_run()) == pytest.approx({2: 1.0, 1: 2.0})
    assert recovery_seconds(surviving_run()) == pytest.approx(0.6)  # 1.6 seconds instead of one
    assert step_seconds(restarted_run())[3] == pytest.approx(1.1)  # the second run of the step
    begun = [(e["life"], e["step"]) for e in restarted_run() if e["what"] == "step-begin"]
    firsts = {min(step for life, step in begun if life == each) for each in (0, 1)}
    assert warm_steps(restarted_run()).keys() == step_seconds(restarted_run()).keys() - firsts


def test_effective_throughput_counts_living_ranks() -> None:
    (interval,) = interval_throughput(surviving_run(), 4, TOKENS, alive=[1], provisioned=2)
    assert interval["seconds"] == pytest.approx(3.1)  # from the kill to the end of step 4
    assert interval["effective_throughput"] == pytest.approx(TOKENS / 3.1)
    assert interval["per_provisioned_rank"] == pytest.approx(TOKENS / 6.2)
    (flat,) = interval_throughput(restarted_run(), 4, TOKENS, alive=[2], provisioned=2)
    assert flat["effective_throughput"] == flat["per_provisioned_rank"] == pytest.approx(TOKENS / (8.4 * 2))


def test_throughput_counts_tokens_per_rank_hour() -> None:
    ours = progress(surviving_run(), TOKENS, ranks=2, lost_per_failure=1)
    # Two ranks run until the kill at 2.5 seconds, then one.
    assert [spent for spent, _ in ours] == pytest.approx([0, 2, 4, 5, 6.1, 8.1])
    assert [tokens for _, tokens in ours] == [0, 100, 200, 200, 300, 400]
    theirs = progress(restarted_run(), TOKENS, ranks=2, lost_per_failure=0)
    assert theirs[-1] == pytest.approx((22.8, 400))
    assert tokens_at(theirs, 20.7) == 200
    assert tokens_at(theirs, 20.9) == 300
    more = advantage(ours, theirs)
    assert (more["ours"], more["baseline"], more["more"]) == (400, 200, 1.0)
    assert more["rank_seconds_ratio"] == pytest.approx(22.8 / 8.1)


def test_rolled_back_steps_are_not_counted_twice() -> None:
    events = [each for each in restarted_run() if each["what"] != "failure"]
    again = [*events, *step(4, 22, 23, life=2)]
    assert progress(again, TOKENS, 2, 0)[-1][1] == 400


def test_throughput_of_a_trajectory() -> None:
    scene = Scene(replicas=4, shard=2)
    lines = [
        {"tokens": 800, "seconds": 1.0, "replicas": 4, "loss": 1.0},
        {"tokens": 800, "seconds": 2.0, "replicas": 2, "loss": 0.5},  # two died in it; their time counts
        {"tokens": 800, "seconds": 2.0, "replicas": 2, "loss": 0.5},
    ]
    assert throughput(lines[1], scene) == {"effective_throughput": 100.0, "per_provisioned_rank": 50.0}
    assert totals(lines, scene) == pytest.approx(
        {"effective_throughput": 2400 / 32, "per_provisioned_rank": 2400 / 40, "seconds": 5.0}
    )
    apart = distance([{"loss": 1.0}, {"loss": 1.0}], lines[:2])
    assert apart == {"largest_distance": 0.5, "mean_distance": 0.25}
    stock = lines_of([*step(1, 10, 11, loss=3.0), *step(2, 11, 13, loss=2.0)], scene)
    assert [(line["step"], line["loss"]) for line in stock] == [(1, 3.0), (2, 2.0)]
    assert throughput(stock[1], scene)["effective_throughput"] == pytest.approx(
        scene.tokens_per_step / (1.9 * 8)  # on rank 0's own clock
    )


def test_bench_words_describe_the_replica_as_recover_train_does() -> None:
    assert inside([]) == inside(["parallel=ddp"]) == {}
    assert inside(["parallel=hsdp"]) == {"shard": 2}
    scene = Scene(replicas=3, **inside(["parallel=3d", "tp=2", "pp=2"]))
    assert (scene.ranks, scene.tokens_per_step) == (12, 12 * 64)
    for words in (["parallel=hdsp"], ["shard=2"], ["parallel=hsdp", "shard=0"], ["parallel=3d", "shard=2"]):
        with pytest.raises(ValueError, match="is not understood; write parallel=ddp"):
            inside(words)


RESTARTING = RestartCosts(step=1.0, save=0.5, stall=8.0)


def test_baseline_uses_its_best_checkpoint_interval() -> None:
    # 16 steps, 16/N saves of half a second, N/2 repeated steps: the minimum is at N = 4.
    assert RESTARTING.best_interval(16) == 4
    assert RESTARTING.between_failures(16, 4) == pytest.approx(16 + 2 + 2 + 8)
    assert RESTARTING.between_failures(16, 4, rerun=1) == pytest.approx(16 + 1 + 2 + 8)
    assert rerun_steps([3], 2) == 1
    assert rerun_steps([3, 4], 2) == 1.5


def test_best_checkpoints_for_failures_in_known_steps_are_found() -> None:
    """On average half of an interval is run again; if the failing steps are known, it may be all of it, or a single
    step."""
    cheap = RestartCosts(step=1.0, save=0.1, stall=8.0)
    assert cheap.best_interval(16) == 2
    assert cheap.best_interval(16, kills=[24, 40, 56]) == 3  # 3, 1 and 2 steps run again; with 2 always both
    assert cheap.best_interval(16, kills=[23, 39, 55]) == 2  # one step runs again


def test_production_scenario_makes_progress_in_8_of_18_minutes() -> None:
    steps = RESTARTING.production()
    share = steps * RESTARTING.step / RESTARTING.between_failures(steps, RESTARTING.best_interval(steps))
    assert share == pytest.approx(8 / 18, rel=0.1)  # a whole and even number of steps


def test_crossing_point_is_where_both_systems_are_equal() -> None:
    # With 3 of 4 replicas alive a step takes 4/3 of the time, and a bit more because B does not divide evenly.
    costs = Costs(4, RESTARTING, recovery=0.2, steps_of={4: 1.0, 3: 1.4, 2: 2.0})
    for per_living_rank, ratio in ((True, costs.effective_ratio), (False, costs.wall_ratio)):
        share = costs.crossing(3, per_living_rank)
        assert share is not None
        steps = costs.steps_between(share)
        assert ratio(steps, 3) == pytest.approx(1, rel=0.02)
        assert ratio(steps * 3, 3) < 1 < ratio(steps / 3, 3)
        assert costs.share(steps) == pytest.approx(share)
    even = Costs(4, RESTARTING, recovery=0.0, steps_of={2: 1.99})
    assert even.crossing(2, per_living_rank=True) is None  # even where failures are rare
    level = costs.crossing(2, per_living_rank=True, level=2.23)
    assert level is not None
    assert costs.effective_ratio(costs.steps_between(level), 2) == pytest.approx(2.23, rel=1e-2)
    assert costs.effective_ratio(16, 2) == pytest.approx(28 / (16 * 2.0 + 0.2) * 2)


def test_events_of_all_ranks_are_read_in_order(tmp_path: Path) -> None:
    Events(tmp_path, rank=1).note("failure", at=2.0, step=3)
    Events(tmp_path, rank=0).note("start", at=1.0)
    Events(tmp_path, rank=1, life=1).note("start", at=3.0)
    assert [(e["rank"], e["life"]) for e in read_events(tmp_path)] == [(0, 0), (1, 0), (1, 1)]
    assert failures(read_events(tmp_path))[0]["step"] == 3


def test_bench_part_is_measured_again_when_its_sources_change(tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    assert not measured(path)
    path.write_text(json.dumps({"sources": "of another day"}))
    assert not measured(path)
    path.write_text(json.dumps({"sources": sources()}))
    assert measured(path)
    path.write_text('{"sources": ')
    assert not measured(path)


def test_sources_digest_covers_both_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {package.name for package in measured_sources.PACKAGES} == {"recover", "recover_lab"}
    packages = [tmp_path / "recover", tmp_path / "recover_lab"]
    monkeypatch.setattr(measured_sources, "PACKAGES", packages)
    digests = {sources()}
    for package in packages:
        package.mkdir()
        (package / "module.py").write_text("x = 1")
        digests.add(sources())
    assert len(digests) == 3


def test_evaluation_page_shows_measurements_and_the_papers_figures(tmp_path: Path) -> None:
    machine = {"cores": 2, "processor": "a processor", "torch": "2", "openmpi": "5"}
    (restart,), (recovery,) = restarts(restarted_run()), recoveries(surviving_run(), since=2)
    row = {"N": 2, "baseline": restart.to_json(), "ours": recovery.to_json()}
    row |= {"baseline_cost": 7.7, "ours_cost": 1.1, "step_seconds": 0.9}
    breakdown = {"scene": Scene(replicas=4, tp=2, pp=2).to_json(), "rows": [row]}
    (tmp_path / "breakdown-3d.json").write_text(
        json.dumps({"machine": machine, "sources": sources(), "breakdown": breakdown})
    )
    (tmp_path / "multi-ddp.json").write_text(json.dumps({"sources": "of another day", "multi": {}}))
    text = build(tmp_path, FIGURES).read_text()
    assert "Multi" not in text
    assert "7.7 s" in (tmp_path / "figures.md").read_text()
    assert "Breakdown, 3D" in text
    assert "4 replicas of tp 2 x pp 2" in text
    assert "not paced: a step takes 0.90 s, not 0.60 s" in text
    assert "restart 4.70" in text
    assert "7.70 s" in text
    assert "N = 2" in text
    assert "paced" in text
    assert "<img" in text


def test_bench_part_has_a_call_and_a_place_on_the_page() -> None:
    for long in (False, True):
        for name in suite.parts(long):
            assert name.partition("-")[0] in FIGURES


@pytest.mark.guarantee(
    "Published figures",
    "A benchmark that cannot write its figures measures nothing, and missing package metadata loses none.",
)
@pytest.mark.parametrize(
    ("name", "long"), [(name, long) for long in (False, True) for name in suite.parts(long)], ids=str
)
def test_benchmark_that_cannot_write_its_figures_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, long: bool
) -> None:
    def start(*_: object, **__: object) -> None:
        pytest.fail("something was started")

    (tmp_path / "file").touch()
    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(BenchmarkError, match="cannot be written"):
        suite.parts(long)[name](tmp_path / "file" / f"{name}.json")
    monkeypatch.setattr(measuring, "machine", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        suite.parts(long)[name](tmp_path / f"{name}.json")
    assert not (tmp_path / f"{name}.json").exists()
