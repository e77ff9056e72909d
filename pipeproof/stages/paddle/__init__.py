"""The layers of a stage on Paddle."""
