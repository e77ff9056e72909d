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
from pipeproof.state.codes import reading
from pipeproof.state.files import sync
from pipeproof.state.index import INDEX_FILE, ShardFile, index_text
from pipeproof.state.reshard.goals import Goal
from pipeproof.state.reshard.made import is_made
from pipeproof.state.reshard.move import move
from pipeproof.state.reshard.refused import NO_PLACE, RefusedError, writing
from pipeproof.state.reshard.words import size_words
from pipeproof.state.reshard.workplace import left_behind, require_free, workplace, workplace_of


@dataclass(frozen=True, slots=True)
class Made:
    """What was written; ``num_finished`` files of it by an earlier call, or even the whole (``was_there``)."""

    num_files: int
    size_bytes: int
    num_finished: int
    was_there: bool = False


def require_place(source: Checkpoint, out: Path) -> None:
    """Refuse an output that is there, or in the source.

    One that an interrupted call may have made is looked at when it is known what is to be made.

    Raises:
        RefusedError: it is so, or the directory that it is to be in is not there or may not be written to.
    """
    if not out.name:
        raise RefusedError(NO_PLACE, f"`{out}` is there, and is no name for what is to be made", "give one: `-o NAME`")
    if not workplace_of(out).is_dir():
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
    """Make ``out``, or go on with what an interrupted call left; where that was only to tidy up, ``out`` is verified.

    ``begun`` is told how many files are there already, and of how many; ``tell`` is as for ``move``.

    Raises:
        RefusedError: it cannot be written there.
        StateError: a file of the source is damaged.
    """
    require_place(source, out)
    job = _job(source, goal)
    if os.path.lexists(out):
        with writing(workplace_of(out)), left_behind(out, job, goal.one_file) as is_of_job:
            if not is_of_job or not is_made(out, goal):
                require_free(out)
        sizes = [goal.target.header_of(name)[1].size_bytes for name in goal.target.files]
        return Made(len(sizes), sum(sizes), len(sizes), was_there=True)
    _require_room(goal, out)
    with writing(workplace_of(out)), workplace(out, job) as place:
        finished = place.finished(goal.target.files)
        begun(len(finished), len(goal.target.files))
        files = move(source, goal.state_map, goal.target, place.new, tell, jobs, finished, place.note)
        if goal.index is not None:
            _write(place.new / INDEX_FILE, index_text(goal.index.model_copy(update={"files": files})))
        for name, content in goal.beside.items():
            _write(place.new / name, content)
        place.publish(goal.one_file)
    return Made(len(files), sum(file.size_bytes for file in files), len(finished))


def _require_room(goal: Goal, out: Path) -> None:
    """Before anything is made, so that a full disk leaves no hidden directory; unfinished files are written over."""
    there = sum(file.stat().st_size for file in (workplace_of(out) / "new").glob("*"))
    sizes = (goal.target.header_of(name)[1].size_bytes for name in goal.target.files)
    parent = out.absolute().parent
    needed, free = sum(sizes) - there, shutil.disk_usage(parent).free
    if needed > free:
        message = f"{out} takes {size_words(needed)} more, and {parent} has {size_words(free)} free"
        raise RefusedError(NO_PLACE, message, "make room, or name a place on another disk")


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
    with reading(path, "copy the checkpoint anew from where it was saved, or name another one"):
        stat = path.stat()
    content = f"changed {stat.st_mtime_ns}" if entry is None else entry.sha256
    return f"{path.resolve()} {stat.st_size} {content}"


def _digest_of(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()
