"""How the tensors of one checkpoint are made of those of another: which box of which tensor goes where.

Names, splits, merges, transposes, casts, added and removed tensors are all
said by slabs: a box of a target's tensor, and the box of a source's tensor that
it is made of. Maps are joined, turned round and held against each other here;
nothing knows of files, ranks or frameworks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from pipeproof.state.boxes import NO_DIM, Box, meet, minus, tiling_fault, whole_box


class Described(Protocol):
    """Whatever says of which type and shape a whole tensor is."""

    @property
    def dtype(self) -> str:
        """Type of its elements."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole tensor's."""
        ...


@dataclass(frozen=True, slots=True)
class Slab:
    """The elements ``box`` of a target's tensor are ``source_box`` of the source's tensor ``source``.

    With ``permutation``, dim i of the target is dim ``permutation[i]`` of the
    source; ``source_box`` is in the source's own dims. One expert of many is a
    matrix of a tensor of three dims: where the target has a dim that the source
    has not, there stands ``NO_DIM``, and both it and the dims of the source that
    are not named are one element long in the boxes. Without a ``source``
    the elements are zeros: they are added, or padding. ``casts`` are the types
    that elements go through, in their order; none where their type stays.
    """

    box: Box
    source: str | None
    source_box: Box
    permutation: tuple[int, ...] | None = None
    casts: tuple[str, ...] = ()

    def part(self, box: Box) -> Slab:
        """The slab of a box within this one's box."""
        inside = box.within(self.box)
        if self.permutation is not None:
            inside = inside.permuted(inverse_permutation(self.permutation, len(self.source_box.offsets)))
        return replace(self, box=box, source_box=inside.moved(self.source_box.offsets))


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A target's tensor: its type and shape, and slabs, which tile it."""

    dtype: str
    shape: tuple[int, ...]
    slabs: tuple[Slab, ...]


@dataclass(frozen=True, slots=True)
class StateMap:
    """All tensors of a target by name, and what is meant to be so although elements go elsewhere than to one place.

    ``removed`` are the source's tensors that are left out, ``dropped`` parts
    of others (padding), ``copied`` those of which a target has several copies,
    such as an embedding that is saved again as the head.
    """

    tensors: Mapping[str, TensorMap]
    removed: frozenset[str] = frozenset()
    dropped: Mapping[str, tuple[Box, ...]] = field(default_factory=dict)
    copied: frozenset[str] = frozenset()


def inverse_permutation(permutation: tuple[int, ...], num_dims: int | None = None) -> tuple[int, ...]:
    """The permutation that undoes it; ``num_dims`` of the source, where they are not as many as the target's."""
    place = {dim: i for i, dim in enumerate(permutation)}
    return tuple(place.get(dim, NO_DIM) for dim in range(len(permutation) if num_dims is None else num_dims))


def as_it_is(name: str, dtype: str, shape: tuple[int, ...]) -> TensorMap:
    """A tensor that is the source's of that name."""
    return TensorMap(dtype, shape, (Slab(whole_box(shape), name, whole_box(shape)),))


