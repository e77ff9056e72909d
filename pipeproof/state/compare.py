"""Two checkpoints of whatever topologies, tensor by tensor: which differ, from which element on, and how far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isinf, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.state.checkpoint import Checkpoint
from pipeproof.state.digests import over_tensors
from pipeproof.state.index import TensorEntry
from pipeproof.state.reshard.cast import CAST_DTYPES, bits_dtype, cast
from pipeproof.state.stream import tensor_blocks

_Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that both have, and not alike.

    Where type, shape or kind differ (``one``, ``other``) values are not looked
    at. Else ``num`` elements have other bits; ``first`` to ``last`` are the
    first of them that stand side by side in C order. ``farthest`` is the
    largest absolute difference of those that are numbers on both sides, None
    where there are none, or the type is none that we calculate with.
    """

    name: str
    one: TensorEntry
    other: TensorEntry
    num: int = 0
    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    farthest: float | None = None


@dataclass(frozen=True, slots=True)
class StateComparison:
    """``only_one`` and ``only_other`` are names that the other does not have; ``steps`` where both say how many."""

    num_alike: int
    only_one: tuple[str, ...]
    only_other: tuple[str, ...]
    differ: tuple[Difference, ...]
    steps: tuple[int, int] | None = None

    @property
    def equal(self) -> bool:
        """The same tensors with the same bits, after as many steps."""
        same_steps = self.steps is None or self.steps[0] == self.steps[1]
        return same_steps and not (self.only_one or self.only_other or self.differ)


def compare_checkpoints(one: Checkpoint, other: Checkpoint) -> StateComparison:
    """Hold all tensors against each other, bit by bit.

    Raises:
        StateError: a file cannot be read, or the parts of a tensor do not make it up.
    """
    both = {name: entry for name, entry in one.tensors.items() if name in other.tensors}
    found = over_tensors(lambda name: _difference(name, one, other), both)
    differ = tuple(difference for difference in found.values() if difference is not None)
    steps = None if one.index is None or other.index is None else (one.index.steps_done, other.index.steps_done)
    only_one, only_other = (tuple(sorted(names)) for names in (one.tensors.keys() - both, other.tensors.keys() - both))
    return StateComparison(len(both) - len(differ), only_one, only_other, differ, steps)


def comparison_to_json(comparison: StateComparison) -> dict[str, Any]:
    """For programs."""
    return {
        "equal": comparison.equal,
        "alike": comparison.num_alike,
        "only_in_first": list(comparison.only_one),
        "only_in_second": list(comparison.only_other),
        "differ": [_difference_to_json(one) for one in comparison.differ],
        "steps_done": None if comparison.steps is None else list(comparison.steps),
    }


def what_differs(difference: Difference) -> str:
    """A line for people."""
    one, other = difference.one, difference.other
    if not difference.num:
        said = [f"{entry.kind} {entry.dtype} {list(entry.shape)}" for entry in (one, other)]
        return f"{said[0]} and {said[1]}"
    until = "" if difference.first == difference.last else f" to {list(difference.last)}"
    far = difference.farthest
    how_far = "" if far is None else f", by {far:.6g} at most" if far else ", in the bits of zeros or NaN alone"
    what = f"{difference.num} of {prod(one.shape)} elements"
    return f"{what}, first {list(difference.first)}{until}{how_far}"


def _difference(name: str, one: Checkpoint, other: Checkpoint) -> Difference | None:
    entries = one.tensors[name], other.tensors[name]
    if entries[0].dtype != entries[1].dtype or entries[0].shape != entries[1].shape or _kinds_differ(one, other, name):
        return Difference(name, *entries)
    entry, item = entries[0], dtype_bytes(entries[0].dtype)
    begin, num, first, last, farthest = 0, 0, -1, -1, None
    for left, right in zip(tensor_blocks(one, name), tensor_blocks(other, name), strict=True):
        if not np.array_equal(left, right):
            unlike = (left.reshape(-1, item) != right.reshape(-1, item)).any(axis=1)
            places = np.flatnonzero(unlike)
            num += len(places)
            first, last = _first_run(places + begin, first, last)
            farthest = _farther(farthest, entry.dtype, left, right, places)
        begin += len(left) // item
    if not num:
        return None
    ends = [tuple(map(int, np.unravel_index(place, entry.shape))) for place in (first, last)]
    return Difference(name, *entries, num, ends[0], ends[1], farthest)


def _kinds_differ(one: Checkpoint, other: Checkpoint, name: str) -> bool:
    """Only where somebody says what the tensors are: in a file of other people everything is a weight."""
    return one.index is not None and other.index is not None and one.tensors[name].kind != other.tensors[name].kind


def _first_run(places: npt.NDArray[np.int64], first: int, last: int) -> tuple[int, int]:
    """The first run of neighbours among all places; ``first`` to ``last`` (-1: none) is that of earlier blocks."""
    if first < 0:
        first, last = int(places[0]), int(places[0]) - 1
    if places[0] != last + 1:
        return first, last
    side_by_side = np.flatnonzero(np.diff(places) != 1)
    return first, int(places[side_by_side[0]] if len(side_by_side) else places[-1])


def _farther(
    farthest: float | None, dtype: str, left: _Bytes, right: _Bytes, places: npt.NDArray[np.int64]
) -> float | None:
    if dtype not in (*CAST_DTYPES, "int32", "int64"):
        return farthest
    one, other = (_numbers(side, dtype, places) for side in (left, right))
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(one - other)
    apart = apart[~np.isnan(apart)]
    return farthest if not len(apart) else max(float(apart.max()), farthest or 0.0)


def _numbers(content: _Bytes, dtype: str, places: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    if dtype in CAST_DTYPES:
        return cast(content.view(bits_dtype(dtype))[places], dtype, "float64").view(np.float64)
    return content.view(dtype)[places].astype(np.float64)


def _difference_to_json(one: Difference) -> Mapping[str, Any]:
    if not one.num:
        entries = [{"kind": e.kind, "dtype": e.dtype, "shape": list(e.shape)} for e in (one.one, one.other)]
        return {"tensor": one.name, "first": entries[0], "second": entries[1]}
    return {
        "tensor": one.name,
        "elements": one.num,
        "from": list(one.first),
        "to": list(one.last),
        "farthest": None if one.farthest is None or isinf(one.farthest) else one.farthest,  # JSON has no infinity
    }
