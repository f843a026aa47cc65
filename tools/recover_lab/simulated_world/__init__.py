"""Many virtual ranks in one process, under a scheduler that can kill any of them."""
