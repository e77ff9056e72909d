"""PyTorch's distributed checkpoint (DCP): read and written without PyTorch, and without executing its pickles."""
