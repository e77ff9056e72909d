"""Rehearsal: a plan's communication alone, for real, with elements that say where they come from."""
