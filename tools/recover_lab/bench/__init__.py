"""Benchmarks: each a ratio against a named peer in the same run, written as a table and as JSON."""
