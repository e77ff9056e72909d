"""Paddle's checkpoints opened without Paddle: right ones come out bit for bit, faults are named."""

import os
import pickle
from dataclasses import replace

import numpy as np
import pytest

from pipeproof.state.byte_ranges import ByteArray, write_file
from pipeproof.state.flex.flex_metadata import metadata_of, read_metadata
from pipeproof.state.open_checkpoint import open_checkpoint
from pipeproof.state.state_codes import StateError
from pipeproof.state.state_layout import whole_state
from tests.state.flex.paddle_checkpoints import require_equal, whole_tensors, write_checkpoint, written_shards
from tests.state.flex.ranks import moe_plan, values_of

TOPOLOGIES = {
    "one rank": {}, "stages": {"pp": 2}, "columns": {"tp": 2}, "shares": {"dp": 3}, "all": {"pp": 2, "tp": 2, "dp": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def plan():
    return moe_plan(tp=2, dp=2).plan


@pytest.fixture
def made(plan):
    return written_shards(plan)


def refused(place):
    with pytest.raises(StateError) as caught:
        open_checkpoint(place)
    (finding,) = caught.value.findings
    assert finding.help
    return f"{finding.code} {finding.message}"


@pytest.mark.parametrize("suffix", ["safetensors", "distcp"])
@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_every_tensor_comes_out_under_our_name_with_its_bits(tmp_path, topology, suffix):
    plan = moe_plan(**topology).plan
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "c", *written_shards(plan, suffix)))
    assert checkpoint.kind == "flex"
    assert all(entry.is_same(checkpoint.tensors[name]) for name, entry in whole_state(plan).items())
    require_equal(whole_tensors(checkpoint), values_of(plan))


def test_metadata_comes_back_as_it_was_written(tmp_path, made):
    (tmp_path / "0.metadata").write_bytes(metadata_of(made[1]))
    assert read_metadata(tmp_path / "0.metadata") == tuple(made[1])


def test_the_three_directories_of_a_trainer_are_one_checkpoint(tmp_path, plan, made):
    files, shards = made
    places = {"model_state": lambda key: not key.endswith("_0"), "optimizer_state": lambda key: key.endswith("_0")}
    for directory, belongs in places.items():
        there = {name: {key: one for key, one in arrays.items() if belongs(key)} for name, arrays in files.items()}
        write_checkpoint(tmp_path / directory, there, [part for part in shards if belongs(part.key)])
    require_equal(whole_tensors(open_checkpoint(tmp_path)), values_of(plan))


def test_what_the_optimizer_updates_is_the_weight_and_not_its_copy_of_fewer_bits(tmp_path, made):
    _, (part, *_) = made
    main, copy = np.arange(6, dtype=np.float32), np.arange(6, dtype=np.float16)
    part = replace(part, key="w.w_0", offsets=(0,), extents=(6,), shape=(6,), flat=None, file="0_0.safetensors")
    shards = [part, replace(part, key="w", dtype="float16")]
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "c", {part.file: {"w.w_0": main, "w": copy}}, shards))
    require_equal(whole_tensors(checkpoint), {"w": main})


def test_bfloat16_in_a_pickle_is_two_bytes_a_number(tmp_path, made):
    _, (part, *_) = made
    part = replace(part, key="w", offsets=(0,), extents=(3,), shape=(3,), flat=None, file="0_0.distcp")
    bits = np.array([0x3F80, 0x4000, 0x4040], dtype=np.uint16)
    place = write_checkpoint(tmp_path / "c", {part.file: {"w": bits}}, [replace(part, dtype="bfloat16")])
    checkpoint = open_checkpoint(place)
    (stored,) = checkpoint.shards["w"]
    assert checkpoint.tensors["w"].dtype == "bfloat16"
    assert stored.file.read_bytes()[stored.start : stored.start + 6] == bits.tobytes()


def test_copies_of_shards_are_read_once(tmp_path, plan, made):
    files, shards = made
    duplicated = shards[0]
    files["1_0.safetensors"][duplicated.key + "x"] = files["0_0.safetensors"][duplicated.key]
    place = write_checkpoint(tmp_path / "c", files, shards)
    assert "holds" in refused(place)
    files["1_0.safetensors"].pop(duplicated.key + "x")
    files["2_0.safetensors"][duplicated.key] = files["0_0.safetensors"][duplicated.key]
    place = write_checkpoint(
        tmp_path / "d", files, [*shards, replace(duplicated, file="2_0.safetensors", is_copy=True)]
    )
    require_equal(whole_tensors(open_checkpoint(place)), values_of(plan))


