"""Invariants of every simulated cluster, under any failures."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from recover_lab.simulate.account import PARTS
from recover_lab.simulate.race import SystemRunner, race
from recover_lab.simulate.scenario import Scenario, parse_scenario
from recover_lab.simulate.scenario_keys import SYSTEMS

SMALL = {
    "cluster.nodes": 64,
    "job.replica_gpus": 16,
    "job.accum": 4,
    "job.microbatch_s": 2.0,
    "failures.per_node_day": 0.05,
    "run.days": 6,
    "run.seeds": 2,
}


def scenario(**values: Any) -> Scenario:
    return parse_scenario({**SMALL, **{key.replace("__", "."): value for key, value in values.items()}})


clusters = st.fixed_dictionaries(
    {
        "cluster__spares": st.integers(0, 12),
        "cluster__nodes_per_rack": st.sampled_from([4, 8]),
        "cluster__nodes_per_switch": st.sampled_from([32, 64]),
        "run__days": st.just(2),
        "job__replica_gpus": st.sampled_from([4, 8, 16, 64]),
        "job__policy": st.sampled_from(["balanced", "paced", "static"]),
        "job__accum": st.integers(1, 9),
        "job__overhead_s": st.sampled_from([0.0, 0.7]),
        "failures__per_node_day": st.sampled_from([0.003, 0.05, 0.5]),
        "failures__process": st.sampled_from(["poisson", "weibull", "regular"]),
        "failures__shape": st.sampled_from([0.7, 3.0]),
        "failures__transient": st.sampled_from([0.0, 0.5, 1.0]),
        "failures__silent": st.sampled_from([0.0, 0.5]),
        "failures__per_rack_day": st.sampled_from([0.0, 0.05]),
        "failures__per_switch_day": st.sampled_from([0.0, 0.3]),
        "failures__burst": st.sampled_from([0.0, 0.4]),
        "failures__burst_nodes": st.sampled_from([2, 6]),
        "failures__repair_hours": st.sampled_from([0.2, 30.0]),
        "stragglers__per_node_day": st.sampled_from([0.0, 0.1]),
        "stragglers__old_share": st.sampled_from([0.0, 0.3]),
        "joining__standby": st.integers(0, 2),
        "joining__stall_s": st.sampled_from([0.0, 3.0]),
        "recovery__repair_s": st.sampled_from([0.1, 40.0]),
        "recovery__restart_at": st.sampled_from([None, 0.0, 0.6]),
        "restart__struck": st.sampled_from(["again", "goes-on"]),
        "run__first_seed": st.integers(0, 10_000),
    }
)


@pytest.mark.guarantee(
    "Simulated clusters",
    "The simulation uses the production policy, and every simulated step of recover has exactly B "
    "microbatches.",
)
@example(  # a loss near the end of a segment of slow steps
    values={
        "failures__per_switch_day": 0.3,
        "failures__burst": 0.4,
        "failures__transient": 0.5,
        "joining__standby": 0,
        "cluster__nodes_per_rack": 8,
        "cluster__nodes_per_switch": 64,
        "failures__burst_nodes": 6,
        "run__days": 2,
        "joining__stall_s": 3.0,
        "failures__process": "poisson",
        "stragglers__per_node_day": 0.1,
        "recovery__restart_at": 0.6,
        "job__accum": 4,
        "restart__struck": "again",
        "failures__shape": 3.0,
        "job__policy": "static",
        "failures__silent": 0.5,
        "job__replica_gpus": 16,
        "failures__per_node_day": 0.003,
        "failures__per_rack_day": 0.05,
        "run__first_seed": 8787,
        "failures__repair_hours": 0.2,
        "cluster__spares": 0,
        "job__overhead_s": 0.0,
        "recovery__repair_s": 40.0,
    }
)
@given(values=clusters)
@settings(max_examples=30, deadline=None, phases=[Phase.explicit, Phase.generate])
def test_simulation_accounts_for_all_time_and_every_step_has_B(values: dict[str, Any]) -> None:
    """This holds with racks, bursts, silent failures, slow nodes, standbys, and failures during repairs."""
    there = scenario(**values)
    track = SystemRunner(there)
    for system in SYSTEMS:
        account = track.run(system, there.run.first_seed)
        assert sum(account.shares(there).values()) == pytest.approx(1.0, abs=1e-6), (system, account.parts)
        assert account.parts["productive"] <= account.seconds * (1 + 1e-9)
        assert not {
            part: s for part, s in account.parts.items() if s < -1e-6 and part not in ("uneven", "productive")
        }
        if system == "torchft":
            assert account.microbatches <= account.steps * there.global_batch
        else:
            assert account.microbatches == account.steps * there.global_batch, system
            assert account.smallest in (0, there.global_batch), system


@pytest.mark.guarantee(
    "Simulated clusters",
    "The simulation accounts for all time, is a function of its seed, and neither failures raise nor spares "
    "lower its throughput.",
)
@pytest.mark.parametrize("system", SYSTEMS)
def test_simulation_is_a_function_of_its_seed(system: str) -> None:
    there = scenario(cluster__spares=4, failures__burst=0.2)
    one, again, other = (SystemRunner(there).run(system, seed) for seed in (7, 7, 8))
    assert one == again
    assert one.parts != other.parts


@pytest.mark.guarantee(
    "Simulated clusters",
    "The simulation accounts for all time, is a function of its seed, and neither failures raise nor spares "
    "lower its throughput.",
)
@pytest.mark.parametrize("system", SYSTEMS)
def test_simulated_goodput_without_failures_lacks_only_checkpoint_time(system: str) -> None:
    there = scenario(failures__per_node_day=1e-9, checkpoint__save_s=60.0, checkpoint__every_s=3600.0)
    found = race(there)[system]
    parts = found.parts
    paid = {"recover": 60 / (6 * 3600 + 60), "recover-return": 60 / (6 * 3600 + 60)}
    beside = ("checkpoint", "redundant", "vote")
    assert found.goodput.mean == pytest.approx(1 - sum(parts[part] for part in beside), abs=1e-9)
    assert {part for part in PARTS if parts[part] > 1e-9} <= {"productive", *beside}
    votes = system.startswith(("recover", "torchft"))
    assert (parts["vote"] > 0) == votes
    if system in paid:
        assert parts["checkpoint"] == pytest.approx(paid[system], rel=1e-6)
        assert parts["vote"] == pytest.approx((1 - paid[system]) * 0.03 / 8.03, rel=1e-3)  # steps of 8 s
    if system == "restart":
        assert parts["checkpoint"] == pytest.approx(60 / 3660, rel=0.02)  # the last may not be due yet
    assert (parts["redundant"] > 0) == (system in ("replication", "torchft-spares"))


@pytest.mark.guarantee(
    "Simulated clusters",
    "The simulation accounts for all time, is a function of its seed, and neither failures raise nor spares "
    "lower its throughput.",
)
@pytest.mark.parametrize(
    "system", [name for name in SYSTEMS if name not in ("replication", "stacked", "restart-paper")]
)
def test_more_failures_never_raise_simulated_goodput(system: str) -> None:
    """This is not true of systems with copies, which a restart restores, nor of one checkpoint per failure, because a
    restart with repaired nodes writes another one."""
    rates = (0.005, 0.02, 0.08, 0.32)
    found = [
        race(scenario(failures__per_node_day=rate, run__seeds=6, run__days=10, cluster__spares=4), [system])[
            system
        ]
        for rate in rates
    ]
    values = [result.goodput.mean for result in found]
    assert all(b <= a + 0.004 for a, b in itertools.pairwise(values)), values


@pytest.mark.guarantee(
    "Simulated clusters",
    "The simulation accounts for all time, is a function of its seed, and neither failures raise nor spares "
    "lower its throughput.",
)
@pytest.mark.parametrize("system", ["restart", "recover", "recover-return", "torchft"])
def test_simulated_spare_never_lowers_tokens_per_hour(system: str) -> None:
    """It may lower goodput, because its time is paid for."""
    found = [
        race(scenario(cluster__spares=spares, run__seeds=8, run__days=10), [system])[system]
        for spares in (0, 2, 4, 8, 16)
    ]
    values = [result.tokens_per_day.mean for result in found]
    assert all(b >= 0.99 * a for a, b in itertools.pairwise(values)), values
    assert values[-1] > values[0]


def test_simulated_rejoin_and_faster_detection_never_hurt() -> None:
    there = scenario(cluster__spares=8, run__seeds=6)
    found = race(there, ["recover", "recover-return"])
    assert found["recover-return"].goodput.mean > found["recover"].goodput.mean
    assert found["recover-return"].joined > 10
    slower = race(there.but(recovery__detect_s=60.0), ["recover-return"])["recover-return"]
    assert slower.goodput.mean < found["recover-return"].goodput.mean


def test_simulated_failures_match_their_configured_rate() -> None:
    for process in ("poisson", "weibull", "regular"):
        there = scenario(
            failures__process=process, failures__shape=0.7, failures__transient=1.0, run__days=200
        )
        account = SystemRunner(there).run("recover-return", 3)
        expected = 200 * 64 * 0.05
        assert account.failures == pytest.approx(expected, rel=0.002 if process == "regular" else 0.1)
    dying = scenario(failures__repair_hours=1e6, run__days=20, failures__process="regular")
    left = 64 * math.exp(-0.05 * 20)  # a lost node does not fail again
    assert SystemRunner(dying).run("recover-return", 3).failures == pytest.approx(64 - left, abs=3)


def test_simulated_rack_failure_takes_its_nodes() -> None:
    there = scenario(
        cluster__nodes_per_rack=8,
        failures__per_rack_day=0.5,
        failures__per_node_day=1e-6,
        failures__transient=1.0,
        job__replica_gpus=16,
    )
    account = SystemRunner(there).run("recover-return", 1)
    assert account.joined == pytest.approx(4 * account.failures, rel=0.2)  # 8 nodes are 4 replicas of 2


def test_simulated_spares_are_paid_for() -> None:
    calm = {"failures__per_node_day": 1e-9, "run__seeds": 1}
    alone, beside = (
        race(scenario(cluster__spares=n, **calm), ["recover-return"])["recover-return"] for n in (0, 16)
    )
    assert beside.tokens_per_day.mean == pytest.approx(alone.tokens_per_day.mean)
    assert beside.goodput.mean == pytest.approx(alone.goodput.mean * 64 / 80)
    assert beside.parts["spares"] == pytest.approx(16 / 80)


def test_simulated_rejoin_is_missed_for_its_start_time() -> None:
    """One of 32 replicas is away for half an hour after each failure."""
    there = scenario(
        failures__transient=1.0, joining__start_s=1800.0, job__accum=64, run__days=40, run__seeds=1
    )
    account = SystemRunner(there).run("recover-return", 2)
    away = account.struck * 1800.0 / 32
    assert account.parts["missing"] == pytest.approx(away, rel=0.1)


# Nodes fail like a clock and are repaired after exactly ten hours; restarts and joins cost almost nothing.
CLOCKWORK = {
    "failures__process": "regular",
    "failures__per_node_day": 1 / 64,
    "failures__repair_hours": 10.0,
    "failures__repair": "fixed",
    "joining__start_s": 1.0,
    "recovery__restart_at": 0.999,
    "checkpoint__save_s": 0.1,
    "restart__detect_s": 0.0,
    "restart__schedule_s": 0.0,
    "restart__start_s": 1.0,
    "restart__load_s": 0.0,
    "run__days": 40,
}


@pytest.mark.guarantee(
    "Simulated clusters",
    "No simulated system works with a broken node before its repair, or without it for long afterwards.",
)
@pytest.mark.parametrize("system", ["recover", "recover-return", "restart", "restart-memory"])
def test_simulated_node_is_missing_until_its_repair_and_no_longer(system: str) -> None:
    """One replica of 32 is away for ten hours a day, both with rejoins and with restarts that wait for the node."""
    there = scenario(**CLOCKWORK)
    account = SystemRunner(there).run(system, 0)
    away = account.struck * 10 * 3600
    assert account.struck >= 30
    slower = (account.parts["missing"] + account.parts["uneven"]) / away
    assert slower == pytest.approx(1 - 4 / 5, rel=0.02)  # 128 microbatches on 31 replicas: 5 rounds, on 32: 4


def test_simulated_restart_with_repaired_nodes_is_left_out_where_it_does_not_pay() -> None:
    """The restart would pause for 20 hours to regain one replica of 32 until the next failure, a day later."""
    dear = scenario(**{**CLOCKWORK, "restart__start_s": 20 * 3600.0, "restart__struck": "goes-on"})
    account = SystemRunner(dear).run("restart", 0)
    assert 0 < account.restarts <= account.struck
    cheap = SystemRunner(scenario(**CLOCKWORK)).run("restart", 0)
    assert cheap.restarts > 1.8 * cheap.struck  # one for the loss, one for the repaired node


def test_simulated_wipe_out_during_a_recovery_is_a_restart() -> None:
    """Whether survivors are still busy with the previous loss makes no difference to the replicas that are left."""
    nothing = {f"restart__{part}_s": 0.0 for part in ("detect", "schedule", "start", "load")}
    there = scenario(
        failures__per_node_day=0.5,
        failures__transient=1.0,
        restart__struck="goes-on",
        recovery__detect_s=1e4,
        **nothing,
    )
    slow = SystemRunner(there).run("replication", 1)
    quick = SystemRunner(there.but(recovery__detect_s=0.0)).run("replication", 1)
    assert slow.restarts == quick.restarts > 10
