"""Index maps against brute force on elements: layouts, differences, counts, and messages that change a layout."""

from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeproof.specs.axis_layout import INVARIANT, PARTIAL, REPLICATED, VARYING, parse_placement, sharded
from pipeproof.stages.describe.boundary import reshard_messages
from pipeproof.stages.describe.index_map import (
    NOWHERE,
    IndexMap,
    counts,
    differences,
    expert_map,
    layout_map,
    token_map,
)


def elements(index_map, size):
    """The global index of each local element, one by one."""
    result = [NOWHERE] * size
    for local, whole, length in index_map.ranges:
        for i in range(length):
            result[local + i] = whole + i
    return result


@pytest.mark.parametrize("placement", [REPLICATED, INVARIANT, PARTIAL, VARYING, sharded(0), sharded(12)])
def test_placements_are_read_as_they_are_written(placement):
    assert parse_placement(str(placement)) == placement


@pytest.mark.parametrize("text", ["", "sharded", "sharded(", "sharded()", "sharded(x)", "invariant(0)", "Invariant"])
def test_other_texts_are_no_placements(text):
    with pytest.raises(ValueError, match="is not a placement"):
        parse_placement(text)


shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(shape=shapes, dim=st.integers(0, 2), num_ranks=st.sampled_from([1, 2, 3]))
def test_a_cut_is_what_numpy_splits(shape, dim, num_ranks):
    assume(dim < len(shape))
    shape[dim] *= num_ranks
    whole = np.arange(prod(shape)).reshape(shape)
    for rank, part in enumerate(np.split(whole, num_ranks, axis=dim)):
        found = layout_map(shape, sharded(dim), num_ranks, rank)
        assert elements(found, part.size) == part.reshape(-1).tolist()
        assert elements(found.inverted(), whole.size) == [
            part.reshape(-1).tolist().index(i) if i in part else NOWHERE for i in range(whole.size)
        ]


def test_addends_of_two_ranks_are_two_things():
    assert [layout_map((4,), PARTIAL, 2, rank).ranges for rank in (0, 1)] == [[(0, 4, 4)], [(0, 8, 4)]]
    assert layout_map((4,), INVARIANT, 2, 1).ranges == [(0, 0, 4)]


@st.composite
def maps(draw, size):
    """A map of some of 0 .. size - 1, in ranges."""
    ends = sorted(draw(st.sets(st.integers(0, size), max_size=4)))
    ranges = [(a, draw(st.integers(0, 9)), b - a) for a, b in pairwise(ends) if draw(st.booleans())]
    return IndexMap.of(ranges)


@settings(max_examples=200, deadline=None)
@given(one=maps(10), other=maps(10))
def test_differences_are_those_of_the_elements(one, other):
    ours, theirs = elements(one, 10), elements(other, 10)
    found = {}
    for local, length, first, second in differences(one, other):
        for i in range(length):
            found[local + i] = tuple(NOWHERE if at == NOWHERE else at + i for at in (first, second))
    assert found == {i: (ours[i], theirs[i]) for i in range(10) if ours[i] != theirs[i]}


@settings(max_examples=100, deadline=None)
@given(one=maps(10), start=st.integers(0, 10), stop=st.integers(0, 10), at=st.integers(0, 5))
def test_a_part_of_a_map_is_its_elements_moved(one, start, stop, at):
    assume(start <= stop)
    moved = elements(one.part(start, stop, at), at + stop - start)
    assert moved == [NOWHERE] * at + elements(one, 10)[start:stop]


@settings(max_examples=200, deadline=None)
@given(ranges=st.lists(st.tuples(st.integers(-2, 8), st.integers(1, 5)), max_size=5))
def test_counts_are_those_of_the_elements(ranges):
    held = [start + i for start, length in ranges for i in range(length)]
    found = {i: times for start, stop, times in counts(ranges, 8) for i in range(start, stop)}
    assert found == {i: held.count(i) for i in range(-2, 13) if 0 <= i < 8 or i in held}


def test_the_helpers_say_what_their_names_say():
    assert expert_map(8, 10, 4, 1).ranges == [(0, 20, 20)]
    assert token_map(2, 8, 2, 1).ranges == [(0, 4, 4), (4, 12, 4)]


placements = st.sampled_from([REPLICATED, INVARIANT, sharded(0), sharded(1)])


@settings(max_examples=80, deadline=None)
@given(
    sender=placements,
    receiver=placements,
    num_senders=st.sampled_from([1, 2, 4]),
    num_receivers=st.sampled_from([1, 2, 4]),
)
def test_messages_bring_every_element_to_its_place_once(sender, receiver, num_senders, num_receivers):
    shape = (4, 8, 3)
    whole = np.arange(prod(shape))
    held = [whole[elements(layout_map(shape, sender, num_senders, k), layout_size(shape, sender, num_senders))]
            for k in range(num_senders)]  # fmt: skip
    for rank in range(num_receivers):
        size = layout_size(shape, receiver, num_receivers)
        got = np.full(size, -1)
        for message in reshard_messages(shape, sender, num_senders, receiver, num_receivers):
            if message.receiver == rank:
                here = slice(message.recv_start, message.recv_start + message.length)
                assert (got[here] == -1).all()
                got[here] = held[message.sender][message.send_start : message.send_start + message.length]
        assert got.tolist() == elements(layout_map(shape, receiver, num_receivers, rank), size)


def layout_size(shape, placement, num_ranks):
    return prod(placement.local_shape(shape, num_ranks))


def test_equal_values_come_from_the_counterpart():
    assert {(m.sender, m.receiver) for m in reshard_messages((4, 2), INVARIANT, 2, sharded(0), 2)} == {(0, 0), (1, 1)}


def test_messages_do_not_add():
    with pytest.raises(ValueError, match=r"no sender holds .* receiver 0 from 0"):
        reshard_messages((4,), INVARIANT, 2, PARTIAL, 2)
    assert len(reshard_messages((4,), PARTIAL, 2, PARTIAL, 2)) == 2
