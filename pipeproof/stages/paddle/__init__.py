"""Layers of a stage on Paddle."""
