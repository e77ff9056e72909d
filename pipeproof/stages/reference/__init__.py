"""The single-process reference that runs are held against."""
