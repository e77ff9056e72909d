"""Content of a checkpoint as text and JSON: tensors by kind and sharding; similar layers are folded into one row."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from pipeproof.state.checkpoint import Checkpoint, HeldShard, entry_bytes
from pipeproof.state.region_text import counted
from pipeproof.state.state_index import TensorEntry

_NUMBER = re.compile(r"(?<![^./])\d+(?![^./])")
"""A number between dots: of a layer, of an expert."""


@dataclass(frozen=True, slots=True)
class TensorRow:
    """A tensor, or ``num`` tensors that differ only by the numbers in their names.

    ``states`` are its optimizer states, with their sharding where it differs.
    """

    name: str
    num: int
    entry: TensorEntry
    cut: str
    states: str


def tensor_rows(checkpoint: Checkpoint, *, fold: bool) -> list[TensorRow]:
    """Return all tensors in order; with ``fold``, similar layers are in the row of the first one."""
    tensors, states = checkpoint.tensors, dict[str, list[str]]()
    cuts = {name: sharding_text(checkpoint.shards.get(name, ())) for name in tensors}
    for name, entry in tensors.items():
        if entry.weight is not None and entry.weight in tensors:
            states.setdefault(entry.weight, []).append(name)
    rows: dict[tuple[object, ...], list[str]] = {}
    for name, entry in tensors.items():
        if entry.weight not in tensors:
            states_text = _states_text(name, states.get(name, ()), cuts)
            pattern = _NUMBER.sub("*", name) if fold else name
            rows.setdefault((pattern, entry.kind, entry.dtype, entry.shape, cuts[name], states_text), []).append(name)
    return [
        TensorRow(common_name(names), len(names), tensors[names[0]], cuts[names[0]], str(alike[-1]))
        for alike, names in rows.items()
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
    kinds["dcp"] = "a checkpoint of PyTorch's (DCP)"
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
    index = checkpoint.index
    return {
        "place": str(checkpoint.path),
        "kind": checkpoint.kind,
        "steps_done": None if index is None else index.steps_done,
        "framework": None if index is None else index.framework,
        "digest": None if index is None else index.digest,
        "mesh": None if index is None else index.mesh,
        "versions": None if index is None else index.versions,
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
