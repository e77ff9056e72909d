"""Cutting a saved state anew: the proof that nothing is lost, and then the bytes."""
