"""Whether a map brings each element to the one that means the same: a bijection may still exchange what it moves.

A map that somebody claims is held against the right one. Both read and make
the same tensors; where they differ, the finding says what is taken for what.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from pipeproof.specs.finding import Finding, Severity
from pipeproof.specs.model import ModelSpec
from pipeproof.state.boxes import Box, meet
from pipeproof.state.mapping import Difference, Slab, StateMap, differences
from pipeproof.state.reshard.sides import Side
from pipeproof.state.reshard.words import and_more, meaning, number_of_expert, part_words, weight_name
from pipeproof.verify.layouts.maps import OTHER_INDICES

_EXPERT = re.compile(r"experts\.\d+\.")
_SHOWN = 12
_PAIRS = frozenset({"gate", "up"})


class _Place(NamedTuple):
    """Elements of a tensor, as many as a difference has."""

    name: str
    box: Box


class _Wrong(NamedTuple):
    """A difference, and in pipeproof's own tensors what is asked for and what comes, where there are such."""

    at: Difference
    asked: _Place | None
    comes: _Place | None


def prove_meaning(
    claimed: StateMap, right: StateMap, model: ModelSpec, target: Side | None = None
) -> tuple[Finding, ...]:
    """PP211 for each way in which a claimed map takes elements for others than the right one does.

    Experts, fused queries, keys and values, gate and up have words of their
    own. With ``target`` it says which rank gets them. What only one of the two
    maps makes is not looked at: that is a matter of names.
    """
    kinds: dict[str, list[_Wrong]] = {}
    readers = _Readers(right, model)
    for at in differences(claimed, right):
        one = _Wrong(at, readers.own(at, at.other), readers.own(at, at.one))
        kinds.setdefault(_kind(one), []).append(one)
    return tuple(_finding(kind, found, claimed, readers, target) for kind, found in kinds.items())


class _Readers:
    """What the right map says that any elements are, in pipeproof's own tensors: those of its source, or its target."""

    def __init__(self, right: StateMap, model: ModelSpec) -> None:
        self.model = model
        self._into_own = all(weight_name(name) is not None for name in right.tensors)
        self._of: dict[str, list[tuple[str, Slab]]] = {}
        for name, tensor in right.tensors.items():
            for slab in tensor.slabs:
                if slab.source is not None:
                    self._of.setdefault(slab.source, []).append((name, slab))

    def own(self, at: Difference, slab: Slab) -> _Place | None:
        """The elements that a slab reads; None for zeros and for what has no name of pipeproof's."""
        if slab.source is None:
            return None
        if not self._into_own:
            return _Place(slab.source, slab.source_box) if weight_name(slab.source) is not None else None
        if slab == at.other:
            return _Place(at.tensor, at.box)
        for name, reader in self._of.get(slab.source, ()):
            common = meet(reader.source_box, slab.source_box)
            if common is not None:
                return _Place(name, _through(reader, common))
        return None

    def words(self, slab: Slab, own: _Place | None) -> str:
        """What a slab reads, with what it is for the model."""
        if slab.source is None:
            return "zeros"
        stops = [reader.source_box.stops for _, reader in self._of.get(slab.source, ())] or [slab.source_box.stops]
        shape = tuple(map(max, *stops)) if len(stops) > 1 else stops[0]
        return part_words(slab.source, slab.source_box, shape, own and meaning(own.name, own.box, self.model))


def _through(slab: Slab, source_box: Box) -> Box:
    """Where a slab puts a box of its source."""
    inside = source_box.within(slab.source_box)
    if slab.permutation is not None:
        inside = inside.permuted(slab.permutation)
    return inside.moved(slab.box.offsets)


def _kind(wrong: _Wrong) -> str:
    if wrong.at.one.source is None or wrong.at.other.source is None:
        return "zeros"
    if _experts_of(wrong) is not None:
        return "experts"
    names = [None if place is None else weight_name(place.name) for place in (wrong.asked, wrong.comes)]
    if None in names:
        return "other"
    asked, comes = (str(name) for name in names)
    if asked.endswith("attn.qkv.weight") and comes.endswith("attn.qkv.weight"):
        return "qkv"
    if {asked.split(".")[-2], comes.split(".")[-2]} == _PAIRS:
        return "gate and up"
    return "other"


def _experts_of(wrong: _Wrong) -> tuple[int, int] | None:
    """The expert that is asked for and the one that comes, where these are parts of two experts."""
    asked, comes = (number_of_expert(slab.source or "", slab.source_box) for slab in (wrong.at.other, wrong.at.one))
    return None if asked is None or comes is None or asked == comes else (asked, comes)


def _finding(kind: str, found: list[_Wrong], claimed: StateMap, readers: _Readers, target: Side | None) -> Finding:
    first = found[0]
    at = first.at
    where = part_words(at.tensor, at.box, claimed.tensors[at.tensor].shape)
    comes, asked = readers.words(at.one, first.comes), readers.words(at.other, first.asked)
    order = " with its dims in another order" if comes == asked else ""
    begin = {"qkv": "the fused qkv is not cut by groups of heads: ", "gate and up": "gate and up are exchanged: "}
    if kind == "experts":
        begin["experts"] = f"{_experts_in_words(found, readers.model)}: "
    rank = "" if target is None else _getter(at, target)
    more = and_more(len({wrong.at.tensor for wrong in found}) - 1, "tensor")
    mends = {
        "experts": "read each expert by its own number, counted over all ranks",
        "qkv": "for each group of heads there are its queries, then its key, then its value: cut between groups",
        "gate and up": "exchange the two: the gate is what goes through SiLU",
        "zeros": "only padding and what is added are zeros",
        "other": "take each tensor for what it is called",
    }
    message = f"{begin.get(kind, '')}`{where}` would be `{comes}`, and is `{asked}`{order}{rank}{more}"
    return Finding(OTHER_INDICES.code, Severity.ERROR, message, help=mends[kind])


def _experts_in_words(found: list[_Wrong], model: ModelSpec) -> str:
    """How the experts stand in the first tensor, or family of tensors, that has them otherwise."""
    family = _family(found[0].at)
    comes_for = dict(
        pair for wrong in found if _family(wrong.at) == family and (pair := _experts_of(wrong)) is not None
    )
    number = max(*comes_for, *comes_for.values()) + 1 if model.moe is None else model.moe.num_experts
    order = [comes_for.get(expert, expert) for expert in range(number)]
    as_strings = sorted(range(number), key=str)
    if order == as_strings or sorted(range(number), key=order.__getitem__) == as_strings:
        return f"experts stand in the order of strings: {_listed(as_strings)}"
    twice = sorted(expert for expert in set(order) if order.count(expert) > 1)
    if twice:
        missing = sorted(set(range(number)) - set(order))
        return f"experts {_listed(missing)} (of {number}) are missing, and {_listed(twice)} are there more than once"
    expert = next(iter(comes_for))
    return f"expert {comes_for[expert]} stands for expert {expert} (of {number})"


def _family(at: Difference) -> tuple[str, ...]:
    """A tensor and what it is made of, whatever the number of the expert."""
    names = (at.tensor, at.other.source or "")
    return tuple(_EXPERT.sub("experts.", name) for name in names)


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    return f"{shown}, .." if len(numbers) > _SHOWN else shown


def _getter(at: Difference, target: Side) -> str:
    """The first rank that gets some of it."""
    for part in target.parts.get(at.tensor, ()):
        if part.rank is not None and any(meet(box, at.box) is not None for _, box in part.shard.boxes()):
            return f", on {part.where}"
    return ""
