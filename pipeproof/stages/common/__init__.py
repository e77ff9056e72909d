"""The part of a pipeline stage that Paddle and PyTorch share. It imports neither framework."""
