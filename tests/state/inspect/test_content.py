"""Whole tensors out of any shards, in blocks of any size: their MD5, and where two checkpoints differ."""

import hashlib
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from pipeproof.state.checkpoint import md5_lines, md5_of_all, tensor_blocks, tensor_md5s
from pipeproof.state.inspect_checkpoints import compare_checkpoints, comparison_to_json, difference_text
from pipeproof.state.open_checkpoint import open_checkpoint
from tests.state.runs import MOE, plan_of
from tests.state.tiny import values, write_state

MANY = {**MOE, "num_experts": 12}
TOPOLOGIES = {
    "one rank": {"topology": {"pp": 1, "ep": 1}, "schedule": {"num_micro_batches": 8}},
    "tp, ep": {"topology": {"tp": 2, "ep": 2}},
    "sharded, tp, ep": {"topology": {"pp": 1, "tp": 2, "dp": 3, "ep": 2}, "memory": {"shard_optimizer": "dp"}},
}


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    root, found = tmp_path_factory.mktemp("states"), {}
    for name, changes in TOPOLOGIES.items():
        at = plan_of(model={"num_layers": 2, "num_kv_heads": 2, "moe": MANY}, **changes)
        found[name] = open_checkpoint(write_state(at, root / name, 2)), values(at.plan, 2)
    return found


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_an_md5_is_that_of_the_whole_tensor_and_the_same_for_all_topologies(states, name):
    checkpoint, whole = states[name]
    digests = tensor_md5s(checkpoint)
    assert list(digests) == sorted(whole)
    assert digests == {name: hashlib.md5(array.tobytes()).hexdigest() for name, array in whole.items()}
    assert len(set(digests.values())) == len(digests)
    assert md5_of_all(digests) == hashlib.md5(md5_lines(digests).encode()).hexdigest()
    assert digests == tensor_md5s(states["one rank"][0])
    assert compare_checkpoints(checkpoint, states["one rank"][0]).equal


@settings(deadline=None, max_examples=30)
@given(block_bytes=st.integers(1, 400), topology=st.sampled_from(sorted(TOPOLOGIES)), data=st.data())
def test_blocks_of_any_size_are_the_tensor_in_its_order(states, block_bytes, topology, data):
    checkpoint, whole = states[topology]
    name = data.draw(st.sampled_from(sorted(whole)))
    blocks = [bytes(block) for block in tensor_blocks(checkpoint, name, block_bytes)]
    assert b"".join(blocks) == whole[name].tobytes()
    assert all(len(block) <= max(block_bytes, whole[name].itemsize) for block in blocks)


@settings(deadline=None, max_examples=80)
@given(
    shape=st.lists(st.integers(1, 5), max_size=3).map(tuple),
    dtype=st.sampled_from(["float32", "float64", "float16", "int64"]),
    data=st.data(),
)
def test_the_first_elements_that_differ_and_how_far_they_are_apart(tmp_path_factory, shape, dtype, data):
    place = tmp_path_factory.mktemp("two")
    size = prod(shape)
    one = np.arange(size).astype(dtype)
    by = np.zeros(size, dtype)
    for number in data.draw(st.sets(st.integers(0, size - 1), max_size=6)):
        by[number] = data.draw(st.sampled_from([1, 2, 5]))
    other = one + by
    for name, array in (("one", one), ("other", other)):
        save_file({"t": array.reshape(shape), "same": np.ones(3)}, place / f"{name}.safetensors")
    found = compare_checkpoints(*(open_checkpoint(place / f"{name}.safetensors") for name in ("one", "other")))
    places = np.flatnonzero(by)
    assert found.equal == (len(places) == 0)
    assert found.num_alike == 1 + found.equal
    for difference in found.differ:
        assert difference.num == len(places)
        assert difference.first == tuple(np.unravel_index(places[0], shape))
        assert difference.farthest == by.max()


def test_elements_that_differ_are_counted_over_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeproof.state.inspect_checkpoints.tensor_blocks", lambda c, name: tensor_blocks(c, name, 12))
    one = np.zeros(30, np.float32)
    other = one.copy()
    other[5:19] = 0.5
    other[20] = -3
    for name, array in (("one", one), ("other", other)):
        save_file({"t": array}, tmp_path / f"{name}.safetensors")
    (found,) = compare_checkpoints(*(open_checkpoint(tmp_path / f"{n}.safetensors") for n in ("one", "other"))).differ
    assert (found.num, found.first, found.farthest) == (15, (5,), 3.0)
    assert difference_text(found) == "15 of 30 elements, first [5], by 3 at most"


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (0.0, -0.0, "1 of 1 elements, first [0], in the bits of zeros or NaN alone"),
        (1.0, np.nan, "1 of 1 elements, first [0]"),
        (1.0, np.inf, "1 of 1 elements, first [0], by inf at most"),
    ],
)
def test_what_is_no_number_differs_too(tmp_path, one, other, said):
    for name, value in (("one", one), ("other", other)):
        save_file({"t": np.array([value])}, tmp_path / f"{name}.safetensors")
    found = compare_checkpoints(*(open_checkpoint(tmp_path / f"{n}.safetensors") for n in ("one", "other")))
    assert difference_text(found.differ[0]) == said
    assert comparison_to_json(found)["equal"] is False
