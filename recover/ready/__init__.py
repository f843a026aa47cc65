"""Processes that have imported what ranks need, and become ranks when one is started."""
