"""Finding a saved state, opening its files by the index, and reading it whole or one rank's part.

A rank reads byte ranges, not files: memory holds the rank's part and one block.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.diagnostics.problems import grouped
from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.state.byte_ranges import Bits, ByteArray, RangeReader, bits_dtype, read_file
from pipeproof.state.checkpoint import FIX, Checkpoint, CheckpointReader, HeldShard
from pipeproof.state.regions import Region, intersect
from pipeproof.state.safetensors_header import Header, read_header, require_array
from pipeproof.state.state_codes import StateError
from pipeproof.state.state_index import INDEX_FILE, Shard, ShardFile, StateIndex, provenance_file, read_index
from pipeproof.state.state_layout import INITIAL_COUNTERS, RankShard, shards_of_rank
from pipeproof.state.write_state import step_directory

_FIX_MERGED = "copy both files again from where they were written; to change the file on purpose, remove its provenance"
_STEP_DIRECTORY = re.compile(r"step-\d{8,}")


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state on disk, with its index."""

    directory: Path
    index: StateIndex

    @property
    def steps_done(self) -> int:
        """The step to resume with, counted from 0."""
        return self.index.steps_done

    @property
    def files(self) -> dict[Path, ShardFile]:
        """The files of the state, with their entries in the index."""
        return {self.directory / file.name: file for file in self.index.files}


def find_state(path: Path) -> SavedState:
    """Return the state at ``path``, or the newest one below it.

    Raises:
        StateError: There is none, or its index cannot be read.
    """
    if not (path / INDEX_FILE).exists():
        states = _states_below(path)
        if not states:
            fix = "name the directory that `--save` named, or one of the states below it"
            of_other = {".metadata": ("PyTorch", " --names CONVENTION"), "*.metadata": ("Paddle", "")}
            tool, names = next((entry for name, entry in of_other.items() if any(path.glob(name))), ("", ""))
            if tool:
                fix = (
                    f"{tool}'s checkpoint does not record its training; a run can start from its weights: "
                    f"`pipeproof state reshard {path} --to PLAN{names} -o STATE`, then `--resume STATE`"
                )
            elif path.suffix == ".safetensors" or any(path.glob("model*.safetensors")):
                fix = (
                    "this is not a state yet; convert it with `pipeproof state reshard "
                    f"{path} --to PLAN -o STATE` (for other tools' names: `--names`), then `--resume STATE`"
                )
            raise StateError(f"there is no state at {path}, nor below it", fix)
        path = states[-1]
    return SavedState(path, read_index(path))


def require_free_steps(root: Path, first: int, last: int) -> None:
    """Refuse to save below ``root`` if it has a state that this run would reach.

    ``first`` and ``last`` are the numbers of steps done at the first and the last state that the run may save.

    Raises:
        StateError: There is one.
    """
    for existing in _states_below(root):
        if step_directory(root, first).name <= existing.name <= step_directory(root, last).name:
            raise StateError(
                f"{existing} holds a state already, and this run reaches that step",
                "name another directory, remove the state, or resume from it with `--resume`",
            )


def read_whole(state: SavedState) -> dict[str, ByteArray]:
    """Return all tensors of a state, whole, by name.

    This is a second, independent implementation for comparisons: file by file, from regions alone, without the plan and
    without the code that assigns shards to ranks.

    Raises:
        StateError: A file cannot be read.
    """
    tensors = state.index.tensors
    whole = {
        name: np.zeros((*entry.shape, dtype_bytes(entry.dtype)), dtype=np.uint8) for name, entry in tensors.items()
    }
    for file in state.index.files:
        content = read_file(state.directory / file.name)
        for shard in file.shards:
            part = whole[shard.tensor][Region(shard.offsets, shard.extents).slices]
            elements = np.array(part).reshape(-1, part.shape[-1])
            elements_range = slice(None) if shard.flat is None else slice(*shard.flat)
            elements[elements_range] = content[file.key_of(shard.tensor)].content.reshape(-1, part.shape[-1])
            part[...] = elements.reshape(part.shape)
    return {name: ByteArray(entry.dtype, entry.shape, whole[name].reshape(-1)) for name, entry in tensors.items()}


def _states_below(root: Path) -> list[Path]:
    """Return the states below a directory, from the oldest to the newest."""
    if not root.is_dir():
        return []
    return sorted(entry for entry in root.iterdir() if _STEP_DIRECTORY.fullmatch(entry.name) and entry.is_dir())


