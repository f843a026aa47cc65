"""Clusters in virtual time: the cost of failures, with the production policy.

A discrete-event simulation. Replicas and nodes in the same state are counted, not listed, and nothing is computed for
the time between events; so its cost grows with the number of failures, not of GPUs.
"""
