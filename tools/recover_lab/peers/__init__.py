"""The same job with the same deaths on ReCoVer, on checkpoint-restart and on torchft, and metrics of their events."""
