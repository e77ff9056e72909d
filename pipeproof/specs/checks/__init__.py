"""Checks across the sections of a plan; checks of one section are in its file."""
