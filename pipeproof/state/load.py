"""Finding a saved state, and reading whole tensors of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.state.boxes import Box
from pipeproof.state.codes import StateError
from pipeproof.state.files import ByteArray, read_file
from pipeproof.state.index import INDEX_FILE, StateIndex, read_index
from pipeproof.state.save import step_directory

_STEP_DIRECTORY = re.compile(r"step-\d{8,}")


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
            if any(path.glob("*.metadata")):
                mend = (
                    "Paddle's checkpoint does not say of which training it is; its weights can be begun with: "
                    f"`pipeproof reshard {path} --to PLAN -o STATE`, then `--resume STATE`"
                )
            elif path.suffix == ".safetensors" or any(path.glob("model*.safetensors")):
                mend = (
                    "this is no state yet: make one of it with `pipeproof reshard "
                    f"{path} --to PLAN -o STATE` (of other tools' names: `--names`), then `--resume STATE`"
                )
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


def read_whole(state: SavedState) -> dict[str, ByteArray]:
    """All tensors of a state, whole, by name.

    Put together file by file, by boxes alone: no plan is asked, and nothing of the code that gives ranks their parts.

    Raises:
        StateError: a file cannot be read.
    """
    tensors = state.index.tensors
    whole = {name: np.zeros((*one.shape, dtype_bytes(one.dtype)), dtype=np.uint8) for name, one in tensors.items()}
    for file in state.index.files:
        content = read_file(state.directory / file.name)
        for shard in file.shards:
            part = whole[shard.tensor][Box(shard.offsets, shard.extents).slices]
            elements = np.array(part).reshape(-1, part.shape[-1])
            there = slice(None) if shard.flat is None else slice(*shard.flat)
            elements[there] = content[file.key_of(shard.tensor)].content.reshape(-1, part.shape[-1])
            part[...] = elements.reshape(part.shape)
    return {name: ByteArray(one.dtype, one.shape, whole[name].reshape(-1)) for name, one in tensors.items()}


def _states_below(root: Path) -> list[Path]:
    """From the oldest to the newest."""
    if not root.is_dir():
        return []
    return sorted(one for one in root.iterdir() if _STEP_DIRECTORY.fullmatch(one.name) and one.is_dir())
