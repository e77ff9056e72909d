"""Segments of overlapped pairs: each half in its order, weight gradients behind the segments that defer them."""

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from pipeproof.schedule.alternation import Segment, segments_of_pair
from pipeproof.specs.schedule import PAIRS

cycles = st.sampled_from([*permutations("FB"), *permutations("FBW")])
overlap_points = st.integers(0, 9)


def text(segments):
    return " ".join(f"{segment.half}{segment.number}" for segment in segments)


@given(overlap_points, overlap_points, cycles, st.booleans())
def test_each_side_has_all_its_turns_in_order(num_forward, num_backward, order, defers):
    segments = segments_of_pair(num_forward, num_backward, order, defers=defers)
    for half, number in (("F", num_forward + 1), ("B", num_backward + 1)):
        assert [segment.number for segment in segments if segment.half == half] == [*range(number)]
    weights = [segment.number for segment in segments if segment.half == "W"]
    assert weights == [*range(len(weights))]
    assert bool(weights) == defers


@given(overlap_points, overlap_points, cycles)
def test_weight_gradients_follow_the_turns_that_defer_them(num_forward, num_backward, order):
    deferred = 0
    for segment in segments_of_pair(num_forward, num_backward, order, defers=True):
        if segment.half == "B":
            deferred += 1
        elif segment.half == "W":
            assert deferred
            deferred = 0
    assert not deferred  # nothing is left


@given(overlap_points, overlap_points, cycles)
def test_sides_alternate_while_both_run(num_forward, num_backward, order):
    halves = [
        segment.half
        for segment in segments_of_pair(num_forward, num_backward, order, defers=True)
        if segment.half != "W"
    ]
    both = 2 * (min(num_forward, num_backward) + 1)
    first = next(half for half in order if half != "W")
    assert all((half == first) == (place % 2 == 0) for place, half in enumerate(halves[:both]))
    assert len(set(halves[both:])) <= 1


def test_one_layer_has_the_order_of_dualpipe():
    # combine of B next to attention F, dispatch of F next to experts B and W, dispatch of B next to experts F,
    # combine of F next to attention B and W
    assert text(segments_of_pair(2, 2, PAIRS, defers=True)) == "B0 W0 F0 B1 W1 F1 B2 W2 F2"


def test_a_side_that_has_ended_is_skipped():
    assert text(segments_of_pair(0, 2, PAIRS, defers=True)) == "B0 W0 F0 B1 W1 B2 W2"
    assert text(segments_of_pair(2, 0, PAIRS, defers=True)) == "B0 W0 F0 F1 F2"


def test_without_w_in_the_cycle_all_weight_gradients_come_last():
    assert segments_of_pair(1, 1, ("F", "B"), defers=True)[-1] == Segment("W", 0)
    assert text(segments_of_pair(1, 1, ("F", "B"), defers=True)) == "F0 B0 F1 B1 W0"


def test_w_before_b_takes_those_of_the_cycle_before():
    assert text(segments_of_pair(1, 1, ("W", "B", "F"), defers=True)) == "B0 F0 W0 B1 F1 W1"
