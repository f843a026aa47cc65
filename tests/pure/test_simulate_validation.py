"""The simulation compared with closed forms, published figures, and recorded runs of our own."""

from __future__ import annotations

from pathlib import Path

import pytest
from recover_lab.simulate.closed_forms import best_interval, daly, endured, restart_goodput, young
from recover_lab.simulate.learned import fit_alpha_beta, learn
from recover_lab.simulate.published import ft_hsdp_rows, llama_rows, paper_rows, rsc_rows, spare_rows
from recover_lab.simulate.race import SystemRunner
from recover_lab.simulate.replay import compare_with_run, replay
from recover_lab.simulate.scenario import parse_scenario

from recover.faults import parse_faults
from recover.faults.schedule import read_schedule

RECORDED = Path(__file__).parents[1] / "recorded"
MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0


@pytest.mark.guarantee(
    "Simulated clusters",
    "Simulated checkpoint-restart is within 1% of the exact expectation, with the optimum of Daly and Young.",
)
@pytest.mark.parametrize(
    ("between", "optimum"),
    [(24 * HOUR, 117 * MINUTE), (6 * HOUR, 57 * MINUTE), (15 * MINUTE, 9.1 * MINUTE)],
)
def test_best_checkpoint_interval_is_dalys(between: float, optimum: float) -> None:
    """Daly's own examples, with a checkpoint of 5 minutes."""
    assert best_interval(5 * MINUTE, between) == pytest.approx(optimum, rel=0.01)
    assert daly(5 * MINUTE, between) == pytest.approx(optimum, rel=0.02)
    rare = best_interval(1.0, 10 * DAY)
    assert rare == pytest.approx(young(1.0, 10 * DAY), rel=0.01)
    assert rare == pytest.approx(daly(1.0, 10 * DAY), rel=1e-4)


@pytest.mark.guarantee(
    "Simulated clusters",
    "Simulated checkpoint-restart is within 1% of the exact expectation, with the optimum of Daly and Young.",
)
@pytest.mark.parametrize(
    ("save", "restart", "between", "factor"),
    [(60, 600, 6 * HOUR, 1.0), (20, 300, HOUR, 1.0), (20, 300, HOUR, 3.0), (10, 600, 18 * MINUTE, 1.0)],
)
def test_simulated_restart_is_within_one_percent_of_the_exact_expectation(
    save: float, restart: float, between: float, factor: float
) -> None:
    """Failures also occur inside checkpoints and restarts, at the best interval and at an interval that is too long."""
    every = factor * best_interval(save, between)
    scenario = parse_scenario(
        {
            "cluster.nodes": 100,
            "job.replica_gpus": 8,
            "job.accum": 1,
            "job.microbatch_s": 1.0,
            "failures.per_node_day": DAY / between / 100,
            "failures.transient": 1.0,
            "checkpoint.save_s": save,
            "checkpoint.every_s": round(every),
            "restart.detect_s": 0,
            "restart.schedule_s": 0,
            "restart.load_s": 0,
            "restart.start_s": restart,
            "run.days": 15_000 * between / DAY,
        }
    )
    account = SystemRunner(scenario).run("restart", 5)
    expected = restart_goodput(round(every), save, restart, between)
    assert account.goodput(scenario) == pytest.approx(expected, rel=0.01)
    if factor == 1.0:
        for other in (every / 2, every * 2):
            assert restart_goodput(other, save, restart, between) < expected


@pytest.mark.parametrize(("groups", "copies"), [(200, 2), (400, 3)])
def test_in_memory_copies_last_as_long_as_the_closed_form(groups: int, copies: int) -> None:
    scenario = parse_scenario(
        {
            "cluster.nodes": groups,
            "job.replica_gpus": 8,
            "job.microbatch_s": 0.01,
            "failures.per_node_day": 0.1,
            "failures.transient": 1.0,
            "recovery.detect_s": 0,
            "recovery.repair_s": 0,
            "replication.copies": copies,
            "restart.detect_s": 0,
            "restart.schedule_s": 0,
            "restart.load_s": 0,
            "restart.start_s": 0,
            "run.days": 400,
        }
    )
    account = SystemRunner(scenario).run("replication", 1)
    assert account.struck / account.restarts == pytest.approx(endured(groups, copies), rel=0.12)


