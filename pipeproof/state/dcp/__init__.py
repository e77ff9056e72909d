"""PyTorch's distributed checkpoint (DCP): its metadata, read without executing its pickle, and its tensors."""
