"""Options of jobs on several hosts: torchrun's names, Slurm's environment, and the placement of ranks."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some
from typer.testing import CliRunner

from recover.cli import app
from recover.job.host_options import LEASE, HostOptions
from recover.job.spec import EtcdAccess, JobSpec
from recover.launch.hosts.options import access_to, read_options, slurm_hosts
from recover.launch.hosts.placement import across, place
from recover.launch.preflight import Refusal

ASKED = HostOptions(nnodes="4", nproc_per_node="8", rdzv_endpoint="h1,h2:5000,[::1]:7", rdzv_id="job")
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_NNODES": "3",
    "SLURM_NODEID": "2",
    "SLURM_JOB_NODELIST": "gpu[08-10],big1",
    "SLURM_GPUS_ON_NODE": "8",
}


@pytest.mark.guarantee("Several hosts", "A replica is placed on as few hosts as possible.")
@given(some.lists(some.integers(1, 9), min_size=1, max_size=8), some.integers(1, 12))
def test_replica_is_placed_on_as_few_hosts_as_possible(counts: list[int], size: int) -> None:
    slots = {f"h{number}": count for number, count in enumerate(counts)}
    seats = place(slots, size)
    assert len(seats) == sum(counts) // size * size
    assert len(set(seats)) == len(seats)
    for host, count in slots.items():
        used = sorted(seat.slot for seat in seats if seat.host == host)
        assert used == list(range(len(used)))
        assert len(used) <= count
    whole = sum(count // size for count in counts)
    assert len(seats) // size - len(across(seats, size)) == whole, (
        "a replica that fits onto one host is on one"
    )
    hosts = [seat.host for seat in seats[: whole * size]]
    assert hosts == sorted(hosts), "whole replicas come first, and those of a host follow each other"
    largest = sorted(counts, reverse=True)
    least = next((n for n in range(1, len(counts) + 1) if sum(largest[:n]) >= size), 0)
    if seats and not whole:
        assert len({seat.host for seat in seats[:size]}) == least


@pytest.mark.guarantee("Several hosts", "Options of torchrun and the environment of Slurm are understood.")
def test_torchrun_options_are_understood() -> None:
    part = read_options(ASKED, {})
    assert (part.least, part.most, part.slots, part.job) == (4, 4, 8, "job")
    assert part.endpoints == ("h1:2379", "h2:5000", "[::1]:7")
    assert read_options(replace(ASKED, nnodes="3:4"), {}).nnodes == "3:4"
    assert access_to(ASKED, part).prefix == "/recover/job/"


@pytest.mark.guarantee("Several hosts", "Options of torchrun and the environment of Slurm are understood.")
def test_slurm_environment_supplies_the_options() -> None:
    part = read_options(HostOptions(nnodes=None), SLURM)
    assert (part.least, part.slots, part.job, part.order) == (3, 8, "77", 2)
    assert part.endpoints == ("gpu08:2379", "gpu09:2379", "gpu10:2379")
    assert slurm_hosts("n[1-2,05]x[0-1],m") == ["n1x0", "n1x1", "n2x0", "n2x1", "n05x0", "n05x1", "m"]
    assert read_options(ASKED, SLURM).job == "job", "what is said counts"


@pytest.mark.guarantee(
    "Several hosts", "Bad input is refused by name on its host and leaves nothing on hosts or in etcd."
)
@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("nnodes", "0", "--nnodes is '0'"),
        ("nnodes", "4:3", "--nnodes is '4:3'"),
        ("nproc_per_node", "0", "--nproc-per-node is '0'"),
        ("nproc_per_node", "many", "a number of ranks from 1"),
        ("nproc_per_node", "²", "a number of ranks from 1"),
        ("rdzv_endpoint", "h1:x", "--rdzv-endpoint is 'h1:x'; give HOST:PORT"),
        ("rdzv_endpoint", None, "--rdzv-endpoint is missing; give HOST:PORT"),
        ("rdzv_id", "a/b", "--rdzv-id is 'a/b'"),
        ("rdzv_id", None, "--rdzv-id is missing; give a name"),
        ("rdzv_backend", "static", "hosts meet in etcd here; leave it out"),
        ("lease", 0.5, "--lease is 0.5; give seconds, 2 to 10,000,000"),
        ("lease", 2e10, "--lease is 2e+10; give seconds, 2 to 10,000,000"),
        ("return_delay", float("inf"), "--return-delay is inf; give seconds, 0 to"),
        ("rdzv_patience", float("nan"), "--rdzv-patience is nan"),
        ("token_file", Path("/absent"), "--token-file /absent cannot be read on this host"),
    ],
)
def test_invalid_host_option_is_refused_with_option_value_and_remedy(
    option: str, value: object, words: str
) -> None:
    with pytest.raises(Refusal) as refusal:
        read_options(replace(ASKED, **{option: value}), {})  # type: ignore[arg-type]
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lease": 5.0}, "--lease would have no effect without --nnodes and --rdzv-endpoint: give that,"),
        ({"lease": 5.0, "returns": True}, "--lease would have no effect without --nnodes"),
        (
            {"rdzv_backend": "etcd", "nproc_per_node": "4"},
            "--nproc-per-node and --rdzv-backend would have no",
        ),
        (
            {"interface": "eth0"},
            "--interface would have no effect without --nnodes and --rdzv-endpoint, or --ret",
        ),
        ({"nnodes": "4", "etcd_key": Path("x")}, "--etcd-key would have no effect without --etcd-cert"),
        (
            {"nnodes": "4", "etcd_password_file": Path("x")},
            "--etcd-password-file would have no effect without --etcd-u",
        ),
        ({"standby": -1}, "--standby is -1; give a number, 0 or more"),
        (
            {"etcd_dir": Path("x")},
            "--etcd-dir would have no effect without --nnodes and --rdzv-endpoint, or --r",
        ),
        (
            {"return_delay": 0.0},
            "--return-delay would have no effect without --return: give that, or leave it",
        ),
        ({"nnodes": "4", "ready": False}, "--no-ready would have no effect without --return"),
    ],
)
def test_host_option_without_effect_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        HostOptions(**given).check_use()


@pytest.mark.parametrize("option", ["--hostfile", "--mpirun"])
@pytest.mark.parametrize(
    "other", [["--nnodes", "2", "--rdzv-endpoint", "h", "--rdzv-id", "j"], ["-n", "2", "--standby", "1"]]
)
def test_open_mpi_options_are_refused_for_a_job_on_etcd(option: str, other: list[str]) -> None:
    result = CliRunner().invoke(app, ["run", *other, option, "x", __file__])
    assert result.exit_code == 2
    assert option in result.output


def test_host_option_with_effect_is_accepted() -> None:
    """Every option, with the options that it needs; and an option that only repeats the default."""
    several = {"nnodes": "2", "rdzv_endpoint": "h", "rdzv_id": "j"}
    of_returns = {"return_delay": 0.0, "forgive": 0.0, "ready": False, "warm_up": 2.0}
    of_both = {
        "rdzv_patience": 2.0,
        "join_timeout": 2.0,
        "interface": "x",
        "host_name": "h",
        "etcd_dir": Path("x"),
        "etcd_prefix": "/p",
    }
    paths = {
        name: Path("x") for name in ("token_file", "etcd_password_file", "etcd_ca", "etcd_cert", "etcd_key")
    }
    words = dict.fromkeys(("nproc_per_node", "rdzv_backend", "etcd_user"), "x")
    of_hosts = {"lease": 5.0, "on_term": "stop", "grace": 5.0, **paths, **words}
    everything = several | of_both | of_hosts | of_returns | {"returns": True, "standby": 1}
    assert everything.keys() == {field.name for field in fields(HostOptions)}
    HostOptions(**everything).check_use()
    HostOptions(**several | of_both | of_hosts).check_use()
    HostOptions(**of_both | of_returns, standby=1).check_use()
    HostOptions(lease=LEASE).check_use()


def test_ranks_read_the_job_the_agent_wrote(tmp_path: Path) -> None:
    access = EtcdAccess(("h1:1", "h2:2"), "/recover/j/", "me", "secret", patience=5.0)
    spec = JobSpec(
        6, 2, session=str(tmp_path), etcd=access, host="h1", across=(1,), directories=((0, 1), (2, 3))
    )
    assert JobSpec.read(spec.write()) == spec


def test_run_directory_has_one_writer_and_a_successor_when_it_dies() -> None:
    spec = JobSpec(6, directories=((0, 1), (2, 3, 4, 5)))
    assert spec.ranks_by_run_directory(range(6)) == ((0, 1), (2, 3, 4, 5))
    assert spec.ranks_by_run_directory([5, 1, 3]) == ((1,), (3, 5))
    assert spec.ranks_by_run_directory([4]) == ((4,),)
    assert spec.ranks_by_run_directory([1, 5, 7]) == ((1,), (5,)), (
        "one that has joined, while others are left"
    )
    assert spec.ranks_by_run_directory([6, 7]) == ((6, 7),)
    assert JobSpec(3).ranks_by_run_directory([1, 2]) == ((1, 2),), (
        "all see the same, unless somebody says otherwise"
    )


def test_file_that_is_no_certificate_is_refused_by_its_option(tmp_path: Path) -> None:
    wrong = tmp_path / "ca.pem"
    wrong.write_text("not a certificate")
    options = HostOptions(nnodes="2", rdzv_endpoint="h", rdzv_id="j", etcd_ca=wrong)
    with pytest.raises(
        Refusal, match=r"--etcd-ca .*ca\.pem cannot be used for TLS .*give certificates in PEM"
    ):
        access_to(options, read_options(options))
