"""Maps from the tensors of one checkpoint to another checkpoint's, region by region.

Region copies describe names, splits, merges, transposes, casts, added and removed tensors. This module composes,
inverts and compares maps, without files, ranks or frameworks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from pipeproof.diagnostics.problems import grouped
from pipeproof.state.regions import NO_DIM, Region, intersect, subtract, tiling_fault, whole_region


class TensorLike(Protocol):
    """Type and shape of a whole tensor."""

    @property
    def dtype(self) -> str:
        """Element type."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""


@dataclass(frozen=True, slots=True)
class RegionCopy:
    """The elements ``region`` of a target tensor are ``source_region`` of the source tensor ``source``.

    With ``permutation``, dim i of the target is dim ``permutation[i]`` of the source; ``source_region`` is in the dims
    of the source. One expert of many is a matrix of a tensor of three dims: a dim that only the target has is
    ``NO_DIM``, and dims that only one side has are one element long in the regions. Without a ``source`` the elements
    are zeros: added, or padding. ``casts`` are the types that elements go through, in order; empty if the type stays.
    """

    region: Region
    source: str | None
    source_region: Region
    permutation: tuple[int, ...] | None = None
    casts: tuple[str, ...] = ()

    def restricted_to(self, region: Region) -> RegionCopy:
        """Return the copy for a region inside this one's region."""
        inside = region.relative_to(self.region)
        if self.permutation is not None:
            inside = inside.permuted(inverse_permutation(self.permutation, len(self.source_region.offsets)))
        return replace(self, region=region, source_region=inside.shifted(self.source_region.offsets))


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A target tensor: its type and shape, and region copies that tile it."""

    dtype: str
    shape: tuple[int, ...]
    copies: tuple[RegionCopy, ...]


@dataclass(frozen=True, slots=True)
class StateMap:
    """All tensors of a target by name, and the intended deviations from a bijection.

    ``removed`` are source tensors that are left out, ``dropped`` regions of others (padding), ``duplicated`` source
    tensors that the target has several times, such as an embedding that is also saved as the head.
    """

    tensors: Mapping[str, TensorMap]
    removed: frozenset[str] = frozenset()
    dropped: Mapping[str, tuple[Region, ...]] = field(default_factory=dict)
    duplicated: frozenset[str] = frozenset()

    def readers(self) -> dict[str, list[Reader]]:
        """Return by source tensor the copies that read it."""
        return grouped(
            (copy.source, Reader(name, copy))
            for name, tensor in self.tensors.items()
            for copy in tensor.copies
            if copy.source is not None
        )


class Reader(NamedTuple):
    """A region copy, and the target tensor that it is part of."""

    tensor: str
    copy: RegionCopy

    @property
    def region(self) -> Region:
        """The region of the source tensor that it reads."""
        return self.copy.source_region


def inverse_permutation(permutation: tuple[int, ...], num_dims: int | None = None) -> tuple[int, ...]:
    """Return the inverse permutation; ``num_dims`` is the source's number of dims, if it differs from the target's."""
    by_dim = {dim: i for i, dim in enumerate(permutation)}
    return tuple(by_dim.get(dim, NO_DIM) for dim in range(len(permutation) if num_dims is None else num_dims))


def identity_tensor(name: str, dtype: str, shape: tuple[int, ...]) -> TensorMap:
    """Return the map of a tensor that is the source's of that name, unchanged."""
    return TensorMap(dtype, shape, (RegionCopy(whole_region(shape), name, whole_region(shape)),))


