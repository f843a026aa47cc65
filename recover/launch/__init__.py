"""Starts a job, watches it and judges how it ended."""
