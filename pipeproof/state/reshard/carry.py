"""Carrying a reshard out: into the hidden place, file by file, and then by one rename to where it belongs."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pipeproof import __version__
from pipeproof.state.checkpoint import Checkpoint
from pipeproof.state.files import sync
from pipeproof.state.index import INDEX_FILE, ShardFile, index_text
from pipeproof.state.reshard.goals import Goal
from pipeproof.state.reshard.move import move
from pipeproof.state.reshard.refused import NO_PLACE, RefusedError, writing
from pipeproof.state.reshard.workplace import Workplace, require_free, workplace, workplace_of


@dataclass(frozen=True, slots=True)
class Made:
    """What was written; ``num_finished`` files of it by an earlier call."""

    files: tuple[ShardFile, ...]
    num_finished: int

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(file.size_bytes for file in self.files)


def require_place(source: Checkpoint, out: Path) -> None:
    """Refuse an output that is there, or in the source.

    Raises:
        RefusedError: it is so, or the directory that it is to be in is not there or may not be written to.
    """
    require_free(out)
    parent = out.absolute().parent
    if not parent.is_dir():
        raise RefusedError(NO_PLACE, f"there is no directory {parent}", "make it, or name another place")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise RefusedError(NO_PLACE, f"{parent} may not be written to", "name another place")
    place = source.place.resolve()
    if source.place.is_dir() and place in (parent / out.name).resolve().parents:
        message = f"{out} lies in {source.place}, which is only read"
        raise RefusedError(NO_PLACE, message, "name a place beside it")


def carry_out(
    source: Checkpoint,
    goal: Goal,
    out: Path,
    begun: Callable[[int, int], None],
    tell: Callable[[int, int], None],
    jobs: int,
) -> Made:
    """Make ``out``, or go on with what an interrupted call left.

    ``begun`` is told how many files are there already, and of how many; ``tell`` is as for ``move``.

    Raises:
        RefusedError: it cannot be written there.
        StateError: a file of the source is damaged.
    """
    require_place(source, out)
    with writing(workplace_of(out)), workplace(out, _job(source, goal)) as place:
        finished = place.finished(goal.target.files)
        _require_room(goal, place, finished)
        begun(len(finished), len(goal.target.files))
        files = move(source, goal.state_map, goal.target, place.new, tell, jobs, finished, place.note)
        if goal.index is not None:
            _write(place.new / INDEX_FILE, index_text(goal.index.model_copy(update={"files": files})))
        for name, content in goal.beside.items():
            _write(place.new / name, content)
        place.publish(goal.one_file)
    return Made(files, len(finished))


def _require_room(goal: Goal, place: Workplace, finished: Iterable[str]) -> None:
    there = sum(file.stat().st_size for file in place.new.iterdir())  # unfinished files are written over
    sizes = {name: goal.target.header_of(name)[1].size_bytes for name in goal.target.files}
    needed, free = sum(sizes.values()) - there, shutil.disk_usage(place.directory).free
    if needed > free:
        message = f"{place.output} takes {needed / 1e9:.2f} GB more, and {place.directory.parent.absolute()} has "
        raise RefusedError(NO_PLACE, f"{message}{free / 1e9:.2f} GB free", "make room, or name a place on another disk")


def _write(path: Path, content: str | bytes) -> None:
    with writing(path):
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        sync(path)


def _job(source: Checkpoint, goal: Goal) -> dict[str, object]:
    """What is made of what, so that only the same is gone on with."""
    target = goal.target
    return {
        "the source": _digest_of(sorted(map(_file_of, source.files.items()))),
        "the map": _digest_of(repr(one) for one in sorted(goal.state_map.tensors.items(), key=lambda pair: pair[0])),
        "the target": _digest_of(
            [repr(target.files), repr(target.tensors), repr(target.metadata), repr(goal.index), repr(goal.beside)]
        ),
        "the version": __version__,
    }


def _file_of(pair: tuple[Path, ShardFile | None]) -> str:
    path, entry = pair
    stat = path.stat()
    content = f"changed {stat.st_mtime_ns}" if entry is None else entry.sha256
    return f"{path.resolve()} {stat.st_size} {content}"


def _digest_of(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()
