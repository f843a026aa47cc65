"""A job as plain data: its specification, its environment, its files and its output."""
