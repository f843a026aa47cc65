"""Admits joining replicas, and hands the state of the members over to them."""
