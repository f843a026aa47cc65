"""Campaigns that inject faults into training jobs, and the invariants that every run must keep."""
