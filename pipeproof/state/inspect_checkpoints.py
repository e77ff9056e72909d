"""Content of a checkpoint, and comparison of two of any topology, as text and JSON.

Content is by kind and sharding; similar layers are folded into one row. A comparison has, tensor by tensor, the first
differing elements and the largest difference.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isinf, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeproof.diagnostics.problems import grouped
from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.state.byte_ranges import CAST_DTYPES, bits_dtype, cast
from pipeproof.state.checkpoint import Checkpoint, HeldShard, entry_bytes, over_tensors, tensor_blocks
from pipeproof.state.region_text import counted
from pipeproof.state.state_index import TensorEntry

_Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that both checkpoints have, and that differs.

    If type, shape or kind differ (``first_entry``, ``second_entry``), values are not compared. Else ``num`` elements
    have different bits; ``first`` is the first in C order. ``farthest`` is the largest absolute difference among
    numbers; None if there are none, or if the type is not compared as numbers.
    """

    name: str
    first_entry: TensorEntry
    second_entry: TensorEntry
    num: int = 0
    first: tuple[int, ...] = ()
    farthest: float | None = None


@dataclass(frozen=True, slots=True)
class StateComparison:
    """``only_first`` and ``only_second`` are names that the other checkpoint lacks.

    ``steps`` is set if both have a step count.
    """

    num_alike: int
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    differ: tuple[TensorDifference, ...]
    steps: tuple[int, int] | None = None

    @property
    def equal(self) -> bool:
        """True for the same tensors with the same bits, after the same number of steps."""
        same_steps = self.steps is None or self.steps[0] == self.steps[1]
        return same_steps and not (self.only_first or self.only_second or self.differ)


def compare_checkpoints(first: Checkpoint, second: Checkpoint) -> StateComparison:
    """Compare all tensors bit by bit.

    Raises:
        StateError: A file cannot be read, or the shards of a tensor do not make it up.
    """
    entries = {name: entry for name, entry in first.tensors.items() if name in second.tensors}
    differences = over_tensors(lambda name: _difference(name, first, second), entries)
    differ = tuple(difference for difference in differences.values() if difference is not None)
    steps = None if first.index is None or second.index is None else (first.index.steps_done, second.index.steps_done)
    only_first, only_second = (tuple(sorted(each.tensors.keys() - entries)) for each in (first, second))
    return StateComparison(len(entries) - len(differ), only_first, only_second, differ, steps)


def comparison_to_json(comparison: StateComparison) -> dict[str, Any]:
    """Return the comparison as JSON data."""
    return {
        "equal": comparison.equal,
        "alike": comparison.num_alike,
        "only_in_first": list(comparison.only_first),
        "only_in_second": list(comparison.only_second),
        "differ": [_difference_to_json(difference) for difference in comparison.differ],
        "steps_done": None if comparison.steps is None else list(comparison.steps),
    }


def difference_text(difference: TensorDifference) -> str:
    """Return one line of text."""
    first_entry, second_entry = difference.first_entry, difference.second_entry
    if not difference.num:
        texts = [f"{entry.kind} {entry.dtype} {list(entry.shape)}" for entry in (first_entry, second_entry)]
        return f"{texts[0]} and {texts[1]}"
    farthest, distance_text = difference.farthest, ""
    if farthest is not None:
        distance_text = f", by {farthest:.6g} at most" if farthest else ", in the bits of zeros or NaN alone"
    count_text = f"{difference.num} of {prod(first_entry.shape)} elements"
    return f"{count_text}, first {list(difference.first)}{distance_text}"


