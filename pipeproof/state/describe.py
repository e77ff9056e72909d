"""What a checkpoint holds, for people and for programs: tensors by kind, how each is cut; layers alike stand as one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from pipeproof.state.checkpoint import Checkpoint, StoredPart
from pipeproof.state.digests import entry_bytes
from pipeproof.state.index import TensorEntry
from pipeproof.state.reshard.words import counted

_NUMBER = re.compile(r"(?<![^./])\d+(?![^./])")
"""A number between dots: of a layer, of an expert."""


@dataclass(frozen=True, slots=True)
class TensorRow:
    """A tensor, or ``num`` of them that are alike but for the numbers in their names.

    ``kept`` says what the optimizer keeps of it, and how that is cut where it is cut otherwise.
    """

    name: str
    num: int
    entry: TensorEntry
    cut: str
    kept: str


def tensor_rows(checkpoint: Checkpoint, *, fold: bool) -> list[TensorRow]:
    """All tensors in their order; folded, those of layers that are alike stand where the first of them does."""
    tensors, kept = checkpoint.tensors, dict[str, list[str]]()
    cuts = {name: cut_of(checkpoint.parts.get(name, ())) for name in tensors}
    for name, entry in tensors.items():
        if entry.weight is not None and entry.weight in tensors:
            kept.setdefault(entry.weight, []).append(name)
    rows: dict[tuple[object, ...], list[str]] = {}
    for name, entry in tensors.items():
        if entry.weight not in tensors:
            of_it = _kept(name, kept.get(name, ()), cuts)
            pattern = _NUMBER.sub("*", name) if fold else name
            rows.setdefault((pattern, entry.kind, entry.dtype, entry.shape, cuts[name], of_it), []).append(name)
    return [
        TensorRow(common_name(names), len(names), tensors[names[0]], cuts[names[0]], str(alike[-1]))
        for alike, names in rows.items()
    ]


def _kept(weight: str, names: Sequence[str], cuts: Mapping[str, str]) -> str:
    said = []
    for name in names:
        slot = name.replace(weight, "").removeprefix("optimizer/").strip("./")
        other = cuts[name] if cuts[name] != cuts[weight] else ""
        said.append(f"{slot} ({other})" if other else slot)
    return ", ".join(said)


def cut_of(parts: Sequence[StoredPart]) -> str:
    """In how many parts a tensor lies along which dims; ``flat``: ranges of the flattened box."""
    if len(parts) < 2:
        return ""
    dims = range(len(parts[0].shard.offsets))
    along = {dim: len({part.shard.offsets[dim] for part in parts}) for dim in dims}
    said = [f"dim {dim} in {num}" for dim, num in along.items() if num > 1]
    flat = len(parts) / prod(along.values())
    if flat > 1:
        said.append(f"flat in {flat:g}")
    return ", ".join(said)


def kinds_of(checkpoint: Checkpoint) -> list[tuple[str, str, int, int, int]]:
    """By kind and type: how many tensors, elements and bytes."""
    entries = checkpoint.tensors.values()
    kinds = Counter((entry.kind, entry.dtype) for entry in entries)
    return [
        (
            *kind, num, sum(prod(entry.shape) for entry in entries if (entry.kind, entry.dtype) == kind),
            sum(entry_bytes(entry) for entry in entries if (entry.kind, entry.dtype) == kind),
        )
        for kind, num in kinds.items()
    ]  # fmt: skip


def what_it_is(checkpoint: Checkpoint) -> list[str]:
    """Lines that say what was opened, when it was saved and by whom."""
    words = {"state": "a state", "merged": "whole tensors", "flex": "a checkpoint of Paddle's (flex)"}
    index, num_files = checkpoint.index, len(checkpoint.files)
    tensors, files = counted(len(checkpoint.tensors), "tensor"), counted(num_files, "file")
    lines = [f"{checkpoint.place}: {words[checkpoint.kind]}, {tensors} in {files}"]
    if index is not None:
        versions = ", ".join(f"{name} {version}" for name, version in index.versions.items())
        mesh = " x ".join(f"{axis} {size}" for axis, size in index.mesh.items() if size > 1)
        after = f"after {counted(index.steps_done, 'step')}" if index.steps_done else "before the first step"
        lines += [
            f"{after}, saved with {index.framework} ({versions})",
            f"plan {index.digest[:12]}, {mesh or 'one rank'}",
        ]
    return lines


def checkpoint_to_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """For programs; no content of tensors is read."""
    index = checkpoint.index
    return {
        "place": str(checkpoint.place),
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
                "parts": len(checkpoint.parts.get(name, ())),
                "cut": cut_of(checkpoint.parts.get(name, ())),
            }
            for name, entry in checkpoint.tensors.items()
        },
    }


def common_name(names: Sequence[str]) -> str:
    """One name for all: a range where their numbers are the same or consecutive, ``*`` elsewhere."""
    numbers = [tuple(map(int, _NUMBER.findall(name))) for name in names]
    columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
    is_product = len(names) == prod(map(len, columns))
    ranges = iter(columns)

    def said(match: re.Match[str]) -> str:
        column = next(ranges)
        if len(column) == 1:
            return match.group()
        consecutive = is_product and column == list(range(column[0], column[-1] + 1))
        return f"{{{column[0]}..{column[-1]}}}" if consecutive else "*"

    return _NUMBER.sub(said, names[0])
