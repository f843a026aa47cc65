"""Gradients as sums that can be reduced across replicas, and reduced again: buckets, arithmetic,
ledger, buffers."""
