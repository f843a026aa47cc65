"""Deaths and rejoins at random: the bits of a calm run, and nothing that grows."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from rank_pids import ranks_of_run
from test_rejoin import check_against_calm, replicas, wait
from training import finish, small_world, start

from recover.job.spec import VARIABLE, JobSpec
from recover.world.fabrics.etcd.access import client_of

SECONDS = float(os.environ.get("TEST_CHAOS_SECONDS", "60"))  # half an hour, before a release
SEED = 7
# A warm-up longer than any run: after it the learning rate depends on the number of steps, which the run without
# failures is given only afterwards.
LR = ["lr=0.5", "warmup_steps=100000"]


def living(run_dir: Path) -> dict[int, tuple[int, Path]]:
    """Living processes by rank: the pid, and the file from which it read the job."""
    return {rank: (pid, Path(told[VARIABLE])) for rank, (pid, told) in ranks_of_run(run_dir).items()}


def keys(run_dir: Path) -> Counter[str]:
    """Entries of the job's etcd, by kind. Ends of lost ranks are removed after a minute."""
    spec = JobSpec.read(next(iter(living(run_dir).values()))[1])
    assert spec.etcd is not None
    kinds = Counter(found.key.rpartition("/")[0] for found in client_of(spec.etcd).get_all()[0])
    return Counter({kind: count for kind, count in kinds.items() if kind not in ("ends", "vote", "mail")})


@pytest.mark.guarantee(
    "Rejoining replicas",
    "Random deaths and rejoins leave the bits of a failure-free run and no key, process or file.",
)
@pytest.mark.soak
def test_random_deaths_and_rejoins_leave_failure_free_bits(tmp_path: Path) -> None:
    words, run_dir, rng = (
        [*small_world(tmp_path / "world"), *LR, "reduction=reproducible"],
        tmp_path / "run",
        random.Random(SEED),
    )
    many = ["replicas=4", "accum=2", "steps=100000", "pace=0.02"]
    process = start(run_dir, *words, *many, "--return", "--return-delay=0", "--forgive=0", quiet=True)
    wait(lambda: replicas(run_dir) == 4, "no step")
    before, deaths, end = keys(run_dir), 0, time.monotonic() + SECONDS
    while time.monotonic() < end and process.poll() is None:
        ranks = living(run_dir)
        # Any rank, also one that warms up or is being admitted; but one at work must stay.
        if replicas(run_dir) > 2 and len(ranks) > 2:
            os.kill(ranks[rng.choice(sorted(ranks))][0], signal.SIGKILL)
            deaths += 1
        time.sleep(rng.uniform(0.2, 4.0))
    wait(lambda: replicas(run_dir) == 4, f"not whole again after {deaths} deaths")
    time.sleep(1.0)
    after = keys(run_dir)
    process.send_signal(signal.SIGTERM)
    run = finish(process, run_dir)
    assert run.code == 0, run.output
    assert deaths > 3
    assert run.summary["joined"] > 2
    assert after["anew"] <= 4
    for kind in ("anew", "free", "notes", ""):  # the places of joined ranks, and single keys
        del after[kind], before[kind]
    assert after == before
    check_against_calm(run, tmp_path / "calm", words, 8)
