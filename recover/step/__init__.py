"""The middle layer: one iteration as a transaction that commits on exactly B microbatches, or
repeats until it does."""
