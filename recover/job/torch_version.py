"""The versions of torch that this version of recover was tested with."""

from __future__ import annotations

import re

from recover.job.machine import version_of

# Ascending; a version is added when the process tests have run with it. docs/explanation/assumptions.md says what was
# run with others.
TESTED = ("2.9.1", "2.13.0", "2.15.0")


def untested(installed: str | None = None) -> tuple[str, str] | None:
    """A warning with the remedy, if no test was run with this minor release of torch; None
    otherwise.

    Patch releases are not told apart. A torch without metadata is not judged.
    """
    if installed is None:
        installed = version_of("torch")
    release = re.match(r"(\d+)\.(\d+)", installed)
    if release is None or release.groups() in [tuple(version.split(".")[:2]) for version in TESTED]:
        return None
    return (
        f"torch {installed} was not tested with this version of recover (tested: {', '.join(TESTED)})",
        f"`pip install torch=={TESTED[-1]}`, or see whether `recover doctor` passes with this one",
    )
