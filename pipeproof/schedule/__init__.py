"""Schedules as data: pure generators, passes over programs, the op table."""
