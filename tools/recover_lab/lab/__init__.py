"""Hosts to try things on: several on one machine, each real to the software that runs on it."""
