"""Advice: candidate schedules that make the step of a plan shorter, timed and verified, with reasons."""
