"""Which elements go from whom to whom: of each part of a target, the boxes that stand in one part of the source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.state.aoa.patterns import by_form
from pipeproof.state.boxes import Box, meet
from pipeproof.state.describe import common_name
from pipeproof.state.mapping import Slab, StateMap, slabs_of
from pipeproof.state.reshard.sides import Parts, Side

ZEROS = "zeros"
"""In place of a holder, where elements are made of none."""


class Flow(NamedTuple):
    """The elements ``box`` of a target's tensor are held by ``giver`` before and by ``taker`` behind."""

    box: Box
    giver: str
    taker: str


@dataclass(frozen=True, slots=True)
class Recut:
    """Tensors that are alike but for the numbers in their names, and whose elements do not all go one way.

    ``name`` is that of all of them, or where the optimizer keeps them
    (``is_kept``), of their weights; ``shape`` that of each in the target.
    """

    name: str
    is_kept: bool
    shape: tuple[int, ...]
    flows: tuple[Flow, ...]


@dataclass(frozen=True, slots=True)
class Flows:
    """What goes where: bytes by giver and taker, the tensors that are cut anew, and how many go whole."""

    givers: tuple[str, ...]
    takers: tuple[str, ...]
    num_bytes: Mapping[tuple[str, str], int]
    recut: tuple[Recut, ...]
    num_whole: int


def flows_of(source: Side, state_map: StateMap, target: Side) -> Flows:
    """What a map that was proved moves from whom to whom. Work grows with the parts of a tensor, squared.

    A tensor of the optimizer that goes as its weight does is not among those
    that are cut anew, though its bytes are counted.
    """
    flows = {name: tuple(_flows(name, source.parts, state_map, target.parts)) for name in target.tensors}
    num_bytes: dict[tuple[str, str], int] = {}
    for name, found in flows.items():
        item = dtype_bytes(target.tensors[name].dtype)
        for box, giver, taker in found:
            num_bytes[giver, taker] = num_bytes.get((giver, taker), 0) + box.numel * item
    cut = [name for name, found in flows.items() if len({flow[1:] for flow in found}) > 1]
    own_way = [name for name in cut if flows.get(target.tensors[name].weight or "") != flows[name]]
    return Flows(
        _holders(source.parts, {giver for giver, _ in num_bytes}),
        _holders(target.parts, {taker for _, taker in num_bytes}),
        num_bytes,
        tuple(_alike(own_way, flows, target)),
        len(flows) - len(cut),
    )


def _holders(parts: Parts, named: set[str]) -> tuple[str, ...]:
    """Those that are named, in the order of their ranks; files as they come, and what is nobody's at last."""
    found = {part.where: part.rank for of_one in parts.values() for part in of_one if part.where in named}
    by_rank = sorted(found, key=lambda where: -1 if (rank := found[where]) is None else rank)
    return (*by_rank, *(named - found.keys()))


def _alike(names: Iterable[str], flows: Mapping[str, tuple[Flow, ...]], target: Side) -> Iterator[Recut]:
    of_weight: dict[str, list[str]] = {}
    for name in names:
        of_weight.setdefault(target.tensors[name].weight or name, []).append(name)
    for of_form in by_form(of_weight).values():
        alike: dict[tuple[bool, tuple[int, ...], tuple[Flow, ...]], dict[str, None]] = {}
        for weight in of_form:
            for name in of_weight[weight]:
                alike.setdefault((name != weight, target.tensors[name].shape, flows[name]), {})[weight] = None
        for about, same in alike.items():
            yield Recut(common_name([*same]), *about)


def _flows(name: str, given: Parts, state_map: StateMap, taken: Parts) -> Iterator[Flow]:
    for part in taken[name]:
        for _, own in part.shard.boxes():
            for slab in slabs_of(state_map.tensors[name], own):
                for box, giver in _givers(slab, given):
                    yield Flow(box, giver, part.where)


def _givers(slab: Slab, given: Parts) -> Iterator[tuple[Box, str]]:
    """The boxes of the target's tensor that parts of the source have, each with its holder."""
    if slab.source is None:
        yield slab.box, ZEROS
        return
    for part in given[slab.source]:
        for _, theirs in part.shard.boxes():
            common = meet(theirs, slab.source_box)
            if common is not None:
                inside = common.within(slab.source_box)
                if slab.permutation is not None:
                    inside = inside.permuted(slab.permutation)
                yield inside.moved(slab.box.offsets), part.where
