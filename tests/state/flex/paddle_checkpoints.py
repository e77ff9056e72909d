"""Checkpoints in Paddle's format made without Paddle, and whole tensors assembled from opened ones."""

import pickle

import numpy as np

from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.state.byte_ranges import ByteArray, write_file
from pipeproof.state.flex.flex_metadata import FlexShard, key_of, metadata_of, stored_shape
from pipeproof.state.regions import flat_regions
from pipeproof.state.state_layout import shards_of_rank
from tests.state.flex.ranks import shard_of, values_of


def written_shards(plan, suffix="safetensors"):
    """The content of each file, and the shards as in Paddle's metadata."""
    values, files, shards = values_of(plan), {}, []
    for rank in range(plan.mesh.num_ranks):
        name = f"{rank}_0.{suffix}"
        files[name] = {}
        for piece in shards_of_rank(plan, rank):
            if piece.writer != rank:
                continue
            shard, entry = piece.shard, piece.tensor
            key = key_of(shard.tensor, entry)
            files[name][key] = shard_of(values[shard.tensor], shard).reshape(stored_shape(entry, shard.shape))
            extents, whole = stored_shape(entry, shard.extents), stored_shape(entry, entry.shape)
            offsets = shard.offsets or (0,) * len(extents)
            shards.append(FlexShard(key, offsets, extents, shard.flat, entry.dtype, whole, name))
    return files, shards


def write_checkpoint(directory, files, shards, metadata="0.metadata"):
    directory.mkdir(parents=True, exist_ok=True)
    for name, arrays in files.items():
        if name.endswith(".distcp"):
            table = {**arrays, "StructuredToParameterName@@": dict.fromkeys(arrays, "p")}
            (directory / name).write_bytes(pickle.dumps(table, protocol=4))
            continue
        content = {
            key: ByteArray(str(one.dtype), one.shape, np.frombuffer(one.tobytes(), np.uint8))
            for key, one in arrays.items()
        }
        write_file(directory / name, content)
    (directory / metadata).write_bytes(metadata_of(shards))
    return directory


def names_by_key(checkpoint):
    """Our names of the tensors of a checkpoint by Paddle's keys."""
    return {key_of(name, entry): name for name, entry in checkpoint.tensors.items()}


def whole_tensors(checkpoint):
    """The tensors of an opened checkpoint, read at the places that it says; every element from exactly one shard."""
    whole = {}
    for name, entry in checkpoint.tensors.items():
        item = dtype_bytes(entry.dtype)
        numbers = np.zeros(entry.shape, entry.dtype)
        times = np.zeros(entry.shape, int)
        for part in checkpoint.shards[name]:
            shard = part.shard
            size = int(np.prod(shard.shape)) * item
            content = np.frombuffer(part.file.read_bytes()[part.start : part.start + size], entry.dtype)
            for region in flat_regions(shard.extents, shard.flat or (0, int(np.prod(shard.extents)))):
                there = region.shifted(shard.offsets)
                at = tuple(map(slice, there.offsets, there.stops))
                numbers[at] = content[: region.numel].reshape(region.extents)
                times[at] += 1
                content = content[region.numel :]
        assert (times == 1).all(), name
        whole[name] = numbers
    return whole


def require_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert found[name].tobytes() == value.tobytes(), name
