"""Whether an output is there already: of a call that was killed after it gave it its name, before it tidied up."""

from __future__ import annotations

from pathlib import Path

from pipeproof.state.codes import StateError
from pipeproof.state.faults import faults_of
from pipeproof.state.header import read_header
from pipeproof.state.index import read_index
from pipeproof.state.reshard.goals import Goal
from pipeproof.state.seal import seal_in, unsealed


def is_made(out: Path, goal: Goal) -> bool:
    """Whether ``out`` is what the goal asks for, and whole: headers, index, SHA-256 of every byte.

    Of which source its elements are it does not say.
    """
    try:
        headers_fit = all(
            _begins_with(out if goal.one_file is not None else out / name, goal.target.header_of(name)[0])
            for name in goal.target.files
        )
        beside_fits = all((out / name).read_bytes() == _bytes(content) for name, content in goal.beside.items())
        if not headers_fit or not beside_fits:
            return False
        if goal.index is not None:
            found = read_index(out)
            if found.model_copy(update={"files": (), "sha256": None}) != goal.index:
                return False
            if {file.name: file.shards for file in found.files} != goal.target.files:
                return False
    except (OSError, StateError):
        return False
    return not faults_of(out)


def _begins_with(path: Path, start: bytes) -> bool:
    seal = seal_in(read_header(path).metadata, path)
    with path.open("rb") as stream:
        found = stream.read(len(start))
    return (found if seal is None else unsealed(found, seal)) == start


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content
