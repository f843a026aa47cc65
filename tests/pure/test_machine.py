"""The description of the machine in runs and figures."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from recover.job.machine import processor

ARM = "processor\t: {}\nCPU implementer\t: 0x41\nCPU variant\t: 0x3\nCPU part\t: {}\n\n"


@pytest.mark.parametrize(
    ("told", "name"),
    [
        (
            "processor\t: 0\nmodel name\t: A Xeon @ 2 GHz\n\nprocessor\t: 1\nmodel name\t: A Xeon @ 2 GHz\n",
            "A Xeon @ 2 GHz",
        ),
        (ARM.format(0, "0xd0c") + ARM.format(1, "0xd0c"), "implementer 0x41, part 0xd0c"),
        (ARM.format(0, "0xd40"), "implementer 0x41, part 0xd40"),
        ("", platform.machine()),
    ],
)
def test_different_processors_are_distinguished(told: str, name: str, tmp_path: Path) -> None:
    """On aarch64 the kernel has no names of processors."""
    (tmp_path / "cpuinfo").write_text(told)
    assert processor(tmp_path / "cpuinfo") == name
    assert processor(tmp_path / "none") == platform.machine()
