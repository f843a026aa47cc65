"""Fixtures of tests/process_fixtures.py."""

from process_fixtures import (  # noqa: F401
    a_lab_can_be_made_here,
    every_checkpoint_is_awaited,
    fabrics,
    prefix,
    server,
)
