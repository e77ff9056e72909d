"""The stages of a plan on PyTorch, on CPUs and on GPUs."""
