"""Result of ``Pipeline.compare``: the loss and the gradients of a step next to those of the unpartitioned model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GradientDifference:
    """One parameter whose gradient has other bits than the reference's.

    ``distance`` is the largest absolute difference, ``bound`` the largest that other orders of the same sums can make
    (0 where the order is the reference's), and the rounding of compiled graphs.
    """

    name: str
    stage: int
    distance: float
    bound: float

    def __str__(self) -> str:
        state = "within" if self.distance <= self.bound else "BEYOND"
        return f"stage {self.stage}, {self.name}: {self.distance:.3g} apart, {state} the bound {self.bound:.3g}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of ``Pipeline.compare``, equal on all ranks.

    ``without_gradient`` are trained parameters that no backward of the step had a gradient for. The reference has the
    same modules, and counts their gradients as zeros, as the comparison does.
    """

    loss: float
    reference_loss: float
    num_parameters: int
    differences: tuple[GradientDifference, ...]
    without_gradient: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """True if the loss and every gradient have the reference's bits."""
        return self.loss == self.reference_loss and not self.differences

    @property
    def is_within_bounds(self) -> bool:
        """True if every gradient is as near as the order of its sums allows."""
        return all(difference.distance <= difference.bound for difference in self.differences)

    def __str__(self) -> str:
        number = len(self.without_gradient)
        missing = (
            [f"{number} parameter{'s' * (number > 1)} received no gradient: {', '.join(self.without_gradient)}"]
            if number
            else []
        )
        if self.is_exact:
            num_equal = self.num_parameters - number
            return "\n".join([f"loss {self.loss:.9g} and {num_equal} gradients have the reference's bits", *missing])
        lines = [f"loss {self.loss:.9g}, reference {self.reference_loss:.9g}"]
        lines.append(f"{len(self.differences)} of {self.num_parameters} gradients have other bits")
        return "\n".join([*lines, *missing, *map(str, self.differences)])


def comparison_of(content: Mapping[str, Any]) -> Comparison:
    """The comparison whose ``dataclasses.asdict`` crossed between ranks as JSON."""
    return Comparison(
        content["loss"],
        content["reference_loss"],
        content["num_parameters"],
        tuple(GradientDifference(**each) for each in content["differences"]),
        tuple(content["without_gradient"]),
    )
