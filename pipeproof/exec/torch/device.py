"""Which GPUs PyTorch sees; asking starts nothing on them."""

from __future__ import annotations

import torch


def num_gpus() -> int:
    """As many as processes of this machine may use."""
    return int(torch.cuda.device_count())
