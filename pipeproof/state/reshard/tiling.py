"""Whether parts of tensors hold each element once: for each distinct way of cutting, not for each tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

from pipeproof.state.boxes import Box, Fault, tiling_fault
from pipeproof.state.index import Shard
from pipeproof.state.reshard.sides import Side

Cut = tuple[tuple[int, ...], tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, int] | None], ...]]
"""A shape, and of each part of it offsets, extents and flat range."""


class BadCut(NamedTuple):
    """Tensors of a side that are cut alike and not once each: the first element range, and the parts that hold it."""

    tensors: tuple[str, ...]
    fault: Fault


def bad_cuts(side: Side) -> Iterator[BadCut]:
    """The ways of cutting of a side that are no bijection, in the order of the tensors."""
    alike: dict[Cut, list[str]] = {}
    for name, tensor in side.tensors.items():
        parts = side.parts.get(name, ())
        key = tensor.shape, tuple((p.shard.offsets, p.shard.extents, p.shard.flat) for p in parts)
        alike.setdefault(key, []).append(name)
    for names in alike.values():
        shards = [part.shard for part in side.parts.get(names[0], ())]
        fault = cut_fault(side.tensors[names[0]].shape, shards)
        if fault is not None:
            yield BadCut(tuple(names), fault)


def cut_fault(shape: Sequence[int], shards: Sequence[Shard]) -> Fault | None:
    """The first box of a tensor that shards hold not once, with the numbers of those that hold it.

    None where they are a bijection onto the tensor. Shards that have not as
    many dims as it are outside of it.
    """
    for number, shard in enumerate(shards):
        if len(shard.extents) != len(shape):
            return Fault(Box(shard.offsets, shard.extents), 1, (number,))
    if _whole_boxes_tile(shape, shards):
        return None
    boxes, owner = list[Box](), list[int]()
    for number, shard in enumerate(shards):
        for _, box in shard.boxes():
            boxes.append(box)
            owner.append(number)
    fault = tiling_fault(shape, boxes)
    return None if fault is None else fault._replace(holders=tuple(owner[number] for number in fault.holders))


def _whole_boxes_tile(shape: Sequence[int], shards: Sequence[Shard]) -> bool:
    """Whether the shards' boxes tile the tensor, and flat ranges each box: so all plans cut, and it is seen at once."""
    ranges: dict[Box, list[tuple[int, int]]] = {}
    for shard in shards:
        ranges.setdefault(Box(shard.offsets, shard.extents), []).append(shard.flat or (0, prod(shard.extents)))
    for box, flat in ranges.items():
        ends = [(0, 0), *sorted(flat), (box.numel, box.numel)]
        if any(one[1] != next_one[0] for one, next_one in pairwise(ends)):
            return False
    return tiling_fault(shape, list(ranges)) is None
