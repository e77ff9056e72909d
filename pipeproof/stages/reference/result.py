"""What the single-process reference has to show for a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step's loss, a scalar of the run's dtype, and every gradient by name in its whole shape and that dtype."""

    step: int
    loss: np.generic
    gradients: Mapping[str, npt.NDArray[Any]]