def _difference(name: str, first_checkpoint: Checkpoint, second_checkpoint: Checkpoint) -> TensorDifference | None:
    entries = first_checkpoint.tensors[name], second_checkpoint.tensors[name]
    types = {(entry.dtype, entry.shape) for entry in entries}
    if len(types) > 1 or _kinds_differ(first_checkpoint, second_checkpoint, name):
        return TensorDifference(name, *entries)
    entry, item = entries[0], dtype_bytes(entries[0].dtype)
    begin, num, first, farthest = 0, 0, 0, None
    for left, right in zip(tensor_blocks(first_checkpoint, name), tensor_blocks(second_checkpoint, name), strict=True):
        if not np.array_equal(left, right):
            differing = (left.reshape(-1, item) != right.reshape(-1, item)).any(axis=1)
            indices = np.flatnonzero(differing)
            first = first if num else begin + int(indices[0])
            num += len(indices)
            farthest = _max_distance(farthest, entry.dtype, left, right, indices)
        begin += len(left) // item
    if not num:
        return None
    return TensorDifference(name, *entries, num, tuple(map(int, np.unravel_index(first, entry.shape))), farthest)


def _kinds_differ(first: Checkpoint, second: Checkpoint, name: str) -> bool:
    """Compare kinds, only if both have an index: in a file of another tool every tensor is a weight."""
    return (
        first.index is not None and second.index is not None and first.tensors[name].kind != second.tensors[name].kind
    )


def _max_distance(
    farthest: float | None, dtype: str, left: _Bytes, right: _Bytes, indices: npt.NDArray[np.int64]
) -> float | None:
    if dtype not in (*CAST_DTYPES, "int32", "int64"):
        return farthest
    left_values, right_values = (_numbers(content, dtype, indices) for content in (left, right))
    with np.errstate(invalid="ignore", over="ignore"):
        distances = np.abs(left_values - right_values)
    distances = distances[~np.isnan(distances)]
    return farthest if not len(distances) else max(float(distances.max()), farthest or 0.0)


