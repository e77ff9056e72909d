"""What a person writes: the plan, its file, and what is said about it."""
