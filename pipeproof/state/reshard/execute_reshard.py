"""Executing a reshard: into the work directory, file by file, then by one rename to the output."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pipeproof.state.checkpoint import Checkpoint
from pipeproof.state.open_checkpoint import file_findings
from pipeproof.state.region_text import size_words
from pipeproof.state.reshard.copy_regions import write_target
from pipeproof.state.reshard.reshard_codes import OUTPUT_UNUSABLE, RefusedError, writing
from pipeproof.state.reshard.reshard_targets import ReshardTask
from pipeproof.state.reshard.work_directory import (
    leftover_work_directory,
    made_by,
    require_free,
    work_directory,
    work_directory_of,
)
from pipeproof.state.state_codes import StateError, reading
from pipeproof.state.state_index import (
    INDEX_FILE,
    ShardFile,
    StateIndex,
    index_text,
    provenance_file,
    read_index,
    read_provenance,
)
from pipeproof.system_calls import sync
from pipeproof.version import __version__


@dataclass(frozen=True, slots=True)
class ReshardResult:
    """Output of a reshard; an earlier call wrote ``num_finished`` of its files, or the whole (``existed``)."""

    num_files: int
    size_bytes: int
    num_finished: int
    existed: bool = False


def require_output_path(source: Checkpoint, out: Path, *, is_merged: bool) -> None:
    """Refuse an output that exists, or lies in the source; a merged file has a provenance file next to it.

    The output of an interrupted call is checked later, when it is known what it has to be.

    Raises:
        RefusedError: It is so, or its directory is missing or not writable.
    """
    if not out.name:
        raise RefusedError(OUTPUT_UNUSABLE, f"`{out}` is no name for an output", "give one: `-o NAME`")
    if not work_directory_of(out).is_dir() and not made_by(out):
        require_free(out)
        if is_merged:
            require_free(provenance_file(out))
    parent = out.absolute().parent
    if not parent.is_dir():
        raise RefusedError(OUTPUT_UNUSABLE, f"there is no directory {parent}", "create it, or name another output")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise RefusedError(OUTPUT_UNUSABLE, f"{parent} may not be written to", "name another output")
    path = source.path.resolve()
    if source.path.is_dir() and path in (parent / out.name).resolve().parents:
        message = f"{out} lies in {source.path}, which is only read"
        raise RefusedError(OUTPUT_UNUSABLE, message, "name an output next to it")


def execute_reshard(
    source: Checkpoint,
    task: ReshardTask,
    out: Path,
    report_resumed: Callable[[int, int], None],
    report_progress: Callable[[int, int], None],
    jobs: int,
) -> ReshardResult:
    """Write ``out``, or resume an interrupted call; an output of this very reshard is verified.

    ``report_resumed`` is called with the numbers of finished files and of all files; ``report_progress`` is as in
    ``write_target``.

    Raises:
        RefusedError: It cannot be written there.
        StateError: A file of the source is damaged.
    """
    require_output_path(source, out, is_merged=task.one_file is not None)
    fingerprint = _fingerprint(source, task)
    if os.path.lexists(out):
        with (
            writing(work_directory_of(out)),
            leftover_work_directory(out, fingerprint, task.one_file) as is_same_reshard,
        ):
            is_marked = not work_directory_of(out).exists() and made_by(out) == fingerprint
            if not (is_same_reshard or is_marked) or not is_complete_output(out, task):
                require_free(out)
        sizes = [task.target.header_of(name)[1].size_bytes for name in task.target.files]
        return ReshardResult(len(sizes), sum(sizes), len(sizes), existed=True)
    _require_room(task, out)
    with writing(work_directory_of(out)), work_directory(out, fingerprint) as directory:
        finished = directory.finished(task.target.files)
        report_resumed(len(finished), len(task.target.files))
        files = write_target(
            source, task.state_map, task.target, directory.new, report_progress, jobs, finished, directory.record
        )
        for path, index in _indexes(task, directory.new, files).items():
            _write(path, index_text(index))
        for name, content in task.extra_files.items():
            _write(directory.new / name, content)
        directory.publish(task.one_file)
    return ReshardResult(len(files), sum(file.size_bytes for file in files), len(finished))


def _indexes(task: ReshardTask, directory: Path, files: tuple[ShardFile, ...]) -> dict[Path, StateIndex]:
    """Return the index of a state, or the provenance of a merged file, by path."""
    if task.index is not None:
        return {directory / INDEX_FILE: task.index.model_copy(update={"files": files})}
    if task.provenance is None:
        return {}
    (file,) = files
    if not task.provenance.tensors:
        file = file.model_copy(update={"shards": ()})
    return {provenance_file(directory / file.name): task.provenance.model_copy(update={"files": (file,)})}


def _require_room(task: ReshardTask, out: Path) -> None:
    """Check the free space first, so that a full disk leaves no work directory; unfinished files are overwritten."""
    existing_bytes = sum(file.stat().st_size for file in (work_directory_of(out) / "new").glob("*"))
    sizes = (task.target.header_of(name)[1].size_bytes for name in task.target.files)
    parent = out.absolute().parent
    needed, free = sum(sizes) - existing_bytes, shutil.disk_usage(parent).free
    if needed > free:
        message = f"{out} needs {size_words(needed)} more, and {parent} has {size_words(free)} free"
        raise RefusedError(OUTPUT_UNUSABLE, message, "free space, or name an output on another disk")


def _write(path: Path, content: str | bytes) -> None:
    with writing(path):
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        sync(path)


def _fingerprint(source: Checkpoint, task: ReshardTask) -> dict[str, object]:
    """Return digests of source, map and target, so that only the same reshard is resumed."""
    target = task.target
    return {
        "the source": _digest_of(sorted(map(_file_of, source.files.items()))),
        "the map": _digest_of(repr(one) for one in sorted(task.state_map.tensors.items(), key=lambda pair: pair[0])),
        "the target": _digest_of(
            map(repr, (target.files, target.tensors, target.metadata, task.index, task.provenance, task.extra_files))
        ),
        "the version": __version__,
    }


def _file_of(pair: tuple[Path, ShardFile | None]) -> str:
    path, entry = pair
    with reading(path, "copy the checkpoint again from where it was saved, or name another one"):
        stat = path.stat()
    content = f"changed {stat.st_mtime_ns}" if entry is None else entry.sha256
    return f"{path.resolve()} {stat.st_size} {content}"


def _digest_of(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def is_complete_output(out: Path, task: ReshardTask) -> bool:
    """Return True if ``out`` is the task's output, and whole: headers, index, SHA-256 of every byte.

    The source of its elements is not known from it.
    """
    try:
        headers_match = all(
            _begins_with(_path_in(out, task, name), task.target.header_of(name)[0]) for name in task.target.files
        )
        extra_files_match = all(
            (out / name).read_bytes() == _bytes(content) for name, content in task.extra_files.items()
        )
        if not headers_match or not extra_files_match:
            return False
        expected = task.provenance if task.index is None else task.index
        if expected is not None:
            (first, *_) = task.target.files
            existing = read_index(out) if task.index is not None else read_provenance(_path_in(out, task, first))
            if existing is None or existing.model_copy(update={"files": (), "sha256": None}) != expected:
                return False
            if task.index is not None and {file.name: file.shards for file in existing.files} != task.target.files:
                return False
    except (OSError, StateError):
        return False
    return not file_findings(out)


def _path_in(out: Path, task: ReshardTask, name: str) -> Path:
    return out if task.one_file is not None else out / name


def _begins_with(path: Path, start: bytes) -> bool:
    with path.open("rb") as stream:  # nothing of PyTorch's archives, which are compared with the metadata
        return stream.read(len(start)) == start


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content
