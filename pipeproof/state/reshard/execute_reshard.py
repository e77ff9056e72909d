"""Executing a reshard: into a hidden directory, file by file, then by one rename to the output."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pipeproof.diagnostics.units import size_text
from pipeproof.state.checkpoint import Checkpoint
from pipeproof.state.reshard.copy_regions import write_target
from pipeproof.state.reshard.reshard_codes import OUTPUT_UNUSABLE, RefusedError, writing
from pipeproof.state.reshard.reshard_targets import ReshardTask
from pipeproof.state.state_index import INDEX_FILE, ShardFile, StateIndex, index_text, provenance_file
from pipeproof.system_calls import lock_file, sync

_NEW, _LOCK = "new", "lock"


@dataclass(frozen=True, slots=True)
class ReshardResult:
    """Output of a reshard."""

    num_files: int
    size_bytes: int


def require_output_path(source: Checkpoint, out: Path, *, is_merged: bool) -> None:
    """Refuse an output that exists, or lies in the source; a merged file has a provenance file next to it.

    Raises:
        RefusedError: The output exists or lies in the source, or its directory is missing or not writable.
    """
    if not out.name:
        raise RefusedError(OUTPUT_UNUSABLE, f"`{out}` is not a name for an output", "give one: `-o NAME`")
    require_free(out)
    if is_merged and not work_directory_of(out).is_dir():  # a call that was killed may have named it already
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
    source: Checkpoint, task: ReshardTask, out: Path, report_progress: Callable[[int, int], None], jobs: int
) -> ReshardResult:
    """Write ``out``; for ``report_progress`` see ``write_target``. Files of a killed call are removed.

    Raises:
        RefusedError: It cannot be written there.
        StateError: A file of the source is damaged.
    """
    require_output_path(source, out, is_merged=task.one_file is not None)
    _require_room(task, out)
    with writing(work_directory_of(out)), _locked(work_directory_of(out)) as new:
        files = write_target(source, task.state_map, task.target, new, report_progress, jobs)
        for path, index in _indexes(task, new, files).items():
            _write(path, index_text(index))
        for name, content in task.extra_files.items():
            _write(new / name, content)
        _publish(new, out, task.one_file)
    return ReshardResult(len(files), sum(file.size_bytes for file in files))


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
    """Check the free space before anything is written; files of a killed call are removed."""
    existing_bytes = sum(file.stat().st_size for file in (work_directory_of(out) / _NEW).glob("*"))
    sizes = (task.target.header_of(name)[1].size_bytes for name in task.target.files)
    parent = out.absolute().parent
    needed, free = sum(sizes) - existing_bytes, shutil.disk_usage(parent).free
    if needed > free:
        message = f"{out} needs {size_text(needed)} more, and {parent} has {size_text(free)} free"
        raise RefusedError(OUTPUT_UNUSABLE, message, "free space, or name an output on another disk")


def _write(path: Path, content: str | bytes) -> None:
    with writing(path):
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        sync(path)


def _publish(new: Path, out: Path, one_file: str | None) -> None:
    """Give the output its name: the directory of files, or its only file, after the file's provenance."""
    output_files = new if one_file is None else new / one_file
    sync(new)
    require_free(out)
    if one_file is not None:
        provenance_file(output_files).replace(provenance_file(out))
        sync(out.absolute().parent)
    output_files.rename(out)
    sync(out.absolute().parent)


def work_directory_of(output: Path) -> Path:
    """Return the hidden directory next to an output."""
    return output.with_name(f".{output.name}.reshard")


def require_free(output: Path) -> None:
    """Refuse to overwrite anything.

    Raises:
        RefusedError: Something of that name exists.
    """
    if os.path.lexists(output):
        raise RefusedError(OUTPUT_UNUSABLE, f"{output} exists already", "name another output, or remove it")


@contextmanager
def _locked(directory: Path) -> Iterator[Path]:
    """Make the directory, and yield an empty one in it; both are removed at the end in any case.

    Raises:
        RefusedError: another process holds the directory's lock.
    """
    while True:
        directory.mkdir(exist_ok=True)
        handle = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not lock_file(handle):
                message = f"another process is writing {directory.name.removeprefix('.').removesuffix('.reshard')}"
                raise RefusedError(OUTPUT_UNUSABLE, message, "wait for it, or end it")
            try:
                is_same = os.path.samestat(os.fstat(handle), (directory / _LOCK).stat())
            except FileNotFoundError:  # the process that held it has removed it
                is_same = False
            if is_same:
                shutil.rmtree(directory / _NEW, ignore_errors=True)
                try:
                    (directory / _NEW).mkdir()
                    yield directory / _NEW
                finally:
                    _remove(directory)
                return
        finally:
            os.close(handle)


def _remove(directory: Path) -> None:
    """Remove the directory; files that cannot be removed do no harm."""
    with suppress(OSError):
        shutil.rmtree(directory / _NEW, ignore_errors=True)
        (directory / _LOCK).unlink()
        directory.rmdir()
