"""Clusters in virtual time: what failures cost, by the policy that will run.

A discrete-event simulation. Replicas and nodes in the same state are counted, not listed, and nothing is computed for
the time in which nothing happens; so its cost goes with the number of failures, not of GPUs.
"""
