"""The picture and the table, without colour and at 80 columns."""

import io
import re
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from pipeproof.diagnostics.units import time_text
from pipeproof.sim.timeline import Span, Timeline
from pipeproof.views.timeline_text import render_figures, render_timeline


def text_of(render, *args, width=80, **options):
    buffer = io.StringIO()
    render(*args, Console(file=buffer, width=width, **options))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("timeline_1f1b.txt", {}),
        ("timeline_1f1b_latency.txt", {"c": 1}),
        ("timeline_gpipe_tp2.txt", {"kind": "gpipe", "p": 2, "m": 4, "tf": 100, "tb": 200, "tp": 2}),
        (
            "timeline_uneven.txt",
            {"p": 3, "m": 40, "tf": [1, Fraction(1, 3), 1], "tb": [2, 1, Fraction(5, 2)]},
        ),
        (
            "timeline_backend.txt",
            {"p": 2, "m": 3, "tf": Fraction(1, 3), "tb": 1, "c": Fraction(1, 7), "p2p": "backend"},
        ),
    ],
)
def test_golden(run, check_golden, name, options):
    simulation = run(**options)
    check_golden(name, text_of(render_timeline, simulation.timeline) + text_of(render_figures, simulation))


def picture_rows(text):
    return {m[1]: m[2] for m in re.finditer(r"^rank (\S+) +([FBIW0-9.-]+)$", text, re.MULTILINE)}


def test_where_time_fits_the_columns_every_operation_is_drawn_to_scale(run):
    simulation = run(p=4, m=8, tf=1, tb=2)
    rows = picture_rows(text_of(render_timeline, simulation.timeline))
    assert len(rows) == 4
    for rank, row in rows.items():
        assert len(row) == 2 * 33
        for micro_batch in range(8):
            start = {s.op: s.start for s in simulation.timeline.spans}
            assert row[2 * int(start[f"{rank}F{micro_batch}"]) :].startswith(f"F{micro_batch}")
            assert row[2 * int(start[f"{rank}B{micro_batch}"]) :].startswith(f"B{micro_batch}--")
        assert row.count(".") == 2 * int(simulation.figures[int(rank)].bubble_makespan_us)


@given(
    p=st.integers(1, 4),
    m=st.integers(1, 40),
    tf=st.builds(Fraction, st.integers(1, 50), st.integers(1, 9)),
    tb=st.builds(Fraction, st.integers(0, 50), st.integers(1, 9)),
    width=st.integers(40, 160),
)
@settings(max_examples=25, deadline=None)
def test_any_plan_fits_any_width(run, p, m, tf, tb, width):
    simulation = run(p=p, m=m, tf=tf, tb=tb)
    text = text_of(render_timeline, simulation.timeline, width=width)
    head, *lines = text.splitlines()
    assert f"step time {time_text(simulation.makespan)}" in head
    assert all(len(line) <= width for line in lines)
    rows = picture_rows(text)
    assert len(rows) == p
    assert len({len(row) for row in rows.values()}) == 1


def test_replicas_share_a_row_only_when_they_are_alike(run):
    timeline = run(p=2, m=2, tp=2).timeline
    same = text_of(render_timeline, timeline)
    assert list(picture_rows(same)) == ["0-1", "2-3"]
    assert "Each row represents 2 ranks with the same timeline." in same
    late = [replace(s, end=s.end + 1) if (s.rank, s.op) == (1, "0B1") else s for s in timeline.spans]
    different = text_of(render_timeline, Timeline(tuple(late), timeline.ranks))
    assert list(picture_rows(different)) == ["0", "1", "2", "3"]
    assert "stands for" not in different


def test_a_measured_timeline_is_drawn_from_its_first_start():
    spans = (
        Span(0, "compute", 0, "0F0", 5_000_000_000, 5_000_300_000),
        Span(0, "compute", 1, "0B0", 5_000_300_000, 5_001_000_000),
    )
    text = text_of(render_timeline, Timeline(spans, ({"pp": 0},), "measured", Fraction(1, 1000)))
    assert text.startswith("measured: step time 1 ms")
    assert picture_rows(text) == {"0": "F0----------B0--------------------------"}
