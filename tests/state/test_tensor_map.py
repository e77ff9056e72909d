"""Maps of tensors against numpy, on arrays of distinct numbers: applied, composed, inverted, compared."""

import dataclasses
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.state.regions import NO_DIM, Region, whole_region
from pipeproof.state.tensor_map import (
    RegionCopy,
    StateMap,
    TensorMap,
    compose,
    identity_map,
    inverse_permutation,
    invert,
    map_differences,
)


def slices(region):
    return tuple(slice(start, stop) for start, stop in zip(region.offsets, region.stops, strict=True))


def made(state_map, arrays):
    """The target's arrays; -1 where nothing is made."""
    found = {}
    for name, tensor in state_map.tensors.items():
        array = np.full(tensor.shape, -1)
        for copy in tensor.copies:
            part = np.zeros(copy.region.extents, int)
            if copy.source is not None:
                part = arrays[copy.source][slices(copy.source_region)]
                if copy.permutation is not None:
                    kept = [dim for dim in copy.permutation if dim != NO_DIM]
                    gone = tuple(dim for dim in range(part.ndim) if dim not in kept)
                    part = part.squeeze(gone).transpose(np.argsort(np.argsort(kept)).tolist())
                    part = part.reshape(copy.region.extents)
            array[slices(copy.region)] = part
        found[name] = array
    return found


def described(arrays, dtype="float32"):
    return {name: SimpleNamespace(dtype=dtype, shape=array.shape) for name, array in arrays.items()}


def numbered(shapes):
    first, arrays = 1, {}
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        arrays[name] = np.arange(first, first + size).reshape(shape)
        first += size
    return arrays


@st.composite
def cuts(draw, size):
    inner = draw(st.lists(st.integers(1, size - 1), max_size=3, unique=True)) if size > 1 else []
    ends = [0, *sorted(inner), size]
    return list(pairwise(ends))


@st.composite
def maps_of(draw, arrays, prefix):
    """A map of all tensors: each is cut into shards along a dim; shards change places, some are transposed."""
    pieces = []
    for name, array in arrays.items():
        dim = draw(st.integers(0, array.ndim - 1))
        for start, stop in draw(cuts(array.shape[dim])):
            offsets, extents = [0] * array.ndim, list(array.shape)
            offsets[dim], extents[dim] = start, stop - start
            pieces.append((name, Region(tuple(offsets), tuple(extents))))
    pieces = draw(st.permutations(pieces))
    tensors = {}
    for number, (name, region) in enumerate(pieces):
        way = draw(st.permutations(range(len(region.extents))).map(tuple))
        shape = tuple(region.extents[dim] for dim in way)
        target = f"{prefix}{number}"
        if len(shape) == 2 and draw(st.booleans()) and f"{prefix}{number - 1}" in tensors:
            before = tensors[f"{prefix}{number - 1}"]
            if len(before.shape) == 2 and before.shape[0] == shape[0]:  # merged with the one before, along the columns
                where = Region((0, before.shape[1]), shape)
                merged = (before.shape[0], before.shape[1] + shape[1])
                copies = (*before.copies, RegionCopy(where, name, region, way))
                tensors[f"{prefix}{number - 1}"] = TensorMap("float32", merged, copies)
                continue
        tensors[target] = TensorMap("float32", shape, (RegionCopy(whole_region(shape), name, region, way),))
    return StateMap(tensors)


SHAPES = st.dictionaries(
    st.sampled_from(["a", "b", "c"]), st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), min_size=1
)


@given(SHAPES, st.data())
def test_composed_maps_make_what_the_second_makes_of_what_the_first_makes(shapes, data):
    arrays = numbered(shapes)
    first = data.draw(maps_of(arrays, "x"))
    sliced = made(first, arrays)
    second = data.draw(maps_of(sliced, "y"))
    there, straight = made(second, sliced), made(compose(first, second), arrays)
    assert all((straight[name] == array).all() for name, array in there.items())


@given(SHAPES, st.data())
def test_a_map_inverted_makes_the_source_again(shapes, data):
    arrays = numbered(shapes)
    there = data.draw(maps_of(arrays, "x"))
    back = invert(there, described(arrays))
    again = made(back, made(there, arrays))
    assert all((again[name] == array).all() for name, array in arrays.items())
    assert not list(map_differences(compose(there, back), identity_map(described(arrays))))
    assert back.removed == frozenset()


