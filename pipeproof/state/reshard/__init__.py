"""Resharding a saved state: the proof that nothing is lost, and then the bytes."""
