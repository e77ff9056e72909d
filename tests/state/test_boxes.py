"""Boxes against arrays of elements: meeting, taking away, flat ranges, and whether boxes tile a tensor."""

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.state.boxes import Box, first_held, flat_boxes, meet, minus, tiling_fault, whole_box
from pipeproof.state.index import Shard

SHAPES = st.lists(st.integers(1, 4), max_size=3).map(tuple)


@st.composite
def boxes_in(draw, shape):
    offsets = [draw(st.integers(0, size)) for size in shape]
    return Box(tuple(offsets), tuple(draw(st.integers(0, size - at)) for size, at in zip(shape, offsets, strict=True)))


@st.composite
def several(draw):
    shape = draw(SHAPES)
    return shape, draw(st.lists(boxes_in(shape), max_size=5))


def slices(box):
    return tuple(slice(start, stop) for start, stop in zip(box.offsets, box.stops, strict=True))


def counts(shape, boxes):
    held = np.zeros(shape, int)
    for box in boxes:
        held[slices(box)] += 1
    return held


@given(several())
def test_two_boxes_meet_in_what_both_have(drawn):
    shape, boxes = drawn
    for one in boxes:
        for other in boxes:
            both = counts(shape, [one, other]) == 2
            common = meet(one, other)
            assert (counts(shape, [common]) == 1).tolist() == both.tolist() if common else not both.any()


@given(several())
def test_a_box_without_others_is_what_they_leave_of_it_each_element_once(drawn):
    shape, boxes = drawn
    left = minus(whole_box(shape), boxes)
    assert (counts(shape, left) == (counts(shape, boxes) == 0)).all()


@given(SHAPES, st.data())
def test_a_flat_range_is_the_same_elements_in_their_order(extents, data):
    numel = prod(extents)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    numbers = np.arange(numel).reshape(extents)
    found = list(flat_boxes(extents, (start, stop)))
    assert [n for box in found for n in numbers[slices(box)].reshape(-1).tolist()] == list(range(start, stop))
    assert len(found) <= max(2 * len(extents) - 1, 1)


@given(several())
def test_a_fault_is_found_where_an_element_is_held_not_once_and_is_one(drawn):
    shape, boxes = drawn
    held, fault = counts(shape, boxes), tiling_fault(shape, boxes)
    assert (fault is None) == bool((held == 1).all())
    if fault is not None:
        assert (held[slices(fault.box)] == fault.times).all()
        assert len(fault.holders) == fault.times != 1
        assert all(meet(boxes[number], fault.box) == fault.box for number in fault.holders)


@given(several(), st.sampled_from([lambda times: times == 0, lambda times: times > 1]))
def test_the_first_box_held_so_often_is_found_whatever_stands_before_it(drawn, so_often):
    shape, boxes = drawn
    held, found = counts(shape, boxes), first_held(shape, boxes, so_often)
    assert (found is None) == (not any(map(so_often, held.reshape(-1).tolist())))
    assert found is None or (so_often(found.times) and (held[slices(found.box)] == found.times).all())


def test_a_box_that_reaches_out_of_the_tensor_is_a_fault():
    fault = tiling_fault((4, 4), [Box((0, 0), (4, 4)), Box((4, 0), (1, 4))])
    assert fault == (Box((4, 0), (1, 4)), 1, (1,))


@given(st.data())
def test_a_part_of_a_tensor_is_boxes_that_each_are_a_range_of_its_file(data):
    shape = data.draw(SHAPES)
    numbers = np.arange(prod(shape)).reshape(shape)
    box = data.draw(boxes_in(shape).filter(lambda box: box.numel))
    start = data.draw(st.integers(0, box.numel - 1))
    flat = data.draw(st.none() | st.tuples(st.just(start), st.integers(start + 1, box.numel)))
    shard = Shard(tensor="a", offsets=box.offsets, extents=box.extents, flat=flat)
    stored = numbers[slices(box)].reshape(-1)[slice(*flat or (None,))]
    done = 0
    for first, part in shard.boxes():
        assert first == done
        assert (stored[first : first + part.numel] == numbers[slices(part)].reshape(-1)).all()
        done += part.numel
    assert done == len(stored)
