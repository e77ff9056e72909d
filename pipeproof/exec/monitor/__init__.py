"""Monitor of jobs: rings of each rank's last operations, and the cause of a hang."""
