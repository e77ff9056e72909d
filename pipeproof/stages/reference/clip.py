"""The references' clip: gradients times limit / max(norm, limit), with the norm of all of them together.

The squares of a weight's gradient are added part by part, and the weights'
sums in the order of the model. Where dp ranks share out the optimizer's work,
each share of a part is added by itself first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle

from pipeproof.stages.describe.shares import share_range
from pipeproof.stages.reference.pieces import add

Parts = Sequence[Sequence[paddle.Tensor]]
"""What a gradient is cut into, without copies: parts of parts, added inside first."""


def clip_factor(limit: float, dtype: str, gradients: Mapping[str, Parts], shares: int = 1) -> npt.NDArray[Any]:
    """What every gradient is multiplied by, a scalar of ``dtype``; ``gradients`` are in the order of the model.

    Each part is cut, flat, into this many ``shares``.
    """
    most = np.dtype(dtype).type(limit)
    whole = [[[_squared(part, shares) for part in inner] for inner in parts] for parts in gradients.values()]
    total = add([add([add(inner) for inner in parts]) for parts in whole])
    return np.asarray(most / np.maximum(np.sqrt(total), most))


def _squared(part: paddle.Tensor, shares: int) -> np.floating[Any]:
    if shares == 1:
        number: np.floating[Any] = (part * part).sum().numpy()[()]
        return number
    flat = part.flatten()
    ranges = [share_range(part.size, shares, place) for place in range(shares)]
    return add([_squared(flat[start:stop], 1) for start, stop in ranges if stop > start])
