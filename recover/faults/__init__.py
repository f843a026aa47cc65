"""Faults on purpose: the named places at which a process can be killed, and the one probe that kills."""

from recover.faults.locations import LOCATIONS, Kill, parse_kill, parse_kills
from recover.faults.probe import Probe

__all__ = ["LOCATIONS", "Kill", "Probe", "parse_kill", "parse_kills"]
