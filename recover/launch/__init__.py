"""What starts a job, watches it and judges how it went."""
