"""Times of ``asap`` as a timeline: its figures, further stages, pairs and pieces of sequences in the picture."""

import io
from fractions import Fraction

from hypothesis import given, settings
from rich.console import Console

from pipeproof.diagnostics.units import number_text
from pipeproof.schedule.ops import OpKind, parse_op
from pipeproof.schedule.programs import Schedule, StageCosts, asap, even_costs
from pipeproof.sim.timeline import figures_of, timeline_of
from pipeproof.views.timeline_text import render_timeline
from tests.schedule.test_kinds import generated, requests


def programs(*texts):
    return tuple(tuple(map(parse_op, text.split())) for text in texts)


def picture(timed, width=80):
    """(rows by rank, the lines below them)."""
    buffer = io.StringIO()
    render_timeline(timeline_of(timed), Console(file=buffer, width=width), text=number_text)
    lines = buffer.getvalue().splitlines()
    rows = [line.split(" ", 2)[2] for line in lines if line.startswith("rank ")]
    return rows, "\n".join(lines[2 + len(rows) :])


@given(requests(max_ranks=4, max_chunks=2))
@settings(max_examples=60)
def test_the_figures_of_the_timeline_are_those_of_the_times(drawn):
    schedule = generated(*drawn)
    timed = asap(schedule, drawn[1].costs)
    timeline = timeline_of(timed)
    assert timeline.makespan_us == timed.makespan
    for rank, (figures, program) in enumerate(zip(figures_of(timeline), schedule.programs, strict=True)):
        assert (figures.span_us, figures.busy_us) == (timed.span(rank), timed.busy(rank))
        peaks = (figures.peak_activations, figures.peak_activations_at_i)
        assert peaks == (timed.peak(rank), timed.peak(rank, OpKind.BACKWARD_INPUT))
        assert timeline.stages(rank) == tuple(sorted({op.stage for op in program}))


def test_a_pair_counts_once_as_busy_and_holds_what_both_hold():
    schedule = Schedule(programs("0F0 0F1 0B0 0B1"), (frozenset({1}),))
    costs = StageCosts([Fraction(1)], [Fraction(1)], [Fraction(1)], overlapped=[Fraction(5, 2)])
    (figures,) = figures_of(timeline_of(asap(schedule, costs)))
    assert figures.busy_us == figures.span_us == Fraction(11, 2)
    assert figures.bubble_span_us == 0
    assert figures.peak_activations == 2


def test_a_pair_is_one_block_that_says_as_much_as_fits():
    timed = asap(Schedule(programs("0F0 0F1 0B0 0B1"), (frozenset({1}),)), even_costs(1))
    assert picture(timed)[0] == ["F0--F1+B0-------B1------"]
    many = Schedule(programs(" ".join(f"0F{batch}" for batch in range(13)) + " 0B0 0B1"), (frozenset({12}),))
    assert picture(asap(many, even_costs(1)), 28)[0] == ["FFFFFFFFFFFFF+BB1"]
    assert picture(asap(many, even_costs(1, 4)), 28)[0] == ["FF1FF3FF5FFF8FF-F+-B"]


def test_further_stages_have_other_fills_and_the_legend_says_which():
    timed = asap(Schedule(programs("0F0 1F0 2F0 3F0 4F0 4B0 3B0 2B0 1B0 0B0")), even_costs(5))
    (row,), legend = picture(timed, 100)
    assert row == "F0--F0==F0~~F0::F0--B0------B0::::::B0~~~~~~B0======B0------"
    assert "- its first, = its second, ~ its third, : its fourth and so on." in legend.replace("\n", " ")
    (row,), legend = picture(asap(Schedule(programs("0F0 0B0")), even_costs(1)))
    assert legend == "F forward, B backward, with the micro-batch where it fits."


def test_parts_of_backwards_and_pieces_of_sequences_are_explained_where_there_are_any():
    timed = asap(Schedule(programs("0F0.s0 0F0.s1 0I0.s1 0W0.s1 0I0.s0 0W0.s0")), even_costs(1))
    (row,), legend = picture(timed)
    assert row == "F0.0F0.1I0.1W0.1I0.0W0.0"
    assert "F forward, I backward for inputs, W backward for weights, " in " ".join(legend.split())
    assert "F0.1 is piece 1 of the sequences of micro-batch 0." in " ".join(legend.split())
    assert "blocks" not in legend
    assert "side by side" not in legend


def test_what_takes_no_time_is_beside_nothing():
    timed = asap(Schedule(programs("0F0 0B0 0F1 0B1")), even_costs(1, 1, 0, 0))
    (row,), legend = picture(timed)
    assert row == "F0--F1--"
    assert "side by side" not in legend
    assert timed.peak(0, OpKind.BACKWARD_INPUT) == 1
