"""Finding a saved state, holding it against the plan that is to go on from it, and reading a rank's part of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from pipeproof.comm.lowered import LoweredPlan
from pipeproof.state.codes import StateError
from pipeproof.state.files import ByteArray, read_file, require_whole
from pipeproof.state.index import INDEX_FILE, Shard, StateIndex, read_index
from pipeproof.state.layout import pieces_of
from pipeproof.state.save import step_directory, values_of

_STEP_DIRECTORY = re.compile(r"step-\d{8,}")
_SHOWN = 3
_HASHED_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state on disk, with its index."""

    directory: Path
    index: StateIndex

    @property
    def steps_done(self) -> int:
        """The step to go on with, counted from 0."""
        return self.index.steps_done


def find_state(path: Path) -> SavedState:
    """The state at ``path``, or the newest one below it.

    Raises:
        StateError: there is none, or its index cannot be read.
    """
    if not (path / INDEX_FILE).exists():
        found = _states_below(path)
        if not found:
            mend = "name the directory that `--save` named, or one of the states below it"
            raise StateError(f"there is no state at {path}, nor below it", mend)
        path = found[-1]
    return SavedState(path, read_index(path))


def require_room(root: Path, first: int, last: int) -> None:
    """Refuse to save below ``root`` where there is a state already that this run would come to.

    ``first`` and ``last`` count the steps behind the first and the last state that it may save.

    Raises:
        StateError: there is one.
    """
    for there in _states_below(root):
        if step_directory(root, first).name <= there.name <= step_directory(root, last).name:
            raise StateError(
                f"{there} holds a state already, and this run comes to that step",
                "name another directory, remove the state, or go on from it with `--resume`",
            )


def require_fits(state: SavedState, plan: LoweredPlan, digest: str) -> None:
    """Refuse a state that is not one of this plan, or not whole, before anything is loaded.

    Raises:
        StateError: it was saved by another framework or plan or with other values, it is behind the last step already,
            a file is missing, cut short or changed, or a tensor is not there as the plan asks for it.
    """
    index, run = state.index, plan.spec.run
    if index.framework != run.backend:
        raise StateError(
            f"{state.directory} was saved by {index.framework}, and the plan runs on {run.backend}: the bits of their "
            "optimizers' states differ",
            f"use `backend: {index.framework}`, or start anew",
        )
    _require_same_values(state, plan)
    if index.digest != digest:
        mesh = " ".join(f"{axis} {size}" for axis, size in index.mesh.items() if size > 1)
        raise StateError(
            f"{state.directory} was saved by another plan: digest {index.digest[:12]} ({mesh or 'one rank'}), and "
            f"this one has {digest[:12]}",
            "run the plan that it was saved with; states are not cut anew for other topologies or schedules",
        )
    if index.steps_done >= run.steps:
        raise StateError(
            f"{state.directory} is the state after step {index.steps_done - 1}, and the plan has {run.steps} steps",
            f"give run.steps more than {index.steps_done}",
        )
    _require_all_parts(state, plan)
    with ThreadPoolExecutor(_HASHED_AT_ONCE) as pool:  # hashing lets other threads run
        list(pool.map(lambda file: require_whole(state.directory, file, index.tensors), index.files))


def read_part(state: SavedState, plan: LoweredPlan, rank: int) -> dict[tuple[str, str], ByteArray]:
    """What a rank holds of the state, by weight and slot, as ``require_fits`` has looked at it.

    Raises:
        StateError: a file changed since.
    """
    places = _places(state.index)
    pieces = list(pieces_of(plan, rank))
    files = {name: read_file(state.directory / name) for name in {places[piece.shard] for piece in pieces}}
    return {(piece.weight, piece.slot): files[places[piece.shard]][piece.shard.tensor] for piece in pieces}


def _require_same_values(state: SavedState, plan: LoweredPlan) -> None:
    saved, wanted = state.index.values, values_of(plan.spec)
    differ = [key for key in sorted(saved.keys() | wanted) if _shown(saved, key) != _shown(wanted, key)]
    if differ:
        shown = ", ".join(f"{key} was {_shown(saved, key)} and is {_shown(wanted, key)}" for key in differ[:_SHOWN])
        more = f", and {len(differ) - _SHOWN} more keys" if len(differ) > _SHOWN else ""
        raise StateError(
            f"{state.directory} was saved by a run of another plan: {shown}{more}",
            "go on with the values that it was saved with, or start anew",
        )


def _shown(values: Mapping[str, JsonValue], key: str) -> str:
    return json.dumps(values[key]) if key in values else "not there"


def _require_all_parts(state: SavedState, plan: LoweredPlan) -> None:
    """Every part that a rank asks for stands in the index, as the plan describes its tensor."""
    places, tensors = _places(state.index), state.index.tensors
    for rank in range(plan.mesh.num_ranks):
        for piece in pieces_of(plan, rank):
            name, shard = piece.shard.tensor, piece.shard
            found = tensors.get(name)
            if found == piece.tensor and shard in places:
                continue
            if found is None:
                there = "it is not there"
            elif found != piece.tensor:
                there = f"it is there as {found.kind}, {found.dtype} {list(found.shape)}"
            else:
                there = "no file has that part"
            raise StateError(
                f"{state.directory / INDEX_FILE}: rank {rank} needs {list(shard.extents)} from {list(shard.offsets)} "
                f"on of {name}, {piece.tensor.kind}, {piece.tensor.dtype} {list(piece.tensor.shape)}; {there}",
                "the index was changed, or another release of pipeproof wrote it: name another state",
            )


def _places(index: StateIndex) -> dict[Shard, str]:
    """By part the file that holds it."""
    return {shard: file.name for file in index.files for shard in file.shards}


def _states_below(root: Path) -> list[Path]:
    """From the oldest to the newest."""
    if not root.is_dir():
        return []
    return sorted(one for one in root.iterdir() if _STEP_DIRECTORY.fullmatch(one.name) and one.is_dir())
