"""Trainers of other projects under `recover.Step`. Nothing in the core imports this package."""
