"""Directories of the two distributions: their packages, and the checkout with its documents."""

from __future__ import annotations

import os
from pathlib import Path

import recover

LAB = Path(__file__).parent
PACKAGES = (Path(recover.__path__[0]), LAB)
# For an interpreter in which the two packages are not installed.
PYTHONPATH = os.pathsep.join(str(package.parent) for package in PACKAGES)
CHECKOUT = LAB.parents[1]  # holds tools/recover_lab and docs
