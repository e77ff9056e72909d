"""Functions for Python programs and notebooks, and their results; ``pipeproof`` itself exports them."""
