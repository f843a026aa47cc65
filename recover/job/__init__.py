"""What a job is told and where it runs, as plain data: the lowest room but the policy."""
