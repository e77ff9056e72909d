"""The key-value store that the processes of one job share, behind one protocol for PyTorch's and Paddle's."""
