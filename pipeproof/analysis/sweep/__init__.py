"""Sweeps: one plan with many values for some of its keys, every point checked and simulated."""
