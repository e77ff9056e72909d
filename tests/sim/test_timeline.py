"""Figures of hand-made timelines."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from pipeproof.sim.simulate import simulation_to_json
from pipeproof.sim.timeline import Span, Timeline, figures_of

ONE_RANK = ({"tp": 0, "pp": 0},)


def compute(*ops):
    return tuple(Span(0, "compute", i, op, start, end) for i, (op, start, end) in enumerate(ops))


def test_span_busy_and_bubbles():
    spans = (
        Span(0, "compute", 0, "0F0", 2, 4),
        Span(0, "compute", 1, "WAIT(0RECV_B0)", 4, 7),
        Span(0, "compute", 2, "0B0", 7, 8),
        Span(0, "compute", 3, "0STEP", 8, 9),
        Span(0, "forward 0->1", 4, "0SEND_F0", 1, 10),
        Span(1, "compute", 5, "1F0", 0, 1),
    )
    timeline = Timeline(spans, ({"pp": 0}, {"pp": 1}))
    assert timeline.makespan_us == 10
    assert (timeline.span_us(0), timeline.busy_us(0)) == (6, 3)
    assert (timeline.span_us(1), timeline.busy_us(1)) == (1, 1)
    first, second = figures_of(timeline)
    assert (first.bubble_span_us, first.bubble_makespan_us, second.bubble_makespan_us) == (3, 7, 9)
    assert first.bubble_makespan_ratio == Fraction(7, 10)


def test_releases_come_before_acquisitions_at_equal_times():
    touching = Timeline(compute(("0F0", 0, 1), ("0B0", 1, 2), ("0F1", 2, 3), ("0B1", 3, 4)), ONE_RANK)
    assert touching.peak_activations(0) == 1
    overlapping = Timeline(compute(("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 2, 3), ("0B1", 3, 4)), ONE_RANK)
    assert overlapping.peak_activations(0) == 2


def test_where_backward_is_split_the_place_of_the_release_counts():
    spans = compute(("0F0", 0, 1), ("0I0", 1, 2), ("0F1", 2, 3), ("0W0", 3, 4), ("0I1", 4, 5), ("0W1", 5, 6))
    timeline = Timeline(spans, ONE_RANK)
    assert (timeline.peak_activations(0), timeline.peak_activations_at_i(0)) == (2, 1)
    assert timeline.busy_us(0) == 6


def test_a_measured_timeline_counts_in_its_ticks():
    spans = tuple(
        Span(0, "compute", op_id, op, origin + start, origin + end, step)
        for step, origin in enumerate((10**15, 10**15 + 9_000))
        for op_id, (op, start, end) in enumerate([("0F0", 0, 1_001), ("0B0", 2_000, 4_000)])
    )
    timeline = Timeline(spans, ONE_RANK, clock="measured", tick_us=Fraction(1, 1000))
    assert timeline.makespan_us == 13
    assert timeline.busy_us(0) == Fraction(6_002, 1000)
    assert timeline.peak_activations(0) == 1


def test_what_runs_side_by_side_is_busy_once_however_long_each_runs():
    spans = compute(("0F0", 0, 4), ("0B1", 0, 6), ("0F1", 7, 9), ("0B2", 8, 12))
    assert Timeline(spans, ONE_RANK).busy_us(0) == 6 + 5


SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "simulate.schema.json").read_text())


def test_the_schema_is_one():
    Draft202012Validator.check_schema(SCHEMA)


def exact(given, name):
    if (text := given.get(f"{name}_exact")) is None:
        return Fraction(given[name])
    assert float(Fraction(text)) == given[name]
    return Fraction(text)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"p": 1, "m": 1},
        {"kind": "gpipe", "tp": 2, "c": Fraction(1, 3)},
        {"tf": Fraction(1, 3), "tb": Fraction(5, 8), "c": 1, "p2p": "backend"},
        {"tf": [1, 2, 3, 4], "tb": [0, 1, 2, 3], "p2p": "rendezvous"},
    ],
)
def test_output_fits_the_schema_and_says_the_exact_values(run, options):
    simulation = run(**options)
    result = json.loads(json.dumps(simulation_to_json(simulation, "given")))
    Draft202012Validator(SCHEMA).validate(result)
    assert exact(result, "makespan") == simulation.makespan
    for given, figures in zip(result["ranks"], simulation.figures, strict=True):
        assert exact(given, "span") == figures.span_us
        assert exact(given, "busy") == figures.busy_us
        assert exact(given, "bubble_makespan") == simulation.makespan - figures.busy_us
        assert exact(given, "bubble_span") == figures.span_us - figures.busy_us
        assert exact(given, "bubble_makespan_ratio") * simulation.makespan == figures.bubble_makespan_us
        assert exact(given, "bubble_span_ratio") * figures.span_us == figures.bubble_span_us
