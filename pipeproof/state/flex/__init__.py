"""Paddle's own checkpoint, flex: read and written without Paddle, and without running what its pickles say."""

from pipeproof.state.flex.checkpoint import is_flex, open_flex

__all__ = ["is_flex", "open_flex"]