@settings(max_examples=300)
@given(SHAPES, st.data())
def test_two_maps_differ_in_the_regions_in_which_they_make_other_elements(shapes, data):
    arrays = numbered(shapes)
    one = data.draw(maps_of(arrays, "x"))
    name = data.draw(st.sampled_from(sorted(one.tensors)))
    tensor = one.tensors[name]
    number = data.draw(st.integers(0, len(tensor.copies) - 1))
    copy = tensor.copies[number]
    whole = arrays[copy.source].shape
    dim = data.draw(st.integers(0, len(whole) - 1))
    room = whole[dim] - copy.source_region.extents[dim]
    offsets = list(copy.source_region.offsets)
    offsets[dim] = data.draw(st.integers(0, room))
    changed = dataclasses.replace(copy, source_region=Region(tuple(offsets), copy.source_region.extents))
    copies = (*tensor.copies[:number], changed, *tensor.copies[number + 1 :])
    other = StateMap({**one.tensors, name: dataclasses.replace(tensor, copies=copies)})
    differ = made(one, arrays)[name] != made(other, arrays)[name]
    said = np.zeros(tensor.shape, bool)
    for at in map_differences(one, other):
        assert at.tensor == name
        said[slices(at.region)] = True
    assert (said == differ).all()


def test_copies_come_back_from_the_first_of_them():
    whole = whole_region((4, 2))
    copies = {name: TensorMap("float32", (4, 2), (RegionCopy(whole, "embed", whole),)) for name in ("embed", "head")}
    back = invert(StateMap(copies), {"embed": SimpleNamespace(dtype="float32", shape=(4, 2))})
    assert back.tensors["embed"].copies[0].source == "embed"
    assert back.removed == {"head"}


def test_copies_that_overlap_come_back_once_and_the_rest_is_dropped():
    low, high = Region((0,), (3,)), Region((1,), (3,))
    two = {
        "low": TensorMap("float32", (3,), (RegionCopy(whole_region((3,)), "w", low),)),
        "high": TensorMap("float32", (3,), (RegionCopy(whole_region((3,)), "w", high),)),
    }
    arrays = numbered({"w": (4,)})
    back = invert(StateMap(two), described(arrays))
    assert (made(back, made(StateMap(two), arrays))["w"] == arrays["w"]).all()
    assert back.dropped == {"high": (Region((0,), (2,)),)}


def test_what_was_dropped_comes_back_as_zeros_and_padding_is_dropped_on_the_way_back():
    ids, padding = Region((0,), (3,)), Region((3,), (2,))
    copies = (RegionCopy(ids, "w", ids), RegionCopy(padding, None, padding))
    there = StateMap({"w": TensorMap("float32", (5,), copies)}, dropped={"w": (Region((3,), (1,)),)})
    back = invert(there, {"w": SimpleNamespace(dtype="float32", shape=(4,))})
    assert made(back, {"w": np.arange(1, 6)})["w"].tolist() == [1, 2, 3, 0]
    assert back.dropped == {"w": (padding,)}


def test_a_map_that_leaves_elements_behind_cannot_be_inverted():
    part = TensorMap("float32", (2,), (RegionCopy(whole_region((2,)), "w", Region((0,), (2,))),))
    with pytest.raises(ValueError, match="has no source"):
        invert(StateMap({"half": part}), {"w": SimpleNamespace(dtype="float32", shape=(4,))})


def test_types_come_back_by_one_cast():
    whole = whole_region((2,))
    copy = RegionCopy(whole, "w", whole, casts=("bfloat16", "float16"))
    back = invert(
        StateMap({"w": TensorMap("float16", (2,), (copy,))}), {"w": SimpleNamespace(dtype="float32", shape=(2,))}
    )
    assert back.tensors["w"].copies[0].casts == ("float32",)


def test_what_the_second_map_leaves_out_is_removed_of_both():
    arrays = numbered({"w": (2, 4), "b": (2,)})
    halves = {
        name: TensorMap("float32", (2, 2), (RegionCopy(whole_region((2, 2)), "w", Region((0, start), (2, 2))),))
        for name, start in (("left", 0), ("right", 2))
    }
    first = StateMap({**halves, **identity_map(described({"b": arrays["b"]})).tensors})
    kept = StateMap({"left": identity_map(described(made(first, arrays))).tensors["left"]}, frozenset({"right", "b"}))
    both = compose(first, kept)
    assert both.removed == {"b"}
    assert both.dropped == {"w": (Region((0, 2), (2, 2)),)}


@given(st.permutations(range(4)).map(tuple))
def test_a_permutation_and_its_inverse_are_nothing(permutation):
    inverse = inverse_permutation(permutation)
    assert tuple(permutation[i] for i in inverse) == (0, 1, 2, 3)


def test_one_expert_of_many_comes_back_into_its_place():
    arrays = numbered({f"expert{e}": (2, 3) for e in range(3)})
    copies = tuple(
        RegionCopy(Region((e, 0, 0), (1, 3, 2)), f"expert{e}", whole_region((2, 3)), (NO_DIM, 1, 0)) for e in range(3)
    )
    there = StateMap({"experts": TensorMap("float32", (3, 3, 2), copies)})
    stacked = made(there, arrays)
    assert (stacked["experts"] == np.stack([array.T for array in arrays.values()])).all()
    again = made(invert(there, described(arrays)), stacked)
    assert all((again[name] == array).all() for name, array in arrays.items())
