"""The runtime on PyTorch: modules as stages, their boundaries, and what `torch.distributed` offers around them."""
