"""A test that starts no process cannot start one by mistake, and the core suite needs no trainer's packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "start",
    [
        lambda: subprocess.run([sys.executable, "-c", ""], check=True),
        lambda: os.system("true"),
        lambda: os._exit(0) if os.fork() == 0 else None,
    ],
    ids=["subprocess", "system", "fork"],
)
def test_pure_test_that_starts_a_process_is_refused(start: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match="belongs into tests/processes"):
        start()


def test_pure_test_may_let_matplotlib_look_for_fonts() -> None:
    sys.audit("subprocess.Popen", "fc-list", ["fc-list", "--help"], None, None)


def plain_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def wanted_by(extra: str) -> set[str]:
    """Names of the distributions that an extra requires, including those of our extras in it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = set()
    for requirement in extras[extra]:
        if own := re.fullmatch(r"recover-train\[([\w-]+)\]", requirement):
            found |= wanted_by(own[1])
        else:
            found.add(plain_name(re.match(r"[\w.-]+", requirement)[0]))  # type: ignore[index]
    return found


def pinned_by(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    return {plain_name(package): version for package, _, version in (line.partition("==") for line in lines)}


def test_core_suite_installs_no_package_of_other_trainers() -> None:
    """These packages need versions of their own: `make test` must neither wait for them nor break with them."""
    trainers = wanted_by("hf") | (wanted_by("titan") - {"torch"})
    assert trainers
    assert trainers <= wanted_by("integrations")
    assert not trainers & (wanted_by("dev") | set(pinned_by("constraints.txt")))


def test_both_environments_pin_their_requirements_and_the_same_torch() -> None:
    core, integrations = pinned_by("constraints.txt"), pinned_by("constraints-integrations.txt")
    assert wanted_by("dev") <= set(core)
    assert wanted_by("integrations") <= set(integrations)
    assert core["torch"] == integrations["torch"]
