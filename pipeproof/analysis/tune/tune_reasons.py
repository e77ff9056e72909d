"""Comparison of rows in words: the parts of a step in which they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from pipeproof.analysis.tune.evaluate_layout import PARTS
from pipeproof.analysis.tune.layouts import Layout
from pipeproof.diagnostics.units import signed_time_text, time_text
from pipeproof.schedule.kinds import SCHEDULE_KINDS, Placement

_NAMES = {
    "compute": "computations",
    "recompute": "recomputation",
    "optimizer": "the optimizer",
    "bubble": "bubble",
    "communication": "exposed communication",
}
_LEAST = 0.001
"""Share of a step below which a difference is not named."""


def differences_text(parts: Mapping[str, float], best: Mapping[str, float]) -> str:
    """The parts in which a row differs from another one, the largest first, with their sign."""
    step = sum(best.values())
    differing = [(parts[name] - best[name], name) for name in PARTS if abs(parts[name] - best[name]) > _LEAST * step]
    if not differing:
        return "within 0.1 % in each part"
    ordered = sorted(differing, key=lambda item: -abs(item[0]))
    return ", ".join(f"{_NAMES[name]} {signed_time_text(difference * 10**6)}" for difference, name in ordered)


def winner_text(parts: Mapping[str, float], others: Sequence[Mapping[str, float]]) -> str:
    """Why the first row wins: its shorter parts, compared with the mean of the next rows, and its longer ones."""
    if not others:
        return "no other layout is listed"
    mean = {name: sum(other[name] for other in others) / len(others) for name in PARTS}
    step = sum(parts.values())
    gains = sorted(((mean[name] - parts[name], name) for name in PARTS), reverse=True)
    saves = [f"{time_text(gain * 10**6)} less {_NAMES[name]}" for gain, name in gains if gain > _LEAST * step]
    pays = [
        f"{time_text(-gain * 10**6)} more {_NAMES[name]}" for gain, name in reversed(gains) if -gain > _LEAST * step
    ]
    text = "against the mean of the next rows it has " + (", ".join(saves) if saves else "no shorter part")
    return f"{text}; it pays {', '.join(pays)}" if pays else text


DIFFERENCE_ERRORS: Mapping[str, float] = MappingProxyType({"schedule": 0.012, "replicas": 0.058, "shards": 0.144})
"""Mean error of the ratio of two predicted steps of one model on one system, by the difference of the layouts.

``schedule``: 25 pairs of own runs on two H200, one mesh and micro-batch. ``replicas``: 126 pairs of vTrain on several
nodes that differ in pp, dp or the micro-batch. ``shards``: 193 such pairs that differ in tp. A test derives the
figures from ``validation/results/accuracy-measurements.md``.
"""


def difference_error(a: Layout, b: Layout) -> float:
    """The smallest relative difference of two predicted steps that shows which layout is faster."""
    if (a.tp, a.cp, a.ep) != (b.tp, b.cp, b.ep):
        return DIFFERENCE_ERRORS["shards"]
    same = (a.pp, a.dp, a.mbs) == (b.pp, b.dp, b.mbs)
    return DIFFERENCE_ERRORS["schedule" if same else "replicas"]


_SIMPLE_KINDS = ("1f1b", "interleaved", "gpipe")
"""Kinds of schedules that every framework runs, the simplest first."""


def complexity(layout: Layout) -> tuple[int, ...]:
    """The order of layouts with equal steps: stages with two copies last, then by schedule, chunks, axes, memory."""
    kind = SCHEDULE_KINDS[layout.kind]
    simple = _SIMPLE_KINDS.index(layout.kind) if layout.kind in _SIMPLE_KINDS else len(_SIMPLE_KINDS)
    return (
        int(kind.placement is Placement.BOTH_WAYS),
        simple,
        layout.vpp,
        layout.num_sequence_splits,
        int(layout.overlap != "none"),
        sum(size > 1 for size in (layout.pp, layout.tp, layout.cp, layout.ep)),
        ("none", "selective", "full").index(layout.recompute),
    )
