"""Number of GPUs that PyTorch sees; the query starts nothing on them."""

from __future__ import annotations

import torch


def num_gpus() -> int:
    """Number of GPUs that this process may use."""
    return int(torch.cuda.device_count())
