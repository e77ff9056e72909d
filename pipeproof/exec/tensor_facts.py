"""What a log says of a tensor."""

from __future__ import annotations

import numpy as np
import paddle


def numel_of(tensor: paddle.Tensor) -> int:
    """Number of elements."""
    return int(np.prod(tensor.shape, dtype=np.int64))


def dtype_of(tensor: paddle.Tensor) -> str:
    """The type of the elements, as plans name it."""
    return str(tensor.dtype).removeprefix("paddle.")
