"""Units in which differences of gradients are measured, where the gradient itself is not a good one."""

from __future__ import annotations

from pipeproof.stages.describe.layers.attention import MEASURED_WITH
from pipeproof.stages.describe.residual_streams import ENDS


def measured_with(name: str) -> tuple[str, ...]:
    """Other weights whose largest gradient element is also the unit for differences of the named gradient.

    A scale or a bias of streams has few elements. Each is a sum over all tokens of addends with both signs, which
    sometimes nearly cancel, so these elements alone are not a good unit.
    """
    prefix, _, end = name.rpartition(".")
    if prefix.endswith("_streams"):
        return tuple(f"{prefix}.{other}" for other in ENDS if other != end)
    cancelling = [(name.removesuffix(own), others) for own, others in MEASURED_WITH.items() if name.endswith(own)]
    return tuple(layer + other for layer, others in cancelling for other in others)
