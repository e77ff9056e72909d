"""Flows of a reshard: which elements go from which holder to which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.state.aoa.patterns import by_form
from pipeproof.state.checkpoint import ShardsByTensor
from pipeproof.state.checkpoint_text import common_name
from pipeproof.state.regions import Region, intersect
from pipeproof.state.reshard.shard_layout import ShardLayout
from pipeproof.state.tensor_map import RegionCopy, StateMap, copies_into

ZEROS = "zeros"
"""Placeholder for a holder, where elements are added."""


class Flow(NamedTuple):
    """The elements ``region`` of a target tensor go from ``sender`` to ``receiver``."""

    region: Region
    sender: str
    receiver: str


@dataclass(frozen=True, slots=True)
class ReshardedTensors:
    """Tensors that differ only by the numbers in their names, and whose elements have several senders or receivers.

    ``name`` is the common name, for optimizer states (``is_state``) that of their weights; ``shape`` is that of each
    tensor in the target.
    """

    name: str
    is_state: bool
    shape: tuple[int, ...]
    flows: tuple[Flow, ...]


@dataclass(frozen=True, slots=True)
class Flows:
    """All flows of a reshard.

    Bytes by sender and receiver, the tensors that are resharded, and the number that stay whole.
    """

    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    num_bytes: Mapping[tuple[str, str], int]
    resharded: tuple[ReshardedTensors, ...]
    num_whole: int


def flows_between(source: ShardLayout, state_map: StateMap, target: ShardLayout) -> Flows:
    """Return the flows of a proved map. Work grows with the square of the number of shards of a tensor.

    An optimizer state that goes the way of its weight is not listed among the resharded tensors, but its bytes are
    counted.
    """
    flows = {name: tuple(_flows(name, source.shards, state_map, target.shards)) for name in target.tensors}
    num_bytes: dict[tuple[str, str], int] = {}
    for name, tensor_flows in flows.items():
        item = dtype_bytes(target.tensors[name].dtype)
        for region, sender, receiver in tensor_flows:
            num_bytes[sender, receiver] = num_bytes.get((sender, receiver), 0) + region.numel * item
    cut = [name for name, tensor_flows in flows.items() if len({flow[1:] for flow in tensor_flows}) > 1]
    independent = [name for name in cut if flows.get(target.tensors[name].weight or "") != flows[name]]
    return Flows(
        _holders(source.shards, {sender for sender, _ in num_bytes}),
        _holders(target.shards, {receiver for _, receiver in num_bytes}),
        num_bytes,
        tuple(_alike(independent, flows, target)),
        len(flows) - len(cut),
    )


def _holders(shards: ShardsByTensor, named: set[str]) -> tuple[str, ...]:
    """Return the named holders in the order of their ranks; files in their order, and zeros last."""
    tensor_flows = {held.where: held.rank for of_one in shards.values() for held in of_one if held.where in named}
    by_rank = sorted(tensor_flows, key=lambda where: -1 if (rank := tensor_flows[where]) is None else rank)
    return (*by_rank, *(named - tensor_flows.keys()))


def _alike(
    names: Iterable[str], flows: Mapping[str, tuple[Flow, ...]], target: ShardLayout
) -> Iterator[ReshardedTensors]:
    of_weight: dict[str, list[str]] = {}
    for name in names:
        of_weight.setdefault(target.tensors[name].weight or name, []).append(name)
    for similar in by_form(of_weight).values():
        alike: dict[tuple[bool, tuple[int, ...], tuple[Flow, ...]], dict[str, None]] = {}
        for weight in similar:
            for name in of_weight[weight]:
                alike.setdefault((name != weight, target.tensors[name].shape, flows[name]), {})[weight] = None
        for fields, weights in alike.items():
            yield ReshardedTensors(common_name([*weights]), *fields)


def _flows(
    name: str, source_shards: ShardsByTensor, state_map: StateMap, target_shards: ShardsByTensor
) -> Iterator[Flow]:
    for held in target_shards[name]:
        for _, region in held.shard.regions():
            for copy in copies_into(state_map.tensors[name], region):
                for moved, sender in _senders(copy, source_shards):
                    yield Flow(moved, sender, held.where)


def _senders(copy: RegionCopy, source_shards: ShardsByTensor) -> Iterator[tuple[Region, str]]:
    """Yield the regions of the target tensor that source shards have, each with its holder."""
    if copy.source is None:
        yield copy.region, ZEROS
        return
    for held in source_shards[copy.source]:
        for _, source_region in held.shard.regions():
            overlap = intersect(source_region, copy.source_region)
            if overlap is not None:
                inside = overlap.relative_to(copy.source_region)
                if copy.permutation is not None:
                    inside = inside.permuted(copy.permutation)
                yield inside.shifted(copy.region.offsets), held.where
