"""Everything that is wrong with the files of a checkpoint, not only what is met first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from pipeproof.specs.finding import Finding
from pipeproof.state.checkpoint import Checkpoint, open_checkpoint
from pipeproof.state.codes import StateError
from pipeproof.state.files import require_whole
from pipeproof.state.index import ShardFile, TensorEntry
from pipeproof.state.load import find_state
from pipeproof.state.seal import require_sealed
from pipeproof.state.stream import require_tiled

_HASHED_AT_ONCE = 4
_Look = Callable[[], object]


def faults_of(place: Path) -> tuple[Finding, ...]:
    """What opening refuses, files against the index, SHA-256 included, and whether parts make up each tensor.

    Merged files are held against the SHA-256 that they have of themselves. Where there is neither (checkpoints of other
    people) there are headers alone to look at.
    """
    try:
        checkpoint = open_checkpoint(place)
    except StateError as error:
        return _faults_of_state(place) or error.findings
    tiled: list[_Look] = [partial(require_tiled, checkpoint, name) for name in sorted(checkpoint.tensors)]
    sealed: list[_Look] = [partial(require_sealed, path, seal) for path, seal in checkpoint.seals.items()]
    return _faults([*_whole(checkpoint.files, checkpoint.tensors), *sealed, *tiled])


def num_hashed(checkpoint: Checkpoint) -> int:
    """Of how many files there is a SHA-256 to hold them against."""
    return sum(map(checkpoint.has_sha256, checkpoint.files))


def _faults_of_state(place: Path) -> tuple[Finding, ...]:
    """Opening ends at the first file that is not right; of a state all of them can be told."""
    try:
        state = find_state(place)
    except StateError:
        return ()
    return _faults(_whole({state.directory / file.name: file for file in state.index.files}, state.index.tensors))


def _whole(files: Mapping[Path, ShardFile | None], tensors: Mapping[str, TensorEntry]) -> list[_Look]:
    return [partial(require_whole, path.parent, file, tensors) for path, file in files.items() if file is not None]


def _faults(looks: Iterable[_Look]) -> tuple[Finding, ...]:
    """In the order of what is looked at; hashing lets other threads run."""

    def found(look: _Look) -> tuple[Finding, ...]:
        try:
            look()
        except StateError as error:
            return error.findings
        return ()

    with ThreadPoolExecutor(_HASHED_AT_ONCE) as pool:
        return tuple(finding for findings in pool.map(found, looks) for finding in findings)
