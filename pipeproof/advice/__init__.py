"""What would make a plan's step shorter, by how much, and why: candidate schedules, timed and verified."""
