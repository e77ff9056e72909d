"""The references' clip: gradients times limit / max(norm, limit), with the norm of all of them together.

The squares of a weight's gradient are added part by part, and the weights'
sums in the order of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle

from pipeproof.stages.reference.pieces import add

Parts = Sequence[Sequence[paddle.Tensor]]
"""What a gradient is cut into, without copies: parts of parts, added inside first."""


def clip_factor(limit: float, dtype: str, gradients: Mapping[str, Parts]) -> npt.NDArray[Any]:
    """What every gradient is multiplied by, a scalar of ``dtype``; ``gradients`` are in the order of the model."""
    most = np.dtype(dtype).type(limit)
    total = add([add([add([_squared(part) for part in inner]) for inner in parts]) for parts in gradients.values()])
    return np.asarray(most / np.maximum(np.sqrt(total), most))


def _squared(part: paddle.Tensor) -> np.floating[Any]:
    number: np.floating[Any] = (part * part).sum().numpy()[()]
    return number
