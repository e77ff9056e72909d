"""The plan: its sections, its file, and the checks of both."""
