"""Curves of the memory of ranks."""

from fractions import Fraction

import numpy as np
import pytest

from pipeproof.sim.memory_curve import MemoryCurve, Part
from pipeproof.sim.timeline import Span, Timeline
from pipeproof.views.memory_curves import Curve, activations_held, all_curves, memory_held

ONE_RANK = ({"pp": 0},)


def held(*ops):
    spans = tuple(Span(0, "compute", i, op, start, end) for i, (op, start, end) in enumerate(ops))
    return activations_held(Timeline(spans, ONE_RANK)).ranks[0]


def test_activations_are_held_from_the_start_of_f_to_the_end_of_b_or_w():
    assert held(("0F0", 1, 2), ("0F1", 2, 3), ("0B0", 3, 5), ("0B1", 5, 7)) == ((1, 1), (2, 2), (5, 1), (7, 0))
    assert held(("0F0", 1, 2), ("0I0", 2, 3), ("0W0", 4, 6)) == ((1, 1), (6, 0))


def test_peaks_are_those_of_the_figures(run):
    timeline = run(p=4, m=8, c=1).timeline
    curve = activations_held(timeline)
    peaks = [max(value for _, value in steps) for steps in curve.ranks]
    assert peaks == [timeline.peak_activations(rank) for rank in range(4)] == [4, 3, 2, 1]
    assert curve.peak == 4


def test_memory_begins_with_what_lasts_and_is_in_the_ticks_of_the_timeline():
    memory = MemoryCurve(
        {Part.PARAMETERS: 100}, np.array([3, 3, 6, 9]), np.array([3, 3, 3, 3]), np.array([-5, 15, 0, -10]), 3
    )
    timeline = Timeline((Span(0, "compute", 0, "0F0", 0, 8),), ONE_RANK, tick_us=Fraction(1, 2))
    assert memory_held(timeline, [memory]) == Curve("memory held", "bytes", (((0, 100), (2, 110), (6, 100)),))


def test_simulated_memory_has_its_peak(run):
    simulation = run(p=3, m=4, c=1)
    curve = memory_held(simulation.timeline, simulation.memory)
    assert [max(value for _, value in steps) for steps in curve.ranks] == [m.peak for m in simulation.memory]


def test_there_is_one_curve_for_each_rank():
    timeline = Timeline((), ONE_RANK)
    assert [curve.name for curve in all_curves(timeline)] == ["activations held"]
    with pytest.raises(ValueError, match="memory: 2 curves for 1 ranks"):
        all_curves(timeline, [Curve("memory", "bytes", ((), ()))])
