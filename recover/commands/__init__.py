"""The larger verbs of the command `recover`, a file each."""
