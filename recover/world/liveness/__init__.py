"""Signs of life, and the means to end a process that shows none."""
