"""What the single-process reference has to show for a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step's loss and gradients, and the weights that the step began with.

    ``loss`` is a scalar of the run's dtype; the arrays are by parameter name,
    whole, and of that dtype. ``weights`` also has the biases of routers, where
    they move, and the buffers of own layers, as ``Start`` has them. ``routers``
    is what is left of the step: the losses of routers by unit of work, and the
    biases, under the names of ``describe.balance``.
    """

    step: int
    loss: np.floating[Any]
    gradients: Mapping[str, npt.NDArray[Any]]
    weights: Mapping[str, npt.NDArray[Any]]
    routers: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
