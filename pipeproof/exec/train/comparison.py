"""Result of ``Pipeline.compare``: the loss and the gradients of a step next to the unpartitioned model's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeproof.analysis.align.array_digests import Array, distance


@dataclass(frozen=True, slots=True)
class GradientDifference:
    """One parameter whose gradient differs from the reference's in some bit.

    ``distance`` is the largest difference relative to the largest element, as in ``pipeproof state align``; ``bound``
    is the largest distance that rounding can cause: 0 if the sums have the reference's order. Beyond it, ``cause`` is a
    guess.
    """

    name: str
    stage: int
    distance: float
    bound: float
    cause: str = ""

    def __str__(self) -> str:
        where = f"stage {self.stage}, {self.name}: {self.distance:.3g} of the largest element apart"
        if self.distance <= self.bound:
            return f"{where}, within the bound {self.bound:.3g}"
        return f"{where}, BEYOND the bound {self.bound:.3g}; a guess: {self.cause}"


def gradient_difference(
    name: str, stage: int, arrays: tuple[Array, Array], dtype: str,
    *, noise: float | None = None, cancellation: float | None = None,
) -> GradientDifference:  # fmt: skip
    """The distance of a gradient from the reference's, and its cause; as in the comparison of two programs' records.

    ``noise`` is given if operations round differently from the reference's, ``cancellation`` if the sum has another
    order, see ``distance``. Without both, all bits should be equal.
    """
    from pipeproof.analysis.align.likely_cause import guess
    from pipeproof.analysis.align.read_record import Values
    from pipeproof.analysis.align.record_format import Recorded

    deviation = distance(*arrays, dtype, noise or 0.0, lambda: cancellation or 1.0)
    bound = 0.0 if noise is None and cancellation is None else deviation.bound
    if deviation.relative <= bound:
        return GradientDifference(name, stage, deviation.relative, bound)
    recorded = Recorded(0, "", arrays[0].shape, dtype, "", 0.0, (), parameter=name)
    cause = guess(Values(arrays[0], {}), Values(arrays[1], {}), recorded, recorded)
    return GradientDifference(name, stage, deviation.relative, bound, f"{cause.family}: {cause.evidence}")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of ``Pipeline.compare``, equal on all ranks.

    ``without_gradient`` are trained parameters without a gradient from any backward of the step. The reference has the
    same modules, and both sides count these gradients as zeros.
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
        """True if the distance of every gradient is within its bound."""
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
    differences = tuple(GradientDifference(**each) for each in content["differences"])
    return Comparison(**{**content, "differences": differences, "without_gradient": tuple(content["without_gradient"])})
