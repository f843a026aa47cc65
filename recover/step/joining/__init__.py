"""The state of the others, given to a replica that joins."""
