"""Small states without a framework; values differ between any two tensors, elements and steps."""

import zlib
from math import prod

import numpy as np

from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.state.byte_ranges import ByteArray
from pipeproof.state.state_layout import shards_of_rank, whole_state
from pipeproof.state.write_state import finish_state, write_rank_state
from pipeproof.verify.certificate import graph_digest


def values(plan, steps_done):
    """Every tensor of a plan's state, whole: random numbers that the name and the step decide."""
    found = {}
    for name, entry in whole_state(plan).items():
        draw = np.random.default_rng([zlib.crc32(name.encode()), steps_done])
        found[name] = draw.standard_normal(prod(entry.shape)).astype(entry.dtype).reshape(entry.shape)
        assert found[name].itemsize == dtype_bytes(entry.dtype)
    return found


def written_by_rank(plan, rank, whole):
    """Return the shards that a rank writes, as ``write_rank_state`` takes them."""
    parts = part_of_rank(plan, rank, whole)
    return {
        piece.shard: parts[piece.weight, piece.slot] for piece in shards_of_rank(plan, rank) if piece.writer == rank
    }


def part_of_rank(plan, rank, whole):
    """Return the shards of a rank by weight and slot."""
    return {
        (piece.weight, piece.slot): ByteArray(piece.tensor.dtype, piece.shape, as_bytes(cut(piece.shard, whole)))
        for piece in shards_of_rank(plan, rank)
    }


def cut(shard, whole):
    region = tuple(slice(o, o + e) for o, e in zip(shard.offsets, shard.extents, strict=True))
    part = np.ascontiguousarray(whole[shard.tensor][region])
    return part if shard.flat is None else part.reshape(-1)[slice(*shard.flat)]


def as_bytes(array):
    return np.frombuffer(array.tobytes(), np.uint8)


def write_rank(at, root, rank, steps_done=1, job="job"):
    write_rank_state(root, steps_done, job, rank, written_by_rank(at.plan, rank, values(at.plan, steps_done)))


def finish(at, root, steps_done=1, job="job"):
    return finish_state(root, steps_done, job, at.plan, graph_digest(at), "1.0")


def write_state(at, root, steps_done=1, job="job"):
    """The state of a subject as its ranks would write it; its directory."""
    for rank in range(at.plan.mesh.num_ranks):
        write_rank(at, root, rank, steps_done, job)
    return finish(at, root, steps_done, job)


def files_below(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
