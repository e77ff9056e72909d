"""Evidence of the tensors around the first difference: its producer, and the correct outputs of its layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeproof.analysis.align.likely_cause import Cause, Family
from pipeproof.analysis.align.record_format import Recorded

_MODULE = "mtp."
"""With what the names of modules of multi-token prediction begin."""


@dataclass(frozen=True, slots=True)
class WeightGradients:
    """Of the weights of one layer, those whose gradients of a step are equal on both sides, and those that differ."""

    equal: tuple[str, ...] = ()
    different: tuple[str, ...] = ()

    @property
    def are_conclusive(self) -> bool:
        """True if they narrow the position down: if all of them differ, or none, they give no evidence."""
        return bool(self.equal and self.different)


def giver(tensor: Recorded, layers: Sequence[str]) -> str | None:
    """The layer whose output is what another takes, in that direction: no layer computes between the two.

    A record has, of the MTP streams of a model with modules, the main one, and at a
    module what that reads and makes. So what a module takes backward was given by
    none of the record's, and what the last block takes is the sum of two.

    Args:
        tensor: what a layer takes, at its border.
        layers: all layers of the record, in the order of the forward direction.
    """
    place, is_module = layers.index(tensor.layer), tensor.layer.startswith(_MODULE)
    if tensor.direction == "backward":
        after = layers[place + 1] if place + 1 < len(layers) else None
        return None if after is None or is_module or after.startswith(_MODULE) else after
    before = [layer for layer in layers[:place] if is_module or not layer.startswith(_MODULE)]
    return before[-1] if before else None


def placed(cause: Cause, first: Recorded, before: Recorded | None, layers: Sequence[str]) -> Cause:
    """A cause that follows from the position: a layer with equal inputs and a different output."""
    if cause.family is not Family.UNKNOWN or before is None or not _is_of_one_layer(before, first):
        return cause
    forward = first.direction == "forward"
    was_right = "" if forward else ", and forward it is right"
    is_module, has_modules = first.layer.startswith(_MODULE), any(layer.startswith(_MODULE) for layer in layers)
    reads_others = forward and (is_module or (has_modules and first.layer == layers[-1]))
    unrecorded = " (its inputs from other MTP streams are not recorded)" if reads_others else ""
    return Cause(
        Family.COMPUTATION,
        f"{first.layer} has equal inputs{unrecorded} and a different output{was_right}: the difference is made "
        f"in this layer, collectives inside it included; {cause.evidence}",
    )


def _is_of_one_layer(taken: Recorded, given: Recorded) -> bool:
    if taken.parameter or given.parameter:
        return False
    return (taken.layer, taken.direction, taken.micro_batch, taken.piece, taken.side, given.side) == (
        given.layer, given.direction, given.micro_batch, given.piece, "input", "output",
    )  # fmt: skip
