"""Compares what routers have beside gradients with the reference: their losses, and the biases after a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeproof.comm.lowered import LoweredPlan
from pipeproof.stages.describe.balance import ROUTER_LOSSES, routers

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class RouterResult:
    """One step of all routers; the arrays are by name.

    Of ``aux`` and ``z`` that is the step's loss, a scalar of the run's dtype
    which adds those of units of work in their order and then of layers; of
    ``bias/layer.3.mlp`` the bias after the step. ``differing`` names what has
    not the reference's bits: single losses as ``aux/layer.3.mlp/MICRO-BATCH/PIECE``.
    """

    ours: Mapping[str, Array]
    reference: Mapping[str, Array]
    uncut: Mapping[str, Array]
    differing: tuple[str, ...]

    @property
    def bitwise(self) -> bool:
        """Whether every loss and every bias has the reference's bits, on every rank that has it."""
        return not self.differing

    @property
    def losses(self) -> tuple[str, ...]:
        """The losses that there are, by name."""
        return tuple(name for name in ROUTER_LOSSES if name in self.reference)

    def mismatch(self) -> str:
        """What differs, as a part of a sentence; empty where nothing does."""
        if self.bitwise:
            return ""
        return f"; of what routers have beside gradients {len(self.differing)} differ (first: {self.differing[0]})"

    def to_json(self) -> dict[str, Any]:
        """As the run report shows it."""
        sides = {"loss": self.ours, "reference_loss": self.reference, "uncut_loss": self.uncut}
        return {
            "bitwise": self.bitwise,
            "differing": list(self.differing),
            "losses": {name: {side: _number(shown.get(name)) for side, shown in sides.items()} for name in self.losses},
        }


def compare_routers(
    plan: LoweredPlan,
    ranks: Sequence[Mapping[str, Array]],
    reference: Mapping[str, Array],
    uncut: Mapping[str, Array],
) -> RouterResult | None:
    """Hold what all ranks show of their routers against both references; None where routers have nothing to show."""
    if not reference and not any(ranks):
        return None
    ours: dict[str, Array] = {}
    differing = dict.fromkeys(name for name in reference if not any(name in of_rank for of_rank in ranks))
    for of_rank in ranks:
        for name, array in of_rank.items():
            ours.setdefault(name, array)
            if name not in reference or not _same(array, reference[name]):
                differing[name] = None
    shown, of_reference, of_uncut = (_by_name(plan, side) for side in (ours, reference, uncut))
    return RouterResult(shown, of_reference, of_uncut, tuple(sorted(differing)))


def _by_name(plan: LoweredPlan, shown: Mapping[str, Array]) -> dict[str, Array]:
    """Biases as they are, and the sum of each loss."""
    layers = routers(plan.layers)
    sums: dict[str, Array] = {}

    def place(key: str) -> tuple[int, int, int]:
        _, experts, micro_batch, piece = key.split("/")
        return int(micro_batch), int(piece), layers.index(experts)

    for name in ROUTER_LOSSES:
        for key in sorted((key for key in shown if key.startswith(f"{name}/")), key=place):
            sums[name] = sums[name] + shown[key] if name in sums else shown[key]
    biases = {key: array for key, array in shown.items() if key.partition("/")[0] not in ROUTER_LOSSES}
    return {**sums, **biases}


def _same(a: Array, b: Array) -> bool:
    return (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())


def _number(value: Array | None) -> float | None:
    """JSON has neither infinity nor NaN."""
    return float(value) if value is not None and np.isfinite(value) else None
