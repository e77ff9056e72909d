"""Comparison of rows in words: the parts of a step in which they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeproof.analysis.tune.evaluate_layout import PARTS

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
    return ", ".join(f"{_NAMES[name]} {_signed(difference, step)}" for difference, name in ordered)


def winner_text(parts: Mapping[str, float], others: Sequence[Mapping[str, float]]) -> str:
    """Why the first row wins: the parts in which it is shorter than the mean of the next rows, and those it pays."""
    if not others:
        return "no other layout is listed"
    mean = {name: sum(other[name] for other in others) / len(others) for name in PARTS}
    step = sum(parts.values())
    gains = sorted(((mean[name] - parts[name], name) for name in PARTS), reverse=True)
    saves = [f"{gain:.3g} s less {_NAMES[name]}" for gain, name in gains if gain > _LEAST * step]
    pays = [f"{-gain:.3g} s more {_NAMES[name]}" for gain, name in reversed(gains) if -gain > _LEAST * step]
    text = "against the mean of the next rows it has " + (", ".join(saves) if saves else "no shorter part")
    return f"{text}; it pays {', '.join(pays)}" if pays else text


def _signed(seconds: float, step: float) -> str:
    """A difference in the unit that goes with the time of a step."""
    return f"{seconds:+.3g} s" if step >= 0.01 else f"{seconds * 10**6:+.4g} us"
