"""Deaths inside reductions, many times: the same bits as without, every step on B microbatches, no other rank lost.

Made for GPUs: `TEST_DEVICE=cuda TEST_CARRIER=nccl TEST_KILLS=50 pytest -m soak tests/processes/test_gpu_kills.py`.
Without these variables it runs on the CPU, over MPI. Kinds of replicas share the deaths: three fifths of them are plain
ones'.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from training import CAN_BE_CUT, Trained, check_lines, small_world, train

STEPS = 9
KILLS = int(os.environ.get("TEST_KILLS", "50"))
KINDS = {  # replicas, deaths in a launch, share of all deaths, keys
    "ddp": (4, 3, 0.6, ["parallel=ddp"]),
    "hsdp": (2, 1, 0.2, ["parallel=hsdp", "shard=2", "microbatch_size=2"]),
    "pp": (2, 1, 0.2, ["parallel=3d", "pp=2"]),
}


def schedule(replicas: int, deaths: int, local: int, chance: random.Random) -> list[str]:
    """Deaths of different replicas in different steps, each in the sum of a bucket."""
    steps = sorted(chance.sample(range(2, STEPS), deaths))
    victims = chance.sample(range(replicas), deaths)
    return [
        f"{step}:{victim}.{chance.randrange(local)}:in-reduce"
        for step, victim in zip(steps, victims, strict=True)
    ]


LAUNCHES = [
    (kind, number)
    for kind, (_, deaths, part, _) in KINDS.items()
    for number in range(max(1, round(part * KILLS / deaths)))
]


def run(place: Path, kind: str, kills: list[str]) -> Trained:
    replicas, _, _, keys = KINDS[kind]
    words = [
        *small_world(place / "world", **CAN_BE_CUT),
        *keys,
        f"replicas={replicas}",
        "accum=2",
        f"steps={STEPS}",
        "reduction=reproducible",
        "bucket_mb=0.02",
        f"carrier={os.environ.get('TEST_CARRIER', 'mpi')}",
        "timeout=120",
    ]
    ended = train(place / "run", *words, kills=kills)
    assert ended.code == 0, f"{kills}\n{ended.output}"
    check_lines(ended, STEPS, 2 * replicas)
    return ended


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The digest of the parameters after a calm run of a kind."""

    @functools.cache
    def digest(kind: str) -> str:
        return str(run(tmp_path_factory.mktemp("calm"), kind, []).summary["parameters_digest"])

    return digest


@pytest.mark.guarantee(
    "On GPUs",
    "Deaths inside reductions change no bit and cost no other rank on plain, sharded and pipelined replicas "
    "(GPU: `TEST_DEVICE=cuda`).",
)
@pytest.mark.soak
@pytest.mark.parametrize(("kind", "number"), LAUNCHES)
def test_gpu_deaths_inside_reductions_change_no_bit_and_no_other_rank(
    kind: str, number: int, tmp_path: Path, digests: Callable[[str], str]
) -> None:
    replicas, deaths, _, _ = KINDS[kind]
    kills = schedule(replicas, deaths, 1 if kind == "ddp" else 2, random.Random(f"{kind} {number}"))
    struck = run(tmp_path, kind, kills)
    dead = sorted(replica for line in struck.incidents for replica in line["dead_replicas"])
    assert dead == sorted(int(kill.split(":")[1].partition(".")[0]) for kill in kills), struck.output
    assert struck.summary["parameters_digest"] == digests(kind), struck.output
