"""The norm of all gradients, to which ``run.clip_norm`` clips them: who counts what, and over whom it is summed.

After the gradients' own sums each rank squares and adds what it holds, weight
by weight, into a vector with one entry for each weight of the model, in the
model's order. Each element of each gradient counts on one rank: ranks that
hold different parts count them all, of ranks with equal parts, or copies of
one weight, the first does. All-reduces over ``tp``, ``ep`` and ``pp`` make the
vector whole everywhere; ``dp`` and ``cp`` ranks have equal gradients by then,
unless the optimizer is sharded: then each dp rank has its share of every sum,
and counts that, and the vector is summed over ``dp`` first.
The norm is the root of the vector's sum, entry by entry: where a weight stands
in the pipeline changes no bit of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pipeproof.stages.describe.shares import num_shares

if TYPE_CHECKING:
    from pipeproof.comm.lowered import LoweredPlan

CUT_AXES = ("tp", "ep")
"""Axes over which weights are cut."""


def norm_axes(plan: LoweredPlan) -> tuple[str, ...]:
    """The axes over which the vector is summed, in order."""
    shared = ("dp",) if num_shares(plan.spec) > 1 else ()
    return (*shared, *(axis for axis in (*CUT_AXES, "pp") if plan.mesh.size(axis) > 1))


def num_weights(plan: LoweredPlan) -> int:
    """The vector's length."""
    return sum(len(layer.parameters) for layer in plan.layers)


def counted_by(plan: LoweredPlan, coords: Mapping[str, int]) -> Iterator[tuple[int, int, str]]:
    """(place in the vector, stage, name) of the weights that the rank at ``coords`` counts."""
    place = {weight.name: i for i, weight in enumerate(w for layer in plan.layers for w in layer.parameters)}
    pp = coords["pp"]
    for stage, holders in enumerate(plan.holders):
        for weight in plan.weights_of(stage, pp) if pp in holders else ():
            is_first = plan.shared_weights.places(stage, weight.name)[0] == pp
            if is_first and all(coords[axis] == 0 or axis in weight.sharded_over for axis in CUT_AXES):
                yield place[weight.name], stage, weight.name
