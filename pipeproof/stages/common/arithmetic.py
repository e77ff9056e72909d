"""The model's arithmetic that is the same code on both frameworks, and its constants."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from pipeproof.stages.common.backend_ops import Tensor

NORM_EPSILON = 1e-6
ROTARY_BASE = 10000.0
CLAMPED_SWIGLU_ALPHA = 1.702


def rotary_angles(seq_length: int, head_size: int) -> npt.NDArray[np.float64]:
    """Angles of the rotary embedding (arXiv:2104.09864), [S, D/2]: position p has p * 10000^(-2i/D) at i."""
    return np.outer(np.arange(seq_length), ROTARY_BASE ** (-np.arange(0, head_size, 2) / head_size))


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float, clip: Callable[..., Tensor]) -> Tensor:
    """``g sigmoid(1.702 g) (u + 1)`` with g = min(gate, limit) and u = up clamped to [-limit, limit].

    Source: gpt-oss (openai/gpt-oss, ``gpt_oss/torch/model.py``). The gradient of the framework's ``clip`` is zero
    beyond a limit; at the limit it is the gradient from inside.
    """
    g, u = clip(gate, max=limit), clip(up, min=-limit, max=limit)
    return g * (CLAMPED_SWIGLU_ALPHA * g).sigmoid() * (u + 1.0)


def gated(
    swiglu: Callable[[Tensor, Tensor], Tensor], limit: float | None, clip: Callable[..., Tensor]
) -> Callable[[Tensor, Tensor], Tensor]:
    """The activation function of gate and up for a model with this ``swiglu_limit``.

    ``swiglu`` and ``clip`` are the framework's.
    """
    return swiglu if limit is None else partial(clamped_swiglu, limit=limit, clip=clip)
