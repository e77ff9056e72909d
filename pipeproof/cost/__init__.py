"""Durations of operations: analytic model, measured profiles, links and networks."""