def identity_map(tensors: Mapping[str, TensorLike]) -> StateMap:
    """Return the map that keeps every tensor under its own name."""
    return StateMap({name: identity_tensor(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()})


def copies_into(tensor: TensorMap, region: Region) -> list[RegionCopy]:
    """Return the region copies that make a region of a tensor."""
    common = [(copy, intersect(copy.region, region)) for copy in tensor.copies]
    return [copy.restricted_to(inside) for copy, inside in common if inside is not None]


def compose(first: StateMap, second: StateMap) -> StateMap:
    """Return the map from the first map's source to the second's target.

    Raises:
        KeyError: The second map reads a tensor that the first does not make.
    """
    tensors = {
        name: replace(tensor, copies=tuple(through for copy in tensor.copies for through in _composed(copy, first)))
        for name, tensor in second.tensors.items()
    }
    omitted = [(name, whole_region(first.tensors[name].shape)) for name in second.removed & first.tensors.keys()]
    omitted += [(name, region) for name, regions in second.dropped.items() for region in regions]
    dropped = {name: list(regions) for name, regions in first.dropped.items()}
    for name, region in omitted:
        for copy in copies_into(first.tensors[name], region):
            if copy.source is not None:
                dropped.setdefault(copy.source, []).append(copy.source_region)
    read = {copy.source for tensor in tensors.values() for copy in tensor.copies}
    duplicated = {copy.source for name in second.duplicated for copy in first.tensors[name].copies}
    return StateMap(
        tensors,
        first.removed | (dropped.keys() - read),
        {name: tuple(regions) for name, regions in dropped.items() if name in read},
        first.duplicated | frozenset(name for name in duplicated if name is not None),
    )


def _composed(copy: RegionCopy, first: StateMap) -> list[RegionCopy]:
    if copy.source is None:
        return [copy]
    result = []
    for inner in copies_into(first.tensors[copy.source], copy.source_region):
        region = inner.region.relative_to(copy.source_region)
        if copy.permutation is not None:
            region = region.permuted(copy.permutation)
        permutation = _composed_permutation(inner.permutation, copy.permutation, len(inner.source_region.offsets))
        casts = () if inner.source is None else inner.casts + copy.casts
        result.append(
            RegionCopy(region.shifted(copy.region.offsets), inner.source, inner.source_region, permutation, casts)
        )
    return result


def _composed_permutation(
    first: tuple[int, ...] | None, second: tuple[int, ...] | None, num_dims: int
) -> tuple[int, ...] | None:
    """Compose two permutations, for a source with ``num_dims``; None for the identity."""
    if first is None or second is None:
        return first or second
    both = [NO_DIM if i == NO_DIM else first[i] for i in second]
    unnamed = iter(sorted(set(range(num_dims)).difference(both)))  # of one element, like a dim that is missing
    both = [next(unnamed, NO_DIM) if i == NO_DIM else i for i in both]
    return None if both == list(range(num_dims)) else tuple(both)


def invert(state_map: StateMap, source: Mapping[str, TensorLike]) -> StateMap:
    """Return the inverse map: the tensors ``source`` made from the target's.

    An element that the target has several times is taken from the first of them. Removed tensors are not restored;
    dropped regions of others come back as zeros. A tensor comes back in its own type, by one cast.

    Raises:
        ValueError: An element that was neither removed nor dropped comes from nowhere.
    """
    copies_by_name: dict[str, list[RegionCopy]] = {name: [] for name in source if name not in state_map.removed}
    for name, readers_of_tensor in state_map.readers().items():
        for reader in readers_of_tensor if name in copies_by_name else ():
            dtype = source[name].dtype
            casts = () if dtype == state_map.tensors[reader.tensor].dtype else (dtype,)
            copies_by_name[name].append(
                RegionCopy(reader.region, reader.tensor, reader.copy.region, _inverse_of(reader.copy), casts)
            )
    tensors = dict[str, TensorMap]()
    for name, copies in copies_by_name.items():
        copies += [RegionCopy(region, None, region) for region in state_map.dropped.get(name, ())]
        shape = source[name].shape
        tensors[name] = TensorMap(source[name].dtype, shape, _without_overlap(name, shape, copies))
    inverse, dropped = StateMap(tensors), {}
    readers = inverse.readers()
    for name, of_tensor in readers.items():
        whole, regions = whole_region(state_map.tensors[name].shape), [reader.region for reader in of_tensor]
        if sum(region.numel for region in regions) < whole.numel:
            dropped[name] = tuple(subtract(whole, regions))
    return replace(inverse, removed=frozenset(state_map.tensors.keys() - readers), dropped=dropped)


def _inverse_of(copy: RegionCopy) -> tuple[int, ...] | None:
    return None if copy.permutation is None else inverse_permutation(copy.permutation, len(copy.source_region.offsets))


def _without_overlap(name: str, shape: tuple[int, ...], copies: list[RegionCopy]) -> tuple[RegionCopy, ...]:
    """Return the copies without regions that earlier ones cover; the result tiles the tensor."""
    first = {copy.region: copy for copy in reversed(copies)}  # copies are mostly of whole regions
    unique = list(reversed(first.values()))
    if tiling_fault(shape, list(first)) is not None:
        kept = list[RegionCopy]()
        for copy in unique:
            kept += [copy.restricted_to(region) for region in subtract(copy.region, [other.region for other in kept])]
        unique = kept
        fault = tiling_fault(shape, [copy.region for copy in unique])
        if fault is not None:
            raise ValueError(f"{name}: {fault.region} has no source")
    return tuple(unique)


class MapDifference(NamedTuple):
    """The elements ``region`` of a target tensor come from ``first`` by one map, and from ``second`` by another."""

    tensor: str
    region: Region
    first: RegionCopy
    second: RegionCopy


def map_differences(first: StateMap, second: StateMap) -> Iterator[MapDifference]:
    """Yield where two maps fill a tensor of the same name and shape from different elements, in the order of the first.

    Types are not compared, nor tensors that only one map makes.
    """
    for name, tensor in first.tensors.items():
        second_tensor = second.tensors.get(name)
        if second_tensor is None or second_tensor.shape != tensor.shape or second_tensor.copies == tensor.copies:
            continue
        by_region = {copy.region: copy for copy in second_tensor.copies}
        for copy in tensor.copies:
            same_region = by_region.get(copy.region)
            for right in copies_into(second_tensor, copy.region) if same_region is None else (same_region,):
                left = copy.restricted_to(right.region)
                if not _same_elements(left, right):
                    yield MapDifference(name, right.region, left, right)


def _same_elements(left: RegionCopy, right: RegionCopy) -> bool:
    """Return True if two copies into the same region read the same elements."""
    if left.source is None or right.source is None:
        return left.source == right.source
    dims = [dim for dim, length in enumerate(left.region.extents) if length > 1]
    orders = [copy.permutation or tuple(range(len(copy.region.extents))) for copy in (left, right)]
    same_offsets = (left.source, left.source_region.offsets) == (right.source, right.source_region.offsets)
    return same_offsets and all(orders[0][dim] == orders[1][dim] for dim in dims)