def missing_file(place, files, shards):
    write_checkpoint(place, files, shards)
    (place / "1_0.safetensors").unlink()


def cut_file(place, files, shards):
    write_checkpoint(place, files, shards)
    os.truncate(place / "1_0.safetensors", (place / "1_0.safetensors").stat().st_size - 4)


def lost_array(place, files, shards):
    files["1_0.safetensors"].popitem()
    write_checkpoint(place, files, shards)


def unspoken_array(place, files, shards):
    write_checkpoint(place, files, shards[1:])


def other_shape(place, files, shards):
    key, array = next((key, one) for key, one in files["1_0.safetensors"].items() if one.ndim == 2)
    files["1_0.safetensors"][key] = array[1:]
    write_checkpoint(place, files, shards)


def other_type(place, files, shards):
    key = shards[0].key
    files["0_0.safetensors"][key] = files["0_0.safetensors"][key].astype(np.float64)
    write_checkpoint(place, files, shards)


def two_wholes(place, files, shards):
    index, part = next((i, one) for i, one in enumerate(shards) if i and one.key == "embed.weight")
    shards[index] = replace(part, shape=(part.shape[0] + 1, *part.shape[1:]))
    write_checkpoint(place, files, shards)


def range_outside(place, files, shards):
    index, part = next((i, one) for i, one in enumerate(shards) if one.flat)
    shards[index] = replace(part, flat=(part.flat[0], 10**9))
    write_checkpoint(place, files, shards)


def file_elsewhere(place, files, shards):
    shards[0] = replace(shards[0], file="../0_0.safetensors")
    write_checkpoint(place, files, shards)


def two_metadata(place, files, shards):
    write_checkpoint(place, files, shards)
    write_checkpoint(place, files, shards, "1.metadata")


def asking_metadata(place, files, shards):
    class Asks:
        def __reduce__(self):
            return os.mkdir, (str(place / "made"),)

    write_checkpoint(place, files, shards)
    (place / "0.metadata").write_bytes(pickle.dumps(Asks(), protocol=4))


def cut_metadata(place, files, shards):
    write_checkpoint(place, files, shards)
    os.truncate(place / "0.metadata", 1000)


DAMAGE = {
    missing_file: "1_0.safetensors cannot be read",
    cut_file: "1_0.safetensors is cut short",
    lost_array: "must hold",
    unspoken_array: "the metadata does not list",
    other_shape: "and the metadata lists",
    other_type: "and the metadata lists float32",
    two_wholes: "embed.weight is float32",
    range_outside: "is not a range of",
    file_elsewhere: "which does not name a file next to it",
    two_metadata: "has 2 metadata files",
    asking_metadata: "names posix.mkdir where Paddle's Metadata should be; nothing of it was executed",
    cut_metadata: "is damaged",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda one: one.__name__)
def test_what_is_not_whole_or_says_two_things_is_refused(tmp_path, made, damage):
    damage(tmp_path / "c", *made)
    assert DAMAGE[damage] in refused(tmp_path / "c")
    assert not (tmp_path / "c" / "made").exists()


def test_a_class_in_a_file_of_arrays_is_named_and_not_run(tmp_path, made):
    class Asks:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    place = write_checkpoint(tmp_path / "c", *written_shards(moe_plan().plan, "distcp"))
    table = pickle.loads((place / "0_0.distcp").read_bytes())
    (place / "0_0.distcp").write_bytes(pickle.dumps({**table, "embed.weight": Asks()}, protocol=4))
    assert "PP926" in refused(place)
    assert "posix.mkdir as 'embed.weight'" in refused(place)
    assert not (tmp_path / "made").exists()


def test_arrays_in_another_order_or_protocol_are_refused_with_what_to_do(tmp_path, made):
    _, (part, *_) = made
    part = replace(part, key="w", offsets=(0, 0), extents=(2, 3), shape=(2, 3), flat=None, file="0_0.distcp")
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    for array, protocol in ((np.asfortranarray(numbers), 4), (numbers.astype(">f4"), 4), (numbers, 2)):
        place = write_checkpoint(tmp_path / f"c{array.strides}{array.dtype.str[0]}{protocol}", {}, [part])
        (place / part.file).write_bytes(pickle.dumps({"w": array}, protocol=protocol))
        assert "is not read" in refused(place)


def test_a_directory_without_metadata_is_no_checkpoint_of_paddles(tmp_path):
    write_file(tmp_path / "0_0.safetensors", {"w": ByteArray("float32", (1,), np.zeros(4, np.uint8))})
    assert "PP920" in refused(tmp_path)