def identity_map(tensors: Mapping[str, Described]) -> StateMap:
    """Every tensor under its own name, as it is."""
    return StateMap({name: as_it_is(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()})


def slabs_of(tensor: TensorMap, box: Box) -> list[Slab]:
    """What a box of a tensor is made of."""
    found = []
    for slab in tensor.slabs:
        common = meet(slab.box, box)
        if common is not None:
            found.append(slab.part(common))
    return found


def joined(first: StateMap, second: StateMap) -> StateMap:
    """From the first map's source straight to the second's target.

    Raises:
        KeyError: the second map reads a tensor that the first does not make.
    """
    tensors = {
        name: replace(tensor, slabs=tuple(through for slab in tensor.slabs for through in _through(slab, first)))
        for name, tensor in second.tensors.items()
    }
    left_out = [(name, whole_box(first.tensors[name].shape)) for name in second.removed & first.tensors.keys()]
    left_out += [(name, box) for name, boxes in second.dropped.items() for box in boxes]
    dropped = {name: list(boxes) for name, boxes in first.dropped.items()}
    for name, box in left_out:
        for slab in slabs_of(first.tensors[name], box):
            if slab.source is not None:
                dropped.setdefault(slab.source, []).append(slab.source_box)
    read = {slab.source for tensor in tensors.values() for slab in tensor.slabs}
    copied = {slab.source for name in second.copied for slab in first.tensors[name].slabs}
    return StateMap(
        tensors,
        first.removed | (dropped.keys() - read),
        {name: tuple(boxes) for name, boxes in dropped.items() if name in read},
        first.copied | frozenset(name for name in copied if name is not None),
    )


def _through(slab: Slab, first: StateMap) -> list[Slab]:
    if slab.source is None:
        return [slab]
    found = []
    for inner in slabs_of(first.tensors[slab.source], slab.source_box):
        box = inner.box.within(slab.source_box)
        if slab.permutation is not None:
            box = box.permuted(slab.permutation)
        permutation = _both(inner.permutation, slab.permutation, len(inner.source_box.offsets))
        casts = () if inner.source is None else inner.casts + slab.casts
        found.append(Slab(box.moved(slab.box.offsets), inner.source, inner.source_box, permutation, casts))
    return found


def _both(first: tuple[int, ...] | None, second: tuple[int, ...] | None, num_dims: int) -> tuple[int, ...] | None:
    """One permutation after the other, of a source with ``num_dims``; None for that which changes nothing."""
    if first is None or second is None:
        return first or second
    both = [NO_DIM if i == NO_DIM else first[i] for i in second]
    unnamed = iter(sorted(set(range(num_dims)).difference(both)))  # of one element, as is what has no dim
    both = [next(unnamed, NO_DIM) if i == NO_DIM else i for i in both]
    return None if both == list(range(num_dims)) else tuple(both)


def turned_round(state_map: StateMap, source: Mapping[str, Described]) -> StateMap:
    """The map back: the tensors ``source`` of those that ``state_map`` makes of them.

    An element that several of the target's stand for is taken from the first
    of them. Removed tensors are not made again; what was dropped of others
    comes back as zeros. A tensor comes back with its own type, by one cast.

    Raises:
        ValueError: an element that was neither removed nor dropped comes from nowhere.
    """
    found: dict[str, list[Slab]] = {name: [] for name in source if name not in state_map.removed}
    for name, tensor in state_map.tensors.items():
        for slab in tensor.slabs:
            if slab.source is not None and slab.source in found:
                dtype = source[slab.source].dtype
                permutation = _undone(slab)
                casts = () if dtype == tensor.dtype else (dtype,)
                found[slab.source].append(Slab(slab.source_box, name, slab.box, permutation, casts))
    tensors, read = dict[str, TensorMap](), dict[str, list[Box]]()
    for name, slabs in found.items():
        slabs += [Slab(box, None, box) for box in state_map.dropped.get(name, ())]
        tensors[name] = TensorMap(source[name].dtype, source[name].shape, _each_once(name, source[name].shape, slabs))
        for slab in tensors[name].slabs:
            if slab.source is not None:
                read.setdefault(slab.source, []).append(slab.source_box)
    dropped = {}
    for name, boxes in read.items():
        whole = whole_box(state_map.tensors[name].shape)
        if sum(box.numel for box in boxes) < whole.numel:
            dropped[name] = tuple(minus(whole, boxes))
    return StateMap(tensors, frozenset(state_map.tensors.keys() - read), dropped)


def _undone(slab: Slab) -> tuple[int, ...] | None:
    return None if slab.permutation is None else inverse_permutation(slab.permutation, len(slab.source_box.offsets))


def _each_once(name: str, shape: tuple[int, ...], slabs: list[Slab]) -> tuple[Slab, ...]:
    """Slabs without what an earlier one has, which tile the tensor."""
    first = {slab.box: slab for slab in reversed(slabs)}  # copies are mostly of whole boxes
    found = list(reversed(first.values()))
    if tiling_fault(shape, list(first)) is not None:
        kept = list[Slab]()
        for slab in found:
            kept += [slab.part(box) for box in minus(slab.box, [other.box for other in kept])]
        found = kept
        fault = tiling_fault(shape, [slab.box for slab in found])
        if fault is not None:
            raise ValueError(f"{name}: {fault.box} is made of nothing")
    return tuple(found)


class Difference(NamedTuple):
    """The elements ``box`` of a target's tensor come from ``one`` by one map, and from ``other`` by another."""

    tensor: str
    box: Box
    one: Slab
    other: Slab


def differences(one: StateMap, other: StateMap) -> Iterator[Difference]:
    """Where two maps make a tensor of the same name and shape of other elements, in the order of the first.

    Types are not looked at, nor tensors that only one of them makes.
    """
    for name, tensor in one.tensors.items():
        second = other.tensors.get(name)
        if second is None or second.shape != tensor.shape or second.slabs == tensor.slabs:
            continue
        by_box = {slab.box: slab for slab in second.slabs}
        for slab in tensor.slabs:
            whole = by_box.get(slab.box)
            for rest in slabs_of(second, slab.box) if whole is None else (whole,):
                mine = slab.part(rest.box)
                if not _same_elements(mine, rest):
                    yield Difference(name, rest.box, mine, rest)


def _same_elements(one: Slab, other: Slab) -> bool:
    """Whether two slabs of the same box are made of the same elements."""
    if one.source is None or other.source is None:
        return one.source == other.source
    dims = [dim for dim, length in enumerate(one.box.extents) if length > 1]
    ways = [slab.permutation or tuple(range(len(slab.box.extents))) for slab in (one, other)]
    same_place = (one.source, one.source_box.offsets) == (other.source, other.source_box.offsets)
    return same_place and all(ways[0][dim] == ways[1][dim] for dim in dims)
