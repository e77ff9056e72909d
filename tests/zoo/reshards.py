"""States that are made of others: right ones, and the mutants that the proof of a reshard must find."""

import dataclasses
from functools import cache
from pathlib import Path

from pipeproof.state.checkpoint import HeldShard
from pipeproof.state.regions import NO_DIM, Region, whole_region
from pipeproof.state.reshard.shard_layout import ShardLayout
from pipeproof.state.state_index import Shard, TensorEntry
from pipeproof.state.tensor_map import RegionCopy, StateMap, TensorMap, identity_map
from tests.state.reshard_proof.plans import layout
from tests.zoo.case import Case, Moved

MODEL = {"num_layers": 1, "num_kv_heads": 2, "vocab_size": 24}
EXPERTS = {"num_layers": 1, "moe": {"num_experts": 12, "top_k": 2, "ffn_size": 8}}
QKV = "layer.0.attn.qkv.weight"
PARTS = ("gate", "up", "down")


@cache
def saved(model, ranks=1, name="saved"):
    """Tensors that a plan's ranks save: of experts on so many EP ranks, of the dense model on so many TP ranks."""
    topology = {"pp": 1, "ep": ranks} if model == "experts" else {"pp": 1, "tp": ranks}
    return layout(topology, EXPERTS if model == "experts" else MODEL, name=name)


def as_it_is(source, target):
    """A state that another plan's is made of, tensor by tensor."""
    return Moved(source, identity_map(source.tensors), target)


def offsets_from_0(numbered_anew):
    """Experts of two EP ranks, saved with their offsets, or each from 0 on."""
    source = saved("experts", 2)
    if numbered_anew:
        source = dataclasses.replace(
            source, plan=None, shards={n: tuple(map(_from_0, p)) for n, p in source.shards.items()}
        )
    return as_it_is(source, saved("experts"))


def _from_0(part):
    shard = part.shard.model_copy(update={"offsets": (0,) * len(part.shard.offsets)})
    return dataclasses.replace(part, shard=shard)


def by_name(number_for):
    """Twelve experts of a file that has each as tensors of its own; expert e is read as number ``number_for(e)``."""
    target = saved("experts", 2, "plan")
    own = [f"layer.0.mlp.experts.{part}.weight" for part in PARTS]
    maps = {name: _stacked(name, target.tensors[name], number_for) for name in own}
    right = {name: _stacked(name, target.tensors[name], int) for name in own}
    return _of_whole_tensors(target, maps, right)


def _stacked(name, entry, number_for):
    one = entry.shape[1:]
    copies = (
        RegionCopy(Region((e, 0, 0), (1, *one)), f"experts.{number_for(e)}.{name}", whole_region(one), (NO_DIM, 0, 1))
        for e in range(entry.shape[0])
    )
    return TensorMap(entry.dtype, entry.shape, tuple(copies))


def fused(*, grouped):
    """A file with q, k and v apart, whose heads are put into groups, or one kind behind the other."""
    target = saved("dense", 2, "plan")
    return _of_whole_tensors(target, {QKV: _qkv(target, grouped)}, {QKV: _qkv(target, True)})


def _qkv(target, grouped):
    """Four queries, two keys, two values, each of four columns."""
    columns = [("q", 0, 8), ("k", 0, 4), ("v", 0, 4), ("q", 8, 8), ("k", 4, 4), ("v", 4, 4)]
    if not grouped:
        columns = [("q", 0, 16), ("k", 0, 8), ("v", 0, 8)]
    entry, copies, at = target.tensors[QKV], [], 0
    for name, start, width in columns:
        copies.append(RegionCopy(Region((0, at), (16, width)), name, Region((0, start), (16, width))))
        at += width
    return TensorMap(entry.dtype, entry.shape, tuple(copies))


def _of_whole_tensors(target, claimed, right):
    """The plan's state of a file with whole tensors, under its own names but for the names in the maps."""
    others = {name: entry for name, entry in target.tensors.items() if name not in claimed}
    shapes = {}
    for tensor in right.values():
        for copy in tensor.copies:
            shapes[copy.source] = tuple(
                map(max, copy.source_region.stops, shapes.get(copy.source, copy.source_region.stops))
            )
    entries = {name: TensorEntry(kind="weight", dtype="float32", shape=shape) for name, shape in shapes.items()}
    rest = identity_map(others).tensors
    source = ShardLayout(
        "file", {**others, **entries}, {n: (_whole(n, e.shape),) for n, e in {**others, **entries}.items()}
    )
    return Moved(source, StateMap({**rest, **claimed}), target, StateMap({**rest, **right}))


def _whole(name, shape):
    return HeldShard(Shard(tensor=name, offsets=(0,) * len(shape), extents=shape), None, Path("file"))


def without(name):
    """The state of a plan, and the same without a tensor."""
    one = saved("dense")
    tensors = {other: entry for other, entry in one.tensors.items() if other != name}
    source = ShardLayout("saved", tensors, {other: one.shards[other] for other in tensors})
    return as_it_is(source, one)


def narrower():
    """A state whose weights are of another type."""
    return as_it_is(layout({"pp": 1}, MODEL, run={"dtype": "float64"}), saved("dense"))


def read_for_both():
    """A map that reads one half of a tensor for both halves: sizes agree, and the other half is lost."""
    one = saved("dense")
    right = identity_map(one.tensors)
    tensor = right.tensors["layer.0.mlp.up.weight"]
    half = Region((0, 0), (16, 16))
    copies = (
        tensor.copies[0].restricted_to(half),
        dataclasses.replace(tensor.copies[0].restricted_to(half), region=Region((0, 16), (16, 16))),
    )
    claimed = {**right.tensors, "layer.0.mlp.up.weight": dataclasses.replace(tensor, copies=copies)}
    return Moved(one, StateMap(claimed), one)


def on_two_ranks():
    """A state of two TP ranks that becomes one of one."""
    return as_it_is(saved("dense", 2), saved("dense"))


RESHARDS = (
    Case("PP213", "a tensor is left out of a state", on_two_ranks, lambda: without("norm.weight"), kills=("PP213",)),
    Case("PP214", "weights are float64, and no cast is said", on_two_ranks, narrower, kills=("PP214",)),
    Case("PP215", "one half of a tensor is read for both", on_two_ranks, read_for_both, kills=("PP215",)),
)
