"""What a step sees of the user's loop: its losses, its habits, and how long it takes."""
