"""Injected faults: named locations, actions, schedules, and the probe that executes them."""

from recover.faults.fault import ACTIONS, Fault, parse_fault, parse_faults
from recover.faults.locations import LOCATIONS
from recover.faults.probe import Probe

__all__ = ["ACTIONS", "LOCATIONS", "Fault", "Probe", "parse_fault", "parse_faults"]
