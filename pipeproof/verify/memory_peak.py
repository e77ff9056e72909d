"""Rank with the highest memory peak, found by simulation, and changes that lower the peak."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType

from pipeproof.comm.lower import lower
from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.diagnostics.problems import listed
from pipeproof.diagnostics.units import size_text, time_text
from pipeproof.sim.memory_curve import GIB, MemoryCurve
from pipeproof.sim.outcome import SimulationError
from pipeproof.sim.simulate import Simulation, simulate
from pipeproof.specs.memory import Recompute
from pipeproof.verify.subject import Subject
from pipeproof.views.memory_table import make_up_text

_LEANER: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gpipe": ("1f1b",),
        "eager_1f1b": ("1f1b",),
        "looped_bfs": ("interleaved",),
        "zb_h2": ("zb_h1", "1f1b"),
        "zb_h1": ("1f1b",),
        "interleaved_zb": ("interleaved",),
        "zb_v": ("v_half", "v_min"),
        "v_half": ("v_min",),
    }
)
"""Kinds of schedules for the same stages that hold fewer activations, or hold them for a shorter time."""

_MORE: Mapping[Recompute, tuple[Recompute, ...]] = MappingProxyType(
    {"none": ("selective", "full"), "selective": ("full",), "full": ()}
)
"""Settings of ``recompute`` that keep fewer activations."""


@dataclass(frozen=True, slots=True)
class Worst:
    """The rank that holds most, and its curve."""

    rank: int
    curve: MemoryCurve

    def is_over(self, budget_gib: float) -> bool:
        """Return True if the peak is above a budget."""
        return self.curve.peak > budget_gib * GIB


def worst_of(subject: Subject) -> Worst | None:
    """The rank of a plan that holds most; None if the step does not end."""
    simulation = subject.once(simulation_of)
    return None if simulation is None else _worst(simulation)


def simulation_of(subject: Subject) -> Simulation | None:
    """The simulated step of a plan; None if it does not end."""
    return _simulated(subject.plan)


def gib_text(gib: float) -> str:
    """Text of a size in GiB, in the unit that fits it."""
    return size_text(int(gib * GIB))


def peak_text(worst: Worst, limit: str) -> str:
    """Text of a peak: its size and time, the exceeded limit, and its parts."""
    curve = worst.curve
    return f"{size_text(curve.peak)} at {time_text(curve.peak_at_us)}, and {limit}: {make_up_text(curve)}"


def _simulated(plan: LoweredPlan) -> Simulation | None:
    try:
        return simulate(plan)
    except SimulationError:
        return None


def _worst(simulation: Simulation) -> Worst:
    """The rank with the highest peak, the first of equals."""
    ranks = (Worst(rank, curve) for rank, curve in enumerate(simulation.memory))
    return max(ranks, key=lambda worst: worst.curve.peak)


def what_fits(plan: LoweredPlan, budget_gib: float) -> str:
    """Changes that fit, each simulated with the plan's times; if none does, the nearest one."""
    overhead = float(plan.spec.memory.overhead_gib)
    if overhead >= budget_gib:
        return f"set memory.budget_gib to {math.ceil(overhead) + 1} or more: memory.overhead_gib alone fills the budget"
    fitting: dict[frozenset[str], int] = {}
    nearest: tuple[int, str] | None = None
    for texts, changed in _changes(plan):
        if any(subset <= texts for subset in fitting):
            continue  # a part of this change is enough
        simulation = _simulated(changed)
        if simulation is None:
            continue
        worst = _worst(simulation)
        peak = worst.curve.peak
        if not worst.is_over(budget_gib):
            fitting[texts] = peak
        elif nearest is None or peak < nearest[0]:
            nearest = peak, _and(texts)
    if fitting:
        return "; ".join(f"with {_and(texts)} it needs {size_text(peak)}" for texts, peak in fitting.items())
    more = "use more pipeline or tensor parallel ranks, or smaller micro-batches"
    return more if nearest is None else f"{more}: even with {nearest[1]} it needs {size_text(nearest[0])}"


def _and(texts: Iterable[str]) -> str:
    return listed(sorted(texts), "and")


def _changes(plan: LoweredPlan) -> Iterator[tuple[frozenset[str], LoweredPlan]]:
    """The plan with one or several changes, fewer changes first; each is named as it would be written."""
    spec, memory = plan.spec, plan.spec.memory
    is_gathered = (
        spec.topology.sequence_parallel and spec.topology.tp > 1 and memory.sequence_parallel_activations == "keep"
    )
    values = {
        "recompute": () if spec.is_custom else _MORE[memory.recompute],
        "shard_optimizer": ("dp",) if spec.topology.dp > 1 and memory.shard_optimizer == "none" else (),
        "sequence_parallel_activations": ("regather",) if is_gathered else (),
    }
    plans = {"": plan}
    for kind in _LEANER.get(spec.schedule.kind, ()):
        other = spec.model_copy(update={"schedule": spec.schedule.model_copy(update={"kind": kind})})
        with suppress(BadPlanError):  # there is no such schedule for these sizes
            plans[f"`schedule.kind: {kind}`"] = lower(other)
    choices = product(plans, *(("", *more) for more in values.values()))
    for schedule, *chosen in sorted(choices, key=lambda choice: sum(map(bool, choice))):
        update = {key: value for key, value in zip(values, chosen, strict=True) if value}
        texts = frozenset({schedule, *(f"`memory.{key}: {value}`" for key, value in update.items())} - {""})
        if texts:
            changed = plans[schedule]
            other = changed.spec.model_copy(update={"memory": memory.model_copy(update=update)})
            yield texts, replace(changed, spec=other)
