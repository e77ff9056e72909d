"""Comparison of two timelines."""
