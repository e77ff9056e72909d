"""What the single-process reference has to show for a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step's loss and gradients, and the weights that the step began with.

    ``loss`` is a scalar of the run's dtype; the arrays are by parameter name,
    whole, and of that dtype.
    """

    step: int
    loss: np.floating[Any]
    gradients: Mapping[str, npt.NDArray[Any]]
    weights: Mapping[str, npt.NDArray[Any]]