def checkpoint_of_index(
    path: Path,
    kind: str,
    index: StateIndex,
    files: Mapping[Path, ShardFile],
    wanted: Mapping[str, Iterable[Region]] | None = None,
) -> Checkpoint:
    """Open the files that an index describes; with ``wanted``, only those with elements of these regions of tensors.

    Raises:
        StateError: A file is missing, cut short, or differs from the index.
    """
    shards = dict[str, list[HeldShard]]()
    opened = {
        file: entry
        for file, entry in files.items()
        if wanted is None or any(_overlaps(shard, wanted.get(shard.tensor, ())) for shard in entry.shards)
    }
    for file, entry in opened.items():
        header = header_of_size(file, entry, is_merged=kind == "merged")
        for shard in entry.shards:
            tensor = index.tensors.get(shard.tensor)
            if tensor is None:
                raise StateError(f"{file} must hold {shard.tensor}, and the index has no tensor of that name", FIX)
            if len(shard.extents) != len(tensor.shape):
                message = f"the index of {path}: the shard of {shard.tensor} in {entry.name} has "
                raise StateError(f"{message}{len(shard.extents)} dims, and the tensor {len(tensor.shape)}", FIX)
            array = require_array(file, header, entry.key_of(shard.tensor), tensor.dtype, shard.shape, FIX)
            held = HeldShard(shard, entry.rank if kind == "state" else None, file, array.start)
            shards.setdefault(shard.tensor, []).append(held)
        if wanted is None:
            require_no_more(file, header, [entry.key_of(shard.tensor) for shard in entry.shards])
    by_tensor = {name: tuple(of_tensor) for name, of_tensor in shards.items()}
    return Checkpoint(path, kind, index.tensors, by_tensor, opened, index)


def _overlaps(shard: Shard, regions: Iterable[Region]) -> bool:
    held = Region(shard.offsets, shard.extents)
    return any(intersect(held, region) is not None for region in regions)


def header_of_size(path: Path, file: ShardFile, *, is_merged: bool) -> Header:
    """Return the header of a file that is as large as its entry in the index, or in its provenance.

    Raises:
        StateError: It cannot be read, or has another size.
    """
    header = read_header(path)
    if header.size_bytes != file.size_bytes:
        index, fix = (provenance_file(path).name, _FIX_MERGED) if is_merged else ("the index", FIX)
        raise StateError(f"{path} has {header.size_bytes} bytes, and {file.size_bytes} in {index}", fix)
    return header


def require_no_more(path: Path, header: Header, names: Sequence[str]) -> None:
    """Refuse arrays that no index lists, because they would be lost silently. Nor may an index list a key twice.

    Raises:
        StateError: There is one.
    """
    extra = sorted(header.arrays.keys() - set(names))
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise StateError(f"{path} holds {extra[0]}{more}, which the index does not list there", FIX)
    if len(names) > len(header.arrays):
        twice = next(name for name in names if names.count(name) > 1)
        raise StateError(f"the index has two shards of {twice} in {path}, which holds one", FIX)


def read_rank_state(state: SavedState, plan: LoweredPlan, rank: int) -> dict[tuple[str, str], ByteArray]:
    """Return a rank's part of the state, by weight and slot, after ``require_resumable`` has checked it.

    If the state only has weights, all other values are as before the first step. Buffers that it lacks are not in the
    result, and keep the values from the construction of the layers.

    Raises:
        StateError: A file has changed since.
    """
    own_shards, content = list(shards_of_rank(plan, rank)), {}
    wanted = grouped((own.shard.tensor, Region(own.shard.offsets, own.shard.extents)) for own in own_shards)
    checkpoint = checkpoint_of_index(state.directory, "state", state.index, state.files, wanted)
    reader = CheckpointReader(checkpoint)
    with RangeReader(FIX) as ranges:
        for own in own_shards:
            name = own.shard.tensor
            if name in checkpoint.tensors:
                values = np.empty(prod(own.shape), bits_dtype(own.tensor.dtype))
                for first, region in own.shard.regions():
                    reader.read(ranges, name, region, values[first : first + region.numel].reshape(region.extents))
            else:
                values = _initial_values(own)
            content[own.weight, own.slot] = ByteArray(own.tensor.dtype, own.shape, values.view(np.uint8))
    return content


def _initial_values(shard_of_rank: RankShard) -> Bits:
    """Return the values before the first step: zeros for moments and biases; counters are of types that numpy has."""
    if shard_of_rank.tensor.kind == "counter":
        return np.array([INITIAL_COUNTERS[shard_of_rank.slot]], dtype=shard_of_rank.tensor.dtype)
    return np.zeros(prod(shard_of_rank.shape), bits_dtype(shard_of_rank.tensor.dtype))
