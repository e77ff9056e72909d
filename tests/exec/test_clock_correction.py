"""Offsets of clocks with their errors: simulated clocks whose true offset is known at every moment."""

import json
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from pipeproof.exec.measure.clock_correction import (
    ClockCorrection,
    ClockDriftError,
    ClockExchange,
    Knot,
    corrected,
    corrected_ends,
    correction_of,
    knot_of,
    largest_error_ns,
)
from pipeproof.exec.rank.idle_messages import IdleMessageEnd
from pipeproof.exec.rank.op_log import LogEntry

PPM = Fraction(1, 1_000_000)
SECOND = 10**9


@dataclass(frozen=True)
class Clocks:
    """A host's clock that runs evenly, and rank 0's clock, whose rate changes every ``every_ns`` of the host's."""

    begin_ns: int
    rates_ppm: tuple[int, ...]
    every_ns: int

    def offset(self, own):
        """The true offset at a reading."""
        changes = [0, *accumulate(rate * self.every_ns * PPM for rate in self.rates_ppm)]
        index = min(floor(own // self.every_ns), len(self.rates_ppm) - 1)
        return self.begin_ns + changes[index] + self.rates_ppm[index] * (own - index * self.every_ns) * PPM

    def exchange(self, own, there_ns, between_ns, back_ns):
        """Readings of an exchange with these delays in the host's time, and when it ended."""
        arrived, answered = own + there_ns, own + there_ns + between_ns
        returned = answered + back_ns
        zero = [floor(each + self.offset(each)) for each in (arrived, answered)]
        return ClockExchange(floor(own), *zero, floor(returned)), returned


delays = st.one_of(st.integers(0, 100_000), st.integers(0, 50_000_000), st.integers(0, 2 * SECOND))
"""Short ones, and a heavy tail up to two seconds, each way on its own."""
exchanges = st.lists(st.tuples(delays, delays, delays, st.integers(0, SECOND)), min_size=1, max_size=6)


@given(
    begin_ns=st.integers(-(10**18), 10**18),
    rates_ppm=st.lists(st.integers(-200, 200), min_size=1, max_size=12),
    every_ns=st.integers(10_000, 10 * SECOND),
    fraction=st.fractions(0, 1),
    measurements=st.lists(st.tuples(exchanges, st.integers(0, 20 * SECOND)), min_size=1, max_size=5),
    asked=st.lists(st.integers(0, 120 * SECOND), min_size=1, max_size=20),
)
def test_the_true_offset_is_within_the_error(begin_ns, rates_ppm, every_ns, fraction, measurements, asked):
    clocks = Clocks(begin_ns, tuple(rates_ppm), every_ns)
    own, knots = 5 * SECOND + fraction, []
    for delays_of, pause_ns in measurements:
        measured = []
        for there_ns, between_ns, back_ns, wait_ns in delays_of:
            exchange, own = clocks.exchange(own, there_ns, between_ns, back_ns)
            measured.append(exchange)
            own += wait_ns
        knots.append(knot_of(measured))
        own += pause_ns
    correction = correction_of(knots)
    for moment in (*asked, *(knot.own_ns for knot in knots)):
        there = correction.at(moment)
        assert abs(clocks.offset(Fraction(moment)) - there.offset_ns) <= there.error_ns
    assert all(narrow.error_ns <= wide.error_ns for narrow, wide in zip(correction.knots, knots, strict=True))


def test_an_exchange_bounds_the_offset_by_its_round_trip():
    knot = knot_of([ClockExchange(1_000, 51_000, 51_500, 2_000)], drift_ppm=0)
    assert (knot.own_ns, knot.lower_ns, knot.upper_ns) == (1500, 49_500 - 1, 50_000 + 1)


def test_asymmetric_delays_of_two_exchanges_meet_at_the_true_offset():
    there_is_fast = ClockExchange(0, 700, 700, 9_000)
    back_is_fast = ClockExchange(10_000, 20_000, 20_000, 19_301)
    knot = knot_of([there_is_fast, back_is_fast], drift_ppm=0)
    assert (knot.lower_ns, knot.upper_ns) == (697, 701)  # of 698 to 701, with a whole offset in the middle


def test_drift_widens_a_side_with_its_distance():
    near, far = ClockExchange(0, 5_000, 5_000, 10_000), ClockExchange(-1_000_000, -999_000, -999_000, 10_000)
    knot = knot_of([near, far], drift_ppm=200)
    assert knot.own_ns == 5_000
    assert knot.upper_ns == 1_000 + 1 + 201  # of the far one, moved by 1,005,000 ns
    assert knot.lower_ns == -5_000 - 1 - 1


def test_between_knots_the_error_is_what_drift_allows():
    correction = correction_of([Knot(0, 1000, 10), Knot(SECOND, 1000, 10)], drift_ppm=200)
    assert correction.at(SECOND // 2) == Knot(SECOND // 2, 1000, 10 + 100_000)
    assert correction.at(SECOND + 1000) == Knot(SECOND + 1000, 1000, 10 + 1)
    assert correction.at(-1000) == Knot(-1000, 1000, 10 + 1)


def test_the_offset_is_interpolated():
    correction = correction_of([Knot(0, 0, 5), Knot(SECOND, 100_000, 5)])
    assert [correction.at(at).offset_ns for at in (0, SECOND // 4, SECOND)] == [0, 25_000, 100_000]


@pytest.mark.parametrize("change_ns", [100_000, -100_000])
def test_the_error_reaches_the_farther_end(change_ns):
    knots = [Knot(0, 0, 0), Knot(SECOND, change_ns, 0)]
    correction = correction_of(knots[::-1], drift_ppm=200)  # in any order
    assert correction.knots == tuple(knots)
    assert correction.at(SECOND // 4) == Knot(SECOND // 4, change_ns // 4, 75_000)


def test_a_narrow_measurement_narrows_wide_ones_on_both_sides():
    wide = [Knot(0, 50_000, 90_000), Knot(2_000_000, -40_000, 90_000)]
    correction = correction_of([wide[0], Knot(1_000_000, 0, 100), wide[1]], drift_ppm=200)
    assert [knot.error_ns for knot in correction.knots] == [300, 100, 300]
    assert [knot.offset_ns for knot in correction.knots] == [0, 0, 0]


def test_clocks_that_drift_faster_than_assumed_are_refused():
    knots = [Knot(0, 0, 100), Knot(SECOND, 200_200, 100)]
    assert correction_of(knots, 200).at(0).error_ns == 0
    with pytest.raises(ClockDriftError, match="changed by 1 ns more than 200 ppm"):
        correction_of([knots[0], Knot(SECOND, 200_201, 100)], 200)
    with pytest.raises(ClockDriftError):
        knot_of([ClockExchange(0, 0, 0, 10), ClockExchange(20, 1020, 1020, 30)])  # stepped by 1 us
    with pytest.raises(ValueError, match="never measured"):
        correction_of([])


def test_a_correction_survives_json():
    correction = correction_of([Knot(5, -(10**17), 3), Knot(10**9, -(10**17), 4)], 50)
    form = TypeAdapter(ClockCorrection)
    assert form.validate_json(form.dump_json(correction)) == correction
    assert json.loads(form.dump_json(correction))["drift_ppm"] == 50


def test_logs_and_idle_messages_are_corrected():
    correction = correction_of([Knot(1000, 500, 7)], 1_000)
    transfer = LogEntry(0, "pp:0>1", "0SEND_F0", 1000, 3000, (0, 1), 8, "float32", 900)
    backward = LogEntry(0, "compute", "0B0", 1000, 11_000, split_ns=5000)
    moved = corrected([transfer, backward], correction)
    assert [(e.start_ns, e.end_ns, e.posted_ns, e.split_ns) for e in moved] == [
        (1500, 3500, 1400, 0), (1500, 11_500, 0, 5500),
    ]  # fmt: skip
    end = IdleMessageEnd("pp:0>1", True, 8, 900, 2000)
    assert corrected_ends([end], correction) == [IdleMessageEnd("pp:0>1", True, 8, 1400, 2500)]
    assert largest_error_ns([transfer, end], correction) == 7 + 2
    assert largest_error_ns([backward], correction) == 7 + 10


def test_the_host_of_rank_0_is_not_corrected():
    entries = [LogEntry(0, "compute", "0F0", 10**12, 10**12 + 5)]
    assert corrected(entries, ClockCorrection()) == entries
    assert largest_error_ns(entries, ClockCorrection()) == 0
