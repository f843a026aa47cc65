"""Emulated hosts: several on one machine, each with its own network, processes and temporary files."""
