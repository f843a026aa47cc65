"""Campaigns that break jobs on purpose, and the laws that every broken run must keep."""
