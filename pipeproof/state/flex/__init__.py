"""Paddle's flex checkpoint: read and written without Paddle, and without executing its pickles."""
