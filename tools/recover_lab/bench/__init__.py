"""Benchmarks, one module each: it measures against a named peer in the same run, and declares what is published."""
