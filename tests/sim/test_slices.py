"""Times of trace files: integers in place of fractions, rounded as ``round`` does."""

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.sim.timeline import Span, Timeline
from pipeproof.views.trace_slices import Slices

times = st.one_of(
    st.integers(-(10**12), 10**12),
    st.builds(Fraction, st.integers(-(10**9), 10**9), st.integers(1, 9000)),
    st.floats(-1e6, 1e6),
)
ticks = st.sampled_from([Fraction(1), Fraction(1, 1000), Fraction(1, 2000), Fraction(7, 3)])


@given(first=times, time=times, tick=ticks)
@settings(deadline=None)
def test_nanoseconds_are_rounded_exactly(first, time, tick):
    timeline = Timeline((Span(0, "compute", 0, "0F0", first, first),), ({"pp": 0},), tick_us=tick)
    expected = round((Fraction(time) - Fraction(first)) * tick * 1000)
    assert Slices(timeline).nanoseconds(time) == expected


def test_halves_go_to_the_even_nanosecond():
    timeline = Timeline((Span(0, "compute", 0, "0F0", 0, 0),), ({"pp": 0},), tick_us=Fraction(1, 2000))
    assert [Slices(timeline).nanoseconds(half) for half in (-3, -1, 0, 1, 3, 5)] == [-2, 0, 0, 0, 2, 2]
