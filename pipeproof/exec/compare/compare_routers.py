"""Comparison of router values with the reference: their losses, and the biases after a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.exec.compare.step_losses import json_number
from pipeproof.stages.describe.gradient_facts import ROUTER_LOSSES, routers

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class RouterResult:
    """Router values of one step; the arrays are by name.

    ``aux`` and ``z`` are the step's losses, scalars of the run's dtype that add the losses of work items in their order
    and then of layers; ``bias/layer.3.mlp`` is the bias after the step. ``differing`` has the names whose bits differ
    from the reference's; single losses are named ``aux/layer.3.mlp/MICRO-BATCH/SPLIT``.
    """

    of_run: Mapping[str, Array]
    reference: Mapping[str, Array]
    unpartitioned: Mapping[str, Array]
    differing: tuple[str, ...]

    @property
    def bitwise(self) -> bool:
        """True if every loss and every bias has the reference's bits, on every rank that has it."""
        return not self.differing

    @property
    def losses(self) -> tuple[str, ...]:
        """Names of the losses."""
        return tuple(name for name in ROUTER_LOSSES if name in self.reference)

    def mismatch(self) -> str:
        """Clause that states the differences; empty if there are none."""
        if self.bitwise:
            return ""
        return f"; {len(self.differing)} router values differ (first: {self.differing[0]})"

    def to_json(self) -> dict[str, Any]:
        """Return the form of the run report."""
        sides = {"loss": self.of_run, "reference_loss": self.reference, "uncut_loss": self.unpartitioned}
        return {
            "bitwise": self.bitwise,
            "differing": list(self.differing),
            "losses": {name: {key: json_number(side.get(name)) for key, side in sides.items()} for name in self.losses},
        }


def compare_routers(
    plan: LoweredPlan,
    ranks: Sequence[Mapping[str, Array]],
    reference: Mapping[str, Array],
    unpartitioned: Mapping[str, Array],
) -> RouterResult | None:
    """Compare the router values of all ranks with the reference; None if there are no values.

    Of ranks with the same value that of the lowest rank is reported.
    """
    of_run: dict[str, Array] = {}
    for of_rank in ranks:
        for name, array in of_rank.items():
            of_run.setdefault(name, array)
    if not reference and not of_run:
        return None
    differing = {name for name in reference if name not in of_run}
    for of_rank in ranks:
        differing |= {
            name for name, array in of_rank.items() if name not in reference or not _same(array, reference[name])
        }
    sums = [_summed(plan, side) for side in (of_run, reference, unpartitioned)]
    return RouterResult(sums[0], sums[1], sums[2], tuple(sorted(differing)))


def _summed(plan: LoweredPlan, values: Mapping[str, Array]) -> dict[str, Array]:
    """Return the biases, and the sum of each loss over work items and layers."""
    layers = routers(plan.layers)
    sums: dict[str, Array] = {}

    def order(key: str) -> tuple[int, int, int]:
        _, experts, micro_batch, split = key.split("/")
        return int(micro_batch), int(split), layers.index(experts)

    for name in ROUTER_LOSSES:
        for key in sorted((key for key in values if key.startswith(f"{name}/")), key=order):
            sums[name] = sums[name] + values[key] if name in sums else values[key]
    biases = {key: array for key, array in values.items() if key.partition("/")[0] not in ROUTER_LOSSES}
    return {**sums, **biases}


def _same(a: Array, b: Array) -> bool:
    return (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())
