"""A schedule of deaths executed for real and in the simulation, with parameters from another run; and its speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE
from recover_lab.chaos.campaign import run_job
from recover_lab.chaos.platforms import CampaignRun
from recover_lab.peers.scene import SHAPE
from recover_lab.simulate.learned import learn
from recover_lab.simulate.replay import compare_with_run
from recover_lab.simulate.scenario import parse_scenario

from recover.faults.draw import draw_schedule


@pytest.mark.guarantee(
    "Simulated clusters",
    "Recorded runs are replayed with parameters of other runs within 10% of their time and 20% of each "
    "incident.",
)
@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "replicas", "size", "pace", "deaths", "seeds"),
    [("ddp", 6, 1, 0.6, 3, (11, 12)), ("hsdp", 4, 2, 0.6, 2, (11, 12))],
)
def test_executed_schedule_takes_as_long_as_its_simulation(
    tmp_path: Path, kind: str, replicas: int, size: int, pace: float, deaths: int, seeds: tuple[int, int]
) -> None:
    """Total time within 10%, each incident within 20%; parameters are learned from a run with other deaths.

    Microbatches are long: what other load on the machine adds to a repair is little against them.
    """
    model = tmp_path / "model.json"
    model.write_text(json.dumps(SHAPE))
    words = [
        f"model={model}",
        f"replicas={replicas}",
        f"microbatch_size={size}",
        "seq_len=64",
        f"pace={pace}",
    ]
    words += ["steps=16", "device=cpu", "warmup_steps=4", "checkpoint.every=0", "log.tensorboard=false"]
    words += [f"parallel={kind}", *([f"shard={size}"] if size > 1 else [])]
    schedules = [
        draw_schedule(
            replicas, size, seed, count=deaths, steps=(3, 14), locations={"in-reduce": 1, "forward": 1}
        )
        for seed in seeds
    ]
    for name, schedule in zip(("learn", "held"), schedules, strict=True):
        assert run_job(CampaignRun(words, tmp_path / name, 280, schedule)).code == 0
    scenario = parse_scenario(learn([tmp_path / "learn"]))
    found = compare_with_run(scenario, schedules[1], tmp_path / "held")
    assert abs(found.total) < 0.10, found
    assert found.tokens == 0
    assert found.incidents
    assert all(abs(apart) < 0.20 for _, _, apart in found.incidents.values()), found.incidents


SHARED_OUT = """
import json
from recover_lab.simulate import race as races
from recover_lab.simulate.presets import preset
from recover_lab.simulate.scenario import parse_scenario

changes = {"run.days": 1, "run.seeds": 5, "run.systems": "restart,recover-return"}
scenario = parse_scenario({**preset("meta-100k").values, **changes})
found = []
for races._SHARED in (float("inf"), 0):  # failures from which on several processes share them: none of these, all
    results = races.race(scenario)
    found.append({name: [placing.goodput.mean, placing.failures] for name, placing in results.items()})
print(json.dumps(found))
"""


def test_simulation_result_does_not_depend_on_the_number_of_cores() -> None:
    """Each seed is a run of its own: which process runs it makes no difference."""
    command = [sys.executable, "-c", SHARED_OUT]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr
    alone, shared_out = json.loads(ended.stdout)
    assert alone.keys() == shared_out.keys() == {"restart", "recover-return"}
    for name, figures in alone.items():
        assert figures[1] > 0
        assert figures == pytest.approx(shared_out[name], rel=1e-12)
