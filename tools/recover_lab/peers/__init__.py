"""Runs the same job with the same deaths on us and on whom we are compared with, and reads what happened when."""
