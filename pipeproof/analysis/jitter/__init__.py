"""Jitter: step times under random noise and slow ranks, and the sensitivity of the step to delays."""
