"""What a run writes down of its steps and of its losses: one survivor writes, and all of them remember."""
