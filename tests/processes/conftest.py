"""Fixtures of tests/process_fixtures.py and tests/browsing.py."""

from browsing import browser  # noqa: F401
from process_fixtures import (  # noqa: F401
    a_lab_can_be_made_here,
    every_checkpoint_is_awaited,
    fabrics,
    prefix,
    server,
)
