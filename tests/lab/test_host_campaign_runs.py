"""Hosts, cables, agents and etcd struck at every location and at random, on labs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from recover_lab.chaos.on_hosts import HostPlatform
from recover_lab.chaos.platforms import CampaignRun
from training import CAN_BE_CUT, small_world

from recover.faults import parse_faults
from recover.train.preparation import prepare_run

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("a_lab_can_be_made_here")]


def campaign(
    place: Path, verb: str, *options: str, replicas: int, lasts: Sequence[str] = ("steps=10", "pace=0.2")
) -> subprocess.CompletedProcess[str]:
    job = [*small_world(place / "world", **CAN_BE_CUT), f"replicas={replicas}", "accum=2", *lasts]
    job += ["reduction=reproducible", "checkpoint.every=1", "checkpoint.keep=1"]
    command = [sys.executable, "-m", "recover.cli", "faults", verb, *options, "--", "recover", "train", *job]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.guarantee(
    "Several hosts",
    "Faults of ranks, hosts, cables, agents and etcd at every location and at random keep every invariant "
    "and leave nothing on any host.",
)
@pytest.mark.parametrize(("hosts", "replicas"), [(3, 6), (4, 4)])
def test_random_schedules_over_hosts_keep_every_invariant(tmp_path: Path, hosts: int, replicas: int) -> None:
    result = campaign(
        tmp_path, "chaos", "--hosts", str(hosts), "--seed", "9000", "--runs", "8", replicas=replicas
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.guarantee(
    "Rejoining replicas", "Random schedules over hosts that are lost and rejoin keep every invariant."
)
@pytest.mark.parametrize("more", [[], ["--shared"], ["hsdp"]], ids=["own", "shared", "hsdp"])
def test_random_schedules_over_rejoining_hosts_keep_every_invariant(tmp_path: Path, more: list[str]) -> None:
    lasts, options = ["steps=150", "pace=0.1"], [word for word in more if word.startswith("-")]
    if more == ["hsdp"]:  # ranks left of two replicas form one
        lasts += ["parallel=hsdp", "shard=2", "microbatch_size=2"]
    result = campaign(
        tmp_path,
        "chaos",
        *["--hosts", "3", "--return", "--seed", "9100", "--runs", "2", *options],
        replicas=3,
        lasts=lasts,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.guarantee(
    "Several hosts",
    "Faults of ranks, hosts, cables, agents and etcd at every location and at random keep every invariant "
    "and leave nothing on any host.",
)
@pytest.mark.parametrize(("hosts", "replicas"), [(3, 6), (4, 8)])
def test_whole_matrix_over_hosts_keeps_every_invariant(tmp_path: Path, hosts: int, replicas: int) -> None:
    result = campaign(tmp_path, "matrix", "--hosts", str(hosts), replicas=replicas)
    assert result.returncode == 0, result.stdout + result.stderr


def test_host_without_ranks_reports_the_end_of_the_job(tmp_path: Path) -> None:
    """A host that has lost its ranks lives, and so does its agent, which ends as the others do."""
    words = [*small_world(tmp_path / "world"), "replicas=3", "accum=2", "steps=4"]
    hosts = HostPlatform(3)
    config = prepare_run(words, None, (), None).config
    faults = parse_faults(["2:2:in-reduce"])
    run = hosts.run(CampaignRun(words, tmp_path / "run", 120, faults))
    assert list(hosts.violations(run, config, faults)) == []
    assert "ends with step 1" in (tmp_path / "run" / "h3.out").read_text()
