"""Layers of a stage on PyTorch, on CPUs and on GPUs."""
