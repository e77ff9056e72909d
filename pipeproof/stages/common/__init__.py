"""What a pipeline stage is on any framework: the half that Paddle's stages and PyTorch's share; it imports neither."""
