"""Checks of the user's loop: losses and weights, left-overs of a plain loop, times."""
