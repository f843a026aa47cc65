"""Checkpoints: the state of a step on disk. Only good ones have a name; any number of replicas
goes on from them."""
