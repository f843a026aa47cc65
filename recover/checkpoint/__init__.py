"""Checkpoints: the state of a step on disk. Only confirmed ones are named `step-N`; any number of
replicas can resume from them."""
