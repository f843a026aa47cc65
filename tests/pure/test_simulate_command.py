"""`recover simulate`: its output for people and for programs, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from recover_lab.bench.simulations import cluster
from recover_lab.simulate.account import PARTS
from recover_lab.simulate.break_even import Curve, crossings, leaders, signs
from recover_lab.simulate.learned import learn
from recover_lab.simulate.presets import PRESETS
from recover_lab.simulate.scenario import parse_scenario
from recover_lab.simulate.scenario_keys import SYSTEMS
from recover_lab.simulate.study import ask, parse_sweep
from typer.testing import CliRunner

from recover.cli import app

RECORDED = Path(__file__).parents[1] / "recorded"
QUICK = ("run.seeds=2", "run.days=3")


def simulate(*args: str) -> Any:
    return CliRunner().invoke(app, ["simulate", *args], env={"COLUMNS": "200"})


@pytest.mark.guarantee(
    "Simulated clusters", "Impossible settings are refused before a simulation with value and remedy."
)
@pytest.mark.parametrize(
    ("words", "value", "mend"),
    [
        (["--preset", "meta-10k"], "'meta-10k'", "did you mean 'meta-100k'?"),
        (["job.replica_gpus=12"], "job.replica_gpus=12", "try 8"),
        (["cluster.nodes=2050"], "cluster.nodes=2050", "use 2048, and cluster.spares=2"),
        (["cluster.nodes=4", "job.parameters=1e9"], "job.replica_gpus=128", "use more nodes"),
        (["gpus=8"], "job.parameters=4.05e+11 needs 6,480 GB", "the 8 GPUs of the job"),
        (["gpus=8"], "have 640 GB", "use at least 162 GPUs, or a model of at most job.parameters=2e+10"),
        (["cluster.nodes=128", "job.replica_gpus=8"], "the 8 GPUs of a replica", "use job.replica_gpus=128"),
        (["gpus=1020"], "gpus=1020", "use gpus=1016 or 1024"),
        (["gpus=some"], "gpus='some'", "such as gpus=1024"),
        (["gpus=64", "cluster.nodes=4"], "cluster.nodes=4", "give one of them"),
        (
            ["gpus=1024", "mtbf_hours=72"],
            "mtbf_hours=72",
            "with mtbf_of=node the job fails every 0.562 hours",
        ),
        (["mtbf_hours=72", "mtbf_of=nodes"], "mtbf_of='nodes'", "did you mean 'node'?"),
        (["mtbf_hours=0", "mtbf_of=job"], "mtbf_hours='0'", "above 0"),
        (["mtbf_of=job"], "mtbf_of=job", "give mtbf_hours"),
        (["gpu=8"], "'gpu'", "did you mean 'gpus'?"),
        (["mtbf=8"], "'mtbf'", "The words are gpus, mtbf_hours, mtbf_of"),
        (
            ["mtbf_hours=7", "mtbf_of=job", "failures.per_node_day=1"],
            "failures.per_node_day=1",
            "give one of them",
        ),
        (
            ["gpus=1024", "mtbf_hours=50000"],
            "mtbf_hours=50000 does not say of what",
            "with mtbf_of=job the job fails every 50,000 hours",
        ),
        (["job.tokens_per_step=4M"], "job.tokens_per_step='4M'", "such as job.tokens_per_step=4194304"),
        (["job.tokens_per_step=1.5"], "job.tokens_per_step='1.5'", "a whole number above 0"),
        (["tokens_per_step=4e6"], "'tokens_per_step'", "did you mean 'job.tokens_per_step'?"),
        (
            ["job.tokens_per_step=4e6", "job.accum=4"],
            "job.tokens_per_step=4e6 and job.accum=4",
            "give one of them",
        ),
        (  # 128 replicas: 1,048,576 tokens with one microbatch each
            ["job.tokens_per_step=4e6"],
            "job.tokens_per_step=4000000",
            "use job.tokens_per_step=3145728 or 4194304",
        ),
        (
            ["job.tokens_per_step=1e6"],
            "makes 1,048,576 tokens",
            "use at least job.tokens_per_step=1048576, or smaller microbatches (job.tokens)",
        ),
        (["job.replica_gpus=16384"], "job.replica_gpus=16384", "use smaller replicas, or more nodes"),
        (
            ["failures.per_node_day=0"],
            "failures.per_node_day=0",
            "without failures there is nothing to compare",
        ),
        (["checkpoint.save_s=-1"], "checkpoint.save_s='-1'", "must be greater than 0"),
        (["restart.load_s=-2"], "restart.load_s='-2'", "must be greater than or equal to 0"),
        (["failures.transient=1.5"], "failures.transient='1.5'", "must be less than or equal to 1"),
        (["failures.process=gauss"], "failures.process='gauss'", "'poisson', 'weibull' or 'regular'"),
        (["failures.process=weibull", "failures.shape=0.01"], "failures.shape=0.01", "use 0.3 to 10"),
        (["failures.per_rack_day=0.1"], "failures.per_rack_day", "needs cluster.nodes_per_rack"),
        (["job.gpu=Abacus"], "'Abacus'", "give job.peak_tflops, or job.microbatch_s"),
        (["cluster.node=8"], "'cluster.node'", "did you mean 'cluster.nodes'?"),
        (["run.systems=restart,recver"], "'recver'", "did you mean 'recover'?"),
        (["replication.copies=300"], "replication.copies=300", "use fewer"),
        (["run.seeds=many"], "run.seeds='many'", "must be a whole number"),
        (["--sweep", "node=1:2"], "'node' is no key", "cluster.nodes=8:80000"),
        (["--sweep", "nodes=80000:8"], "nodes=80000:8", "0 < LOW < HIGH"),
        (["--from", "/nowhere/run"], "/nowhere/run", "give a run directory or a file"),
        (["/nowhere.yaml"], "/nowhere.yaml", "check the path"),
    ],
)
def test_simulation_refuses_impossible_settings_with_value_and_remedy(
    words: list[str], value: str, mend: str
) -> None:
    result = simulate(*words)
    assert result.exit_code == 2
    assert result.stderr.startswith("recover simulate: ")
    assert value in result.stderr, result.stderr
    assert mend in result.stderr, result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("name", PRESETS)
def test_simulation_preset_runs_and_separates_published_from_assumed(name: str) -> None:
    found = PRESETS[name]
    assert set(found.published) <= found.values.keys()
    assert "arXiv" in found.source
    assert found.assumed
    question = ask(["run.seeds=3"], name, [])
    origins = {question.origins[key] for key in found.values}
    assert origins <= {"published", "assumed", "given"}
    assert question.origins["run.seeds"] == "given"
    assert question.scenario.replicas > 10


def test_simulation_lists_all_systems_in_json_and_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recover_lab.simulate.break_even.FACTORS", (0.3, 3.0))
    monkeypatch.setattr("recover_lab.simulate.break_even.MOST_FAILURES", 80)
    words = ("--preset", "meta-100k", *QUICK, "--sweep", "nodes=256:12544:2", "--json")
    result = simulate(*words, "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found == json.loads((tmp_path / "simulation.json").read_text())
    assert found["systems"].keys() == SYSTEMS.keys()
    for system in found["systems"].values():
        assert sum(system["parts"].values()) == pytest.approx(1, abs=1e-6)
        assert system["parts"].keys() == PARTS.keys()
        assert system["goodput"]["low"] <= system["goodput"]["mean"] <= system["goodput"]["high"]
    assert found["sweep"]["values"] == [256, 12544]
    assert len(found["rates"]["values"]) == len(found["leaders"])
    assert {change["what"] for change in found["worth"]}
    assert found["systems"]["recover-return"]["smallest_batch"] == found["global_batch"]
    page = (tmp_path / "index.html").read_text()
    assert page.count("data:image/png;base64") == 3
    assert "arXiv:2602.00277" in page
    assert all(name in page for name in SYSTEMS.values())


def test_simulation_table_names_every_system_and_its_time_shares() -> None:
    result = simulate("--preset", "llama3-16k", "--brief", *QUICK)
    assert result.exit_code == 0, result.output
    assert all(name in result.stdout for name in SYSTEMS.values())
    assert "writing checkpoints" in result.stdout
    assert "Assumed: " in result.stdout


def test_simulation_reads_a_key_file_and_options_override_it(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("cluster:\n  nodes: 64\njob: {replica_gpus: 16, microbatch_s: 1.5}\nrun: {seeds: 2}\n")
    question = ask([str(file), "cluster.nodes=32"], None, [])
    assert (question.scenario.cluster.nodes, question.scenario.microbatch) == (32, 1.5)
    assert question.scenario.replicas == 16


def test_simulation_takes_parameters_from_runs_and_benchmarks(tmp_path: Path) -> None:
    from_run = learn([RECORDED / "ddp-test"])
    assert from_run["job.microbatch_s"] == pytest.approx(0.3, rel=0.03)  # the pace of that run
    assert 0.03 < from_run["recovery.repair_s"] < 0.2
    pieces = {"save": 0.2, "handling": 0.4, "restart": 8.0, "load": 0.1, "normal": 1.0, "rerun": 2.0}
    ours = {"detect": 0.01, "repair": 0.09, "restore": 0.0, "redo": 0.3, "normal": 1.0}
    rows = [{"baseline": {"pieces": pieces}, "ours": {"pieces": ours}}]
    bench = tmp_path / "breakdown-ddp.json"
    bench.write_text(json.dumps({"breakdown": {"rows": rows}}))
    scenario = ask(["run.seeds=1"], None, [RECORDED / "ddp-test", bench]).scenario
    assert scenario.restart.seconds == pytest.approx(8.5)
    assert scenario.checkpoint.save_s == pytest.approx(0.2)
    assert scenario.recovery.repair_s == pytest.approx(0.09)
    empty = tmp_path / "empty.json"
    empty.write_text("{}")
    with pytest.raises(ValueError, match="has no parameters of a scenario"):
        learn([empty])
    with pytest.raises(ValueError, match=r"has no steps\.jsonl"):
        learn([tmp_path])


def test_simulation_learns_join_times_from_runs_with_a_join(tmp_path: Path) -> None:
    for name in ("steps.jsonl", "config.yaml"):
        (tmp_path / name).write_text((RECORDED / "ddp-test" / name).read_text())
    lines = (RECORDED / "ddp-test" / "incidents.jsonl").read_text()
    join = {"step": 20, "kind": "joined", "dead_replicas": [], "repair_ms": 9e9, "restore_ms": 9e9}
    join |= {"warm_up_ms": 8000.0, "stall_ms": 120.0, "transfer_ms": 90.0}
    (tmp_path / "incidents.jsonl").write_text(lines + json.dumps(join) + "\n")
    found, before = learn([tmp_path]), learn([RECORDED / "ddp-test"])
    assert (found["joining.start_s"], found["joining.stall_s"]) == (8.0, 0.12)
    assert found["recovery.repair_s"] == before["recovery.repair_s"]
    assert "joining.start_s" not in before


def test_simulation_sweep_covers_its_range() -> None:
    key, values = parse_sweep("nodes=8:80000:5")
    assert key == "cluster.nodes"
    assert values == pytest.approx([8, 80, 800, 8000, 80000])


def test_simulation_crossing_points_lie_where_the_curves_meet() -> None:
    found = Curve("k", (1.0, 10.0, 100.0), {"a": (0.9, 0.8, 0.7), "b": (0.95, 0.85, 0.1)}, (3.0, 2.0, 1.0))
    (place,) = crossings(found, "a", "b")
    assert 10 < place < 100
    assert leaders(found) == ["b", "b", "a"]
    assert crossings(found, "a", "a") == []


def two_systems(ours: list[tuple[float, ...]], theirs: list[tuple[float, ...]]) -> Curve:
    """A curve of two systems: the goodput of each seed at each of three rates."""
    seeds = {"a": tuple(ours), "b": tuple(theirs)}
    means = {name: tuple(sum(values) / len(values) for values in rows) for name, rows in seeds.items()}
    return Curve("k", (1.0, 10.0, 100.0), means, (3.0, 2.0, 1.0), seeds)


def test_simulation_crossing_of_a_small_but_certain_difference_is_found() -> None:
    """A tenth of a percent counts if all seeds show it; ten percent do not if the seeds contradict each other."""
    small = two_systems(
        [(0.994, 0.995), (0.9889, 0.9891), (0.97, 0.98)], [(0.995, 0.996), (0.987, 0.9872), (0.96, 0.97)]
    )
    assert signs(small, "a", "b") == [-1, 1, 1]
    (place,) = crossings(small, "a", "b")
    assert place == pytest.approx(10 ** (0.001 / (0.001 + 0.0019)))
    assert crossings(small, "b", "a") == pytest.approx([place])
    noise = two_systems([(0.9, 0.9), (0.6, 0.95), (0.9, 0.9)], [(0.8, 0.8), (0.9, 0.8), (0.8, 0.8)])
    assert signs(noise, "a", "b") == [1, 0, 1]
    assert crossings(noise, "a", "b") == []
    within = two_systems([(0.8, 0.8), (0.6, 0.95), (0.9, 0.9)], [(0.9, 0.9), (0.9, 0.8), (0.8, 0.8)])
    assert signs(within, "a", "b") == [-1, 0, 1]
    assert crossings(within, "a", "b") == pytest.approx([10 ** (1 + 0.075 / 0.175)])


def test_simulation_runs_clusters_of_every_size() -> None:
    for gpus in (16, 1024, 16384, 131072, 600_000):
        there = cluster(gpus, 1.0, 1)
        assert there.replicas >= 2
        assert there.cluster.nodes * 8 == pytest.approx(gpus, rel=0.01)
    assert cluster(600_000, 30.0, 32, 1000).replicas == 600


def test_simulated_step_time_follows_from_its_flops() -> None:
    scenario = parse_scenario(
        {"job.parameters": 1e9, "job.tokens": 1000, "job.mfu": 0.5, "job.peak_tflops": 100}
    )
    assert scenario.microbatch == pytest.approx(6 * 1e9 * 1000 / (128 * 100e12 * 0.5))
