"""The agent of a host: starts and watches its part of a job on several hosts."""
