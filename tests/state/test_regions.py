"""Regions against arrays of elements: meeting, taking away, flat ranges, and whether regions tile a tensor."""

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.state.regions import (
    Region,
    first_with_count,
    flat_regions,
    intersect,
    subtract,
    tiling_fault,
    whole_region,
)
from pipeproof.state.state_index import Shard

SHAPES = st.lists(st.integers(1, 4), max_size=3).map(tuple)


@st.composite
def boxes_in(draw, shape):
    offsets = [draw(st.integers(0, size)) for size in shape]
    return Region(
        tuple(offsets), tuple(draw(st.integers(0, size - at)) for size, at in zip(shape, offsets, strict=True))
    )


@st.composite
def several(draw):
    shape = draw(SHAPES)
    return shape, draw(st.lists(boxes_in(shape), max_size=5))


def slices(region):
    return tuple(slice(start, stop) for start, stop in zip(region.offsets, region.stops, strict=True))


def counts(shape, regions):
    held = np.zeros(shape, int)
    for region in regions:
        held[slices(region)] += 1
    return held


@given(several())
def test_two_regions_meet_in_what_both_have(drawn):
    shape, regions = drawn
    for one in regions:
        for other in regions:
            both = counts(shape, [one, other]) == 2
            common = intersect(one, other)
            assert (counts(shape, [common]) == 1).tolist() == both.tolist() if common else not both.any()


@given(several())
def test_a_region_without_others_is_what_they_leave_of_it_each_element_once(drawn):
    shape, regions = drawn
    left = subtract(whole_region(shape), regions)
    assert (counts(shape, left) == (counts(shape, regions) == 0)).all()


@given(SHAPES, st.data())
def test_a_flat_range_is_the_same_elements_in_their_order(extents, data):
    numel = prod(extents)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    numbers = np.arange(numel).reshape(extents)
    found = list(flat_regions(extents, (start, stop)))
    assert [n for region in found for n in numbers[slices(region)].reshape(-1).tolist()] == list(range(start, stop))
    assert len(found) <= max(2 * len(extents) - 1, 1)


@given(several())
def test_a_fault_is_found_where_an_element_is_not_held_once_and_is_one(drawn):
    shape, regions = drawn
    held, fault = counts(shape, regions), tiling_fault(shape, regions)
    assert (fault is None) == bool((held == 1).all())
    if fault is not None:
        assert (held[slices(fault.region)] == fault.num_holders).all()
        assert len(fault.holders) == fault.num_holders != 1
        assert all(intersect(regions[number], fault.region) == fault.region for number in fault.holders)


@given(several(), st.sampled_from([lambda num_holders: num_holders == 0, lambda num_holders: num_holders > 1]))
def test_the_first_region_held_so_often_is_found_whatever_is_before_it(drawn, so_often):
    shape, regions = drawn
    held, found = counts(shape, regions), first_with_count(shape, regions, so_often)
    assert (found is None) == (not any(map(so_often, held.reshape(-1).tolist())))
    assert found is None or (so_often(found.num_holders) and (held[slices(found.region)] == found.num_holders).all())


def test_a_region_that_reaches_out_of_the_tensor_is_a_fault():
    fault = tiling_fault((4, 4), [Region((0, 0), (4, 4)), Region((4, 0), (1, 4))])
    assert fault == (Region((4, 0), (1, 4)), 1, (1,))


@given(st.data())
def test_a_shard_of_a_tensor_is_regions_that_each_are_a_range_of_its_file(data):
    shape = data.draw(SHAPES)
    numbers = np.arange(prod(shape)).reshape(shape)
    region = data.draw(boxes_in(shape).filter(lambda region: region.numel))
    start = data.draw(st.integers(0, region.numel - 1))
    flat = data.draw(st.none() | st.tuples(st.just(start), st.integers(start + 1, region.numel)))
    shard = Shard(tensor="a", offsets=region.offsets, extents=region.extents, flat=flat)
    stored = numbers[slices(region)].reshape(-1)[slice(*flat or (None,))]
    done = 0
    for first, part in shard.regions():
        assert first == done
        assert (stored[first : first + part.numel] == numbers[slices(part)].reshape(-1)).all()
        done += part.numel
    assert done == len(stored)
