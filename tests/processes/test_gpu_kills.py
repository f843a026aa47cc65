"""Deaths inside reductions, again and again: the same bits as without, every step on B microbatches, nobody else lost.

Made for GPUs: `TEST_DEVICE=cuda TEST_CARRIER=nccl TEST_KILLS=50 pytest -m soak tests/processes/test_gpu_kills.py`.
Without these variables it runs on the CPU, over MPI. Kinds of replicas share the deaths: three fifths of them are plain
ones'.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from training import CAN_BE_CUT, Trained, check_lines, small_world, train

STEPS = 9
KILLS = int(os.environ.get("TEST_KILLS", "50"))
KINDS = {  # replicas, deaths in a launch, the part of all deaths, keys
    "ddp": (4, 3, 0.6, ["parallel=ddp"]),
    "hsdp": (2, 1, 0.2, ["parallel=hsdp", "shard=2", "microbatch_size=2"]),
    "pp": (2, 1, 0.2, ["parallel=3d", "pp=2"]),
}


def schedule(replicas: int, deaths: int, local: int, chance: random.Random) -> list[str]:
    """Different replicas in different steps, each in the sum of a bucket."""
    steps = sorted(chance.sample(range(2, STEPS), deaths))
    victims = chance.sample(range(replicas), deaths)
    return [
        f"{step}:{victim}.{chance.randrange(local)}:in-reduce"
        for step, victim in zip(steps, victims, strict=True)
    ]


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_deaths_inside_reductions_change_no_bit_and_lose_nobody_else(kind: str, tmp_path: Path) -> None:
    replicas, deaths, part, keys = KINDS[kind]
    batch = 2 * replicas
    words = [
        *small_world(tmp_path / "world", **CAN_BE_CUT),
        *keys,
        f"replicas={replicas}",
        "accum=2",
        f"steps={STEPS}",
        "reduction=reproducible",
        "bucket_mb=0.02",
        f"carrier={os.environ.get('TEST_CARRIER', 'mpi')}",
        "timeout=120",
    ]

    def run(name: str, kills: list[str]) -> Trained:
        ended = train(tmp_path / name, *words, kills=kills)
        assert ended.code == 0, f"{kills}\n{ended.output}"
        check_lines(ended, STEPS, batch)
        return ended

    calm = run("calm", [])
    chance = random.Random(kind)
    size = 1 if kind == "ddp" else 2
    for number in range(max(1, round(part * KILLS / deaths))):
        kills = schedule(replicas, deaths, size, chance)
        struck = run(f"struck-{number}", kills)
        dead = sorted(replica for line in struck.incidents for replica in line["dead_replicas"])
        assert dead == sorted(int(kill.split(":")[1].partition(".")[0]) for kill in kills), struck.output
        assert struck.summary["parameters_digest"] == calm.summary["parameters_digest"], struck.output
