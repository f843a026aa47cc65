"""The tested versions of torch, and the warnings where another one is installed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from recover.job import torch_version
from recover.job.torch_version import TESTED, untested
from recover.launch import launcher, preflight
from recover.launch.doctor import checks as doctor
from recover.launch.hosts import agent
from recover.launch.hosts.options import HostOptions
from recover.launch.request import LaunchRequest
from recover.parallel.threed import build

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("installed", [*TESTED, "2.13.0+cpu", "2.13.3", "not installed"])
def test_tested_torch_release_causes_no_warning(installed: str) -> None:
    assert untested(installed) is None


@pytest.mark.parametrize("installed", ["2.1.0", "2.8.0", "2.14.1", "2.16.0.dev20261101+cu130", "3.9.0"])
def test_untested_torch_is_named_with_the_tested_ones_and_a_remedy(installed: str) -> None:
    found, remedy = untested(installed) or ("", "")
    assert f"torch {installed} was not tested" in found
    assert all(version in found for version in TESTED)
    assert f"`pip install torch=={TESTED[-1]}`" in remedy


def _refuse(*_: object) -> None:
    raise preflight.Refusal("far enough")


@pytest.mark.guarantee(
    "User code", "The launcher and `recover doctor` warn once of an untested torch before ranks start."
)
def test_untested_torch_causes_one_warning_before_ranks_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The launcher of a single host prints it, and so does an agent on several hosts."""
    script = tmp_path / "script.py"
    script.write_text("")
    monkeypatch.setattr(preflight, "open_run_dir", _refuse)
    monkeypatch.setattr(agent, "open_shared_run_dir", _refuse)
    for installed, warnings in ((TESTED[0], 0), ("2.99.0", 1)):
        monkeypatch.setattr(torch_version, "version_of", lambda _, installed=installed: installed)
        assert launcher.launch(1, LaunchRequest(script)) == 2
        assert capfd.readouterr().err.count("warning: torch 2.99.0 was not tested") == warnings
        request = LaunchRequest(script, run_dir=tmp_path / "run")
        assert agent.launch_alone(2, HostOptions(), request) == 2
        assert capfd.readouterr().err.count("warning: torch 2.99.0 was not tested") == warnings


@pytest.mark.guarantee(
    "User code", "The launcher and `recover doctor` warn once of an untested torch before ranks start."
)
def test_doctor_warns_of_an_untested_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed, status in ((TESTED[-1], "ok"), ("2.99.0", "warn"), ("2.8.0", "FAIL")):
        monkeypatch.setattr(doctor, "version", lambda _, installed=installed: installed)
        finding = doctor._torch()
        assert (finding.what, finding.status) == ("torch", status)
        assert installed in finding.seen


def test_tested_torch_versions_match_documents_and_packages() -> None:
    assumed = (ROOT / "docs" / "explanation" / "assumptions.md").read_text()
    assert all(f"| {version} |" in assumed for version in TESTED)
    (pinned,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned in TESTED
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (least,) = re.findall(r"^torch>=(\d+)\.(\d+)$", "\n".join(needed), re.M)
    assert all(tuple(map(int, version.split(".")[:2])) >= tuple(map(int, least)) for version in TESTED)


@pytest.mark.parametrize("pp", [1, 2])
def test_pipelines_of_an_old_torch_are_refused(monkeypatch: pytest.MonkeyPatch, pp: int) -> None:
    """A torch is too old if its schedules have no `return_outputs`; everything else may be used with it."""
    monkeypatch.setattr(build.Schedule1F1B, "step", lambda self, *args, target=None, losses=None: None)
    if pp == 1:
        build._refuse_old_pipelines(pp)
    else:
        with pytest.raises(
            ValueError, match=r"pp=2: pipelines do not work with torch .* install torch 2\.11"
        ):
            build._refuse_old_pipelines(pp)
