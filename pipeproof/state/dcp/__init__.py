"""PyTorch's distributed checkpoint (DCP): read without PyTorch, and without executing its pickles."""