def _numbers(content: _Bytes, dtype: str, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    if dtype in CAST_DTYPES:
        return cast(content.view(bits_dtype(dtype))[indices], dtype, "float64").view(np.float64)
    return content.view(dtype)[indices].astype(np.float64)


def _difference_to_json(difference: TensorDifference) -> Mapping[str, Any]:
    if not difference.num:
        entries = [
            {"kind": e.kind, "dtype": e.dtype, "shape": list(e.shape)}
            for e in (difference.first_entry, difference.second_entry)
        ]
        return {"tensor": difference.name, "first": entries[0], "second": entries[1]}
    farthest = difference.farthest
    return {
        "tensor": difference.name,
        "elements": difference.num,
        "from": list(difference.first),
        "farthest": None if farthest is None or isinf(farthest) else farthest,  # JSON has no infinity
    }


_NUMBER = re.compile(r"(?<![^./])\d+(?![^./])")
"""A number between dots: of a layer, of an expert."""


@dataclass(frozen=True, slots=True)
class TensorRow:
    """A tensor, or ``num`` tensors that differ only by the numbers in their names.

    ``states`` are its optimizer states, with their sharding if it differs.
    """

    name: str
    num: int
    entry: TensorEntry
    cut: str
    states: str


def tensor_rows(checkpoint: Checkpoint, *, fold: bool) -> list[TensorRow]:
    """Return all tensors in order; with ``fold``, similar layers are in the row of the first one."""
    tensors = checkpoint.tensors
    cuts = {name: sharding_text(checkpoint.shards.get(name, ())) for name in tensors}
    states = grouped((entry.weight, name) for name, entry in tensors.items())
    rows: dict[tuple[object, ...], list[str]] = {}
    for name, entry in tensors.items():
        if entry.weight not in tensors:
            states_text = _states_text(name, states.get(name, ()), cuts)
            pattern = _NUMBER.sub("*", name) if fold else name
            rows.setdefault((pattern, entry.kind, entry.dtype, entry.shape, cuts[name], states_text), []).append(name)
    return [
        TensorRow(common_name(names), len(names), tensors[names[0]], cuts[names[0]], str(key[-1]))
        for key, names in rows.items()
    ]


def _states_text(weight: str, names: Sequence[str], cuts: Mapping[str, str]) -> str:
    parts = []
    for name in names:
        slot = name.replace(weight, "").removeprefix("optimizer/").rpartition("..")[2].strip("./")
        sharding = cuts[name] if cuts[name] != cuts[weight] else ""
        parts.append(f"{slot} ({sharding})" if sharding else slot)
    return ", ".join(parts)


def sharding_text(shards: Sequence[HeldShard]) -> str:
    """Return the number of shards along each dim; ``flat``: ranges of the flattened region."""
    if len(shards) < 2:
        return ""
    dims = range(len(shards[0].shard.offsets))
    along = {dim: len({part.shard.offsets[dim] for part in shards}) for dim in dims}
    parts = [f"dim {dim} in {num}" for dim, num in along.items() if num > 1]
    flat = len(shards) / prod(along.values())
    if flat > 1:
        parts.append(f"flat in {flat:g}")
    return ", ".join(parts)


def totals_by_kind(checkpoint: Checkpoint) -> list[tuple[str, str, int, int, int]]:
    """Return by kind and type the numbers of tensors, elements and bytes."""
    entries = checkpoint.tensors.values()
    kinds = Counter((entry.kind, entry.dtype) for entry in entries)
    return [
        (
            *kind, num, sum(prod(entry.shape) for entry in entries if (entry.kind, entry.dtype) == kind),
            sum(entry_bytes(entry) for entry in entries if (entry.kind, entry.dtype) == kind),
        )
        for kind, num in kinds.items()
    ]  # fmt: skip


def summary_lines(checkpoint: Checkpoint) -> list[str]:
    """Return lines on the checkpoint: kind, step, framework, versions and plan."""
    kinds = {"state": "a state", "merged": "whole tensors", "flex": "a checkpoint of Paddle's (flex)"}
    kinds |= {"dcp": "a checkpoint of PyTorch's (DCP)", "unified": "a Unified Checkpoint of PaddleNLP's"}
    index, num_files = checkpoint.index, len(checkpoint.files)
    tensors, files = counted(len(checkpoint.tensors), "tensor"), counted(num_files, "file")
    lines = [f"{checkpoint.path}: {kinds[checkpoint.kind]}, {tensors} in {files}"]
    if index is not None:
        versions = ", ".join(f"{name} {version}" for name, version in index.versions.items())
        mesh = " x ".join(f"{axis} {size}" for axis, size in index.mesh.items() if size > 1)
        after = f"after {counted(index.steps_done, 'step')}" if index.steps_done else "before the first step"
        lines += [
            f"{after}, saved with {index.framework} ({versions})",
            f"plan {index.digest[:12]}, {mesh or 'one rank'}",
        ]
    if checkpoint.others:
        more = f" and {len(checkpoint.others) - 1:,} more" if len(checkpoint.others) > 1 else ""
        lines.append(f"not listed: {checkpoint.others[0]}{more}, which are not tensors of model or optimizer")
    return lines


def checkpoint_to_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the checkpoint as JSON data; no tensor content is read."""
    of_index = ("steps_done", "framework", "digest", "mesh", "versions")
    return {
        "place": str(checkpoint.path),
        "kind": checkpoint.kind,
        **{key: getattr(checkpoint.index, key, None) for key in of_index},
        "files": [str(file) for file in checkpoint.files],
        "bytes": sum(map(entry_bytes, checkpoint.tensors.values())),
        "tensors": {
            name: {
                "kind": entry.kind,
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "parts": len(checkpoint.shards.get(name, ())),
                "cut": sharding_text(checkpoint.shards.get(name, ())),
            }
            for name, entry in checkpoint.tensors.items()
        },
    }


def common_name(names: Sequence[str]) -> str:
    """Return one name for all: a range for numbers that are the same or consecutive, ``*`` for others."""
    numbers = [tuple(map(int, _NUMBER.findall(name))) for name in names]
    columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
    is_product = len(names) == prod(map(len, columns))
    ranges = iter(columns)

    def parts(match: re.Match[str]) -> str:
        column = next(ranges)
        if len(column) == 1:
            return match.group()
        consecutive = is_product and column == list(range(column[0], column[-1] + 1))
        return f"{{{column[0]}..{column[-1]}}}" if consecutive else "*"

    return _NUMBER.sub(parts, names[0])
