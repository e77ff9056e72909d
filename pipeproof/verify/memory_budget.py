"""7xx: the most memory that a rank holds, against the available memory.

Only a simulation shows it. A plan without a budget or a device is not
simulated for its check, and the simulator is not even loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.diagnostics.finding import Finding, RuleDoc
from pipeproof.schedule.op_table import IntColumn, OpGraph
from pipeproof.schedule.ops import OpKind
from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.stages.describe.boundary import Boundary
from pipeproof.verify.subject import Rule, Subject

_TAKES = frozenset({OpKind.FORWARD})
_GIVES_BACK = frozenset({OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT})


@dataclass(frozen=True, slots=True)
class InFlight:
    """The most micro-batches whose activations a rank holds, and the size of their boundary inputs.

    ``boundary_bytes`` counts the input of each held micro-batch over the
    boundary before its stage, for the first stage the model's activation: a
    lower bound of the memory that needs no times. The simulator counts the
    activations inside stages, and all else.
    """

    rank: int
    peak_activations: int
    boundary_bytes: int


def in_flight(subject: Subject) -> tuple[InFlight, ...]:
    """Per rank: held from the start of F to the end of B (of W, if the backward is split), offloaded ones included."""
    graph = subject.graph
    inputs = np.array(_input_bytes(subject.plan), dtype=np.int64)
    change = graph.is_kind(_TAKES).astype(np.int64) - graph.is_kind(_GIVES_BACK)
    weight = np.where(change != 0, inputs[np.clip(graph.stage, 0, len(inputs) - 1)], 0)
    counts, weights = (_peaks(graph, column) for column in (change, change * weight))
    return tuple(InFlight(rank, *both) for rank, both in enumerate(zip(counts, weights, strict=True)))


def _peaks(graph: OpGraph, change: IntColumn) -> Iterator[int]:
    """By rank, the maximum of its accumulated changes."""
    held = np.cumsum(change)
    for start, stop in pairwise(graph.offsets.tolist()):
        before = int(held[start - 1]) if start else 0
        yield max(int(held[start:stop].max(initial=before)) - before, 0)


def _input_bytes(plan: LoweredPlan) -> list[int]:
    """By stage, the input bytes of the largest micro-batch, or split, on a rank."""

    def num_bytes(tensors: Sequence[Boundary]) -> int:
        return sum(prod(one.local_shape_at(at_sender=False)) * dtype_bytes(one.dtype) for one in tensors)

    return [num_bytes((plan.boundary,)), *(max(map(num_bytes, edge.variants)) for edge in plan.edges)]


OVER_BUDGET = RuleDoc(
    code="PP701",
    title="a rank holds more than the memory budget",
    explanation=(
        "`memory.budget_gib` is the memory of a rank. The simulation of a step gives the memory of each rank: weights, "
        "gradients, optimizer states, activations from their forward to their backward, logits, messages, and the "
        "overhead that the plan states. The message has the rank with the highest peak, the peak's first time, and "
        "its parts; the help names changes with which the same computation fits."
    ),
    wrong="memory: {budget_gib: 0.0001}",
    right="memory: {budget_gib: 1}",
)


def _of_program(first: str) -> str:
    programs = f"[{first}, ['1F0', '1F1', '1B0', '1B1']]"
    schedule = f"{{kind: custom, num_micro_batches: 2, programs: {programs}}}"
    return f"topology: {{pp: 2}}\nschedule: {schedule}\nmemory: {{budget_gib: 1}}"


NOT_CHECKED = RuleDoc(
    code="PP702",
    title="the memory budget was not checked",
    severity="warning",
    explanation=(
        "The plan has a `memory.budget_gib`, but its step cannot be simulated to its end: its memory use is "
        "unknown. The rules on matching and deadlock report the cause."
    ),
    wrong=_of_program("['0F0', '0B0', '0F1', '0B1']"),
    right=_of_program("['0F0', '0F1', '0B0', '0B1']"),
)

OVER_DEVICE = RuleDoc(
    code="PP703",
    title="a rank holds more than the memory of its device",
    severity="warning",
    explanation=(
        "`cost.analytic` names a device with its memory in the data sheet. The simulation of a step gives more for a "
        "rank. The plan may not fit, or it may not state the memory savings of its training: by default gradients are "
        "accumulated in float32, gathered activations are kept, and nothing is recomputed. Llama 3.1 405B on 512 H100 "
        "(MLPerf Training) needs 119 GiB by these defaults, and 77 GiB with `memory.gradient_dtype: bfloat16` and "
        "`memory.sequence_parallel_activations: regather`, as Megatron-LM trains it. With `memory.budget_gib` too "
        "much memory is an error (PP701), whose help names changes that fit, and this rule is silent."
    ),
    wrong=(
        "model: {hidden_size: 16384, num_heads: 128, ffn_size: 53248}\n"
        "cost: {analytic: {device: h100, dtype: bfloat16}}"
    ),
    right=(
        "model: {hidden_size: 4096, num_heads: 32, ffn_size: 14336}\ncost: {analytic: {device: h100, dtype: bfloat16}}"
    ),
)


def _check_device(subject: Subject) -> Iterator[Finding]:
    device = subject.plan.device
    if device is None or subject.plan.spec.memory.budget_gib is not None:
        return
    from pipeproof.cost.devices import DEVICES
    from pipeproof.verify import memory_peak

    worst, capacity = subject.once(memory_peak.worst_of), DEVICES[device].memory_gib
    if worst is None or not worst.is_over(capacity):
        return
    limit = f"`{device}` has {memory_peak.gib_text(capacity)}"
    yield OVER_DEVICE.finding(
        f"{subject.coords_text(worst.rank)} holds {memory_peak.peak_text(worst, limit)}",
        location=subject.locate("cost", "analytic"),
        help=f"state under `memory` how the training saves memory, or give `memory.budget_gib: {capacity}`: then the "
        "check names changes that fit",
    )


def _check_budget(subject: Subject) -> Iterator[Finding]:
    budget = subject.plan.spec.memory.budget_gib
    if budget is None:
        return
    from pipeproof.verify import memory_peak

    worst = subject.once(memory_peak.worst_of)
    if worst is None or not worst.is_over(budget):
        return
    limit = f"`memory.budget_gib` is {memory_peak.gib_text(budget)}"
    yield OVER_BUDGET.finding(
        f"{subject.coords_text(worst.rank)} holds {memory_peak.peak_text(worst, limit)}",
        location=subject.locate("memory", "budget_gib"),
        help=memory_peak.what_fits(subject.plan, budget),
    )


def _check_known(subject: Subject) -> Iterator[Finding]:
    if subject.plan.spec.memory.budget_gib is None:
        return
    from pipeproof.verify import memory_peak

    if subject.once(memory_peak.worst_of) is None:
        yield NOT_CHECKED.finding(
            "the step never ends, so its memory use is unknown",
            location=subject.locate("memory", "budget_gib"),
            help="fix the errors of this plan first",
        )


RULES = (
    Rule(OVER_BUDGET, _check_budget, needs_plan=True),
    Rule(NOT_CHECKED, _check_known, needs_plan=True),
    Rule(OVER_DEVICE, _check_device, needs_plan=True),
)