@pytest.mark.guarantee(
    "Simulated clusters",
    "Published figures are reproduced as documented, with fits and predictions separated.",
)
def test_published_figures_are_reproduced_as_documented() -> None:
    near = {row.what: row for row in (*rsc_rows(2), *llama_rows(2), *ft_hsdp_rows(1))}
    for what, row in near.items():
        if row.kind == "input":
            assert row.target is not None
            assert row.value == pytest.approx(row.target, rel=0.06), what
    (llama,) = (row for what, row in near.items() if "effective training time" in what)
    assert 0.9 < llama.value < 0.95
    stalls = [row.value for what, row in near.items() if "all stall for 10" in what]
    others = [row.value for what, row in near.items() if "others stall for 3" in what]
    assert stalls[0] == pytest.approx(8 / 18, abs=0.01)  # failures evenly spaced
    assert stalls[1] == pytest.approx(0.574, abs=0.03)  # failures at random: exp(-10/18)
    assert others[0] == pytest.approx(15 / 18, abs=0.02)
    assert others[0] < 15 / 18
    assert {row.kind for row in near.values()} == {"input", "fit", "prediction"}
    assert all(row.source and row.because for row in near.values())


def test_scale_page_states_the_papers_ratio_at_other_failure_rates() -> None:
    """The same seeds give the same figures everywhere."""
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "scale.md").read_text()
    head, *rows = paper_rows()
    told = page.split("<!-- paper rows -->")[1].split("<!-- end of paper rows -->")[0]
    assert [f"| {' | '.join(row)} |" for row in (head, *rows)] == [
        line for line in told.strip().splitlines() if "---" not in line
    ]
    at_production = next(row for row in rows if row[0] == "125%")
    assert float(at_production[1].split()[0]) == pytest.approx(2.23, rel=0.1)


@pytest.mark.guarantee(
    "Simulated clusters",
    "Published figures are reproduced as documented, with fits and predictions separated.",
)
def test_spare_system_figures_are_predicted() -> None:
    rows = list(spare_rows(1, 600, days=12.0))
    available = [row for row in rows if "availability" in row.what]
    assert len(available) == 2
    for row in available:
        assert row.target is not None
        assert row.value == pytest.approx(row.target, abs=0.04), row.what
    slowed = {row.what: row.value for row in rows if "availability" not in row.what}
    ours = [value for what, value in slowed.items() if "ReCoVer" in what]
    assert max(ours) < min(value for what, value in slowed.items() if "ReCoVer" not in what)


@pytest.mark.guarantee(
    "Simulated clusters",
    "Recorded runs are replayed with parameters of other runs within 10% of their time and 20% of each "
    "incident.",
)
@pytest.mark.parametrize(
    ("learned", "held"),
    [
        ("ddp-learn", "ddp-test"),
        ("ddp-test", "ddp-learn"),
        ("hsdp-learn", "hsdp-test"),
        ("hsdp-test", "hsdp-learn"),
    ],
)
def test_recorded_run_is_replayed_with_the_parameters_of_another(learned: str, held: str) -> None:
    """The runs are chaos schedules on 6 replicas of one rank and on 4 of two. The simulated time is within 10%, each
    incident within 20%."""
    scenario = parse_scenario(learn([RECORDED / learned]))
    found = compare_with_run(scenario, read_schedule(RECORDED / held / "faults.yaml"), RECORDED / held)
    assert abs(found.total) < 0.10
    assert found.tokens == 0
    assert found.incidents
    for step, (took, played, apart) in found.incidents.items():
        assert abs(apart) < 0.20, f"incident in step {step}: {took:.2f} s, played {played:.2f} s"
    recorded, played_on = found.microbatches
    assert recorded == played_on == {scenario.global_batch}


def test_death_in_the_vote_costs_a_repair_and_no_microbatch() -> None:
    """The recorded runs have no such death alone. All survivors hold the whole sum then, and commit it."""
    scenario = parse_scenario(learn([RECORDED / "ddp-learn"]))
    (voting,) = replay(scenario, parse_faults(["3:2:vote"]), 4).incidents.values()
    (reducing,) = replay(scenario, parse_faults(["3:2:in-reduce"]), 4).incidents.values()
    assert voting == pytest.approx(scenario.repairing(5))
    assert reducing == pytest.approx(voting + scenario.microbatch)


def test_reduction_alpha_and_beta_are_recovered_by_the_fit() -> None:
    alpha, beta = 0.3, 2.5
    points = [
        (ranks, size, 2 * (ranks - 1).bit_length() * alpha + 2 * (ranks - 1) / ranks * size / beta)
        for ranks in (2, 4, 8)
        for size in (1.0, 25.0, 100.0)
    ]
    assert fit_alpha_beta(points) == pytest.approx((alpha, beta))
