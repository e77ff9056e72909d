"""The figures of a simulation, per rank, and their published JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from pipeproof.sim.timeline import Timeline

if TYPE_CHECKING:
    from pipeproof.sim.memory.curve import MemoryCurve
    from pipeproof.sim.simulate import Simulation


@dataclass(frozen=True, slots=True)
class RankFigures:
    """What one rank costs; times in exact microseconds.

    Bubbles are idle time: ``bubble_makespan_us`` within the makespan of all
    ranks, ``bubble_span_us`` within the rank's own span. Activations count
    chunk activations of one micro-batch, freed at the end of B or W
    (``peak_activations``) or already at the end of I (``peak_activations_at_i``).
    """

    rank: int
    coords: Mapping[str, int]
    span_us: Fraction
    busy_us: Fraction
    bubble_makespan_us: Fraction
    bubble_span_us: Fraction
    bubble_makespan_ratio: Fraction
    bubble_span_ratio: Fraction
    peak_activations: int
    peak_activations_at_i: int


def figures_of(timeline: Timeline) -> tuple[RankFigures, ...]:
    """The figures of every rank of a timeline; a ratio of no time at all is 0."""
    return tuple(
        rank_figures(
            rank,
            coords,
            makespan_us=timeline.makespan_us,
            span_us=timeline.span_us(rank),
            busy_us=timeline.busy_us(rank),
            peak_activations=timeline.peak_activations(rank),
            peak_activations_at_i=timeline.peak_activations_at_i(rank),
        )
        for rank, coords in enumerate(timeline.ranks)
    )


def rank_figures(
    rank: int,
    coords: Mapping[str, int],
    *,
    makespan_us: Fraction,
    span_us: Fraction,
    busy_us: Fraction,
    peak_activations: int,
    peak_activations_at_i: int,
) -> RankFigures:
    """The figures of one rank, with the bubbles that follow; a ratio of no time at all is 0."""
    return RankFigures(
        rank=rank,
        coords=coords,
        span_us=span_us,
        busy_us=busy_us,
        bubble_makespan_us=makespan_us - busy_us,
        bubble_span_us=span_us - busy_us,
        bubble_makespan_ratio=_ratio(makespan_us - busy_us, makespan_us),
        bubble_span_ratio=_ratio(span_us - busy_us, span_us),
        peak_activations=peak_activations,
        peak_activations_at_i=peak_activations_at_i,
    )


def _ratio(part: Fraction, whole: Fraction) -> Fraction:
    return part / whole if whole else Fraction(0)


def simulation_to_json(simulation: Simulation) -> dict[str, Any]:
    """The form of ``simulate --format json``; see ``docs/schemas/simulate.schema.json``.

    Times are in ``unit``. A whole number is a JSON integer. Where a fraction
    has no exact binary form, the key with ``_exact`` beside it holds it as
    ``"numerator/denominator"``.
    """
    return {
        **number_to_json("makespan", simulation.makespan),
        "unit": "us",
        "p2p": simulation.p2p,
        "send_completes": simulation.send_completes,
        "engine": simulation.engine,
        "ranks": [
            {**_rank_to_json(figures), "memory": _memory_to_json(curve)}
            for figures, curve in zip(simulation.figures, simulation.memory, strict=True)
        ],
    }


def _rank_to_json(figures: RankFigures) -> dict[str, Any]:
    return {
        "rank": figures.rank,
        "coords": dict(figures.coords),
        **figures_to_json(figures),
    }


def _memory_to_json(curve: MemoryCurve) -> dict[str, Any]:
    """The peak in bytes, its time and its parts."""
    return {
        "peak_bytes": curve.peak,
        **number_to_json("peak_at", curve.peak_at_us),
        **{f"{part}_bytes": num_bytes for part, num_bytes in curve.make_up.items()},
    }


def figures_to_json(figures: RankFigures) -> dict[str, Any]:
    """The times and peaks of a rank, without its name."""
    return {
        **number_to_json("span", figures.span_us),
        **number_to_json("busy", figures.busy_us),
        **number_to_json("bubble_makespan", figures.bubble_makespan_us),
        **number_to_json("bubble_span", figures.bubble_span_us),
        **number_to_json("bubble_makespan_ratio", figures.bubble_makespan_ratio),
        **number_to_json("bubble_span_ratio", figures.bubble_span_ratio),
        "peak_activations": figures.peak_activations,
        "peak_activations_at_i": figures.peak_activations_at_i,
    }


def number_to_json(name: str, value: Fraction) -> dict[str, int | float | str]:
    """An exact number under a key, beside it its ``_exact`` form where JSON's numbers have none."""
    if value.denominator == 1:
        return {name: value.numerator}
    nearest = float(value)
    if Fraction(nearest) == value:
        return {name: nearest}
    return {name: nearest, f"{name}_exact": str(value)}
