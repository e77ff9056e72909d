"""Executing a reshard: into the work directory, file by file, then by one rename to the output."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from pipeproof.atomic_write import write_output
from pipeproof.diagnostics.units import size_text
from pipeproof.foreign_text import decode_json, open_foreign, read_foreign
from pipeproof.state.checkpoint import Checkpoint
from pipeproof.state.open_checkpoint import file_findings
from pipeproof.state.reshard.copy_regions import write_target
from pipeproof.state.reshard.reshard_codes import OUTPUT_UNUSABLE, RefusedError, writing
from pipeproof.state.reshard.reshard_targets import ReshardTask
from pipeproof.state.state_codes import StateError, reading
from pipeproof.state.state_index import (
    INDEX_FILE,
    MAX_BYTES,
    ShardFile,
    StateIndex,
    index_text,
    provenance_file,
    read_index,
    read_provenance,
)
from pipeproof.system_calls import lock_file, sync
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
        message = f"{out} needs {size_text(needed)} more, and {parent} has {size_text(free)} free"
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
            _begins_with(out / name, _bytes(content)) and (out / name).stat().st_size == len(_bytes(content))
            for name, content in task.extra_files.items()
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
    with open_foreign(path) as stream:  # nothing of PyTorch's archives, which are compared with the metadata
        return stream.read(len(start)) == start


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


_MARK = "user.pipeproof.reshard"
"""Extended attribute of an output: the job that made it."""
_JOB, _NEW, _DONE, _LOCK = "job.json", "new", "done", "lock"


@dataclass(frozen=True, slots=True)
class WorkDirectory:
    """The hidden directory of one output, locked by this process."""

    output: Path
    directory: Path

    @property
    def new(self) -> Path:
        """Directory of the files being written."""
        return self.directory / _NEW

    def finished(self, names: Mapping[str, object]) -> dict[str, ShardFile]:
        """Return the files of ``names`` that an earlier call finished."""
        finished = {}
        for name in names:
            try:
                file = ShardFile.model_validate_json(read_foreign(self.directory / _DONE / f"{name}.json", MAX_BYTES))
                size = (self.new / name).stat().st_size
            except (OSError, ValidationError):
                continue
            if file.name == name and file.size_bytes == size:
                finished[name] = file
        return finished

    def record(self, file: ShardFile) -> None:
        """Record that a file is on the disk, and right."""
        write_output(self.directory / _DONE / f"{file.name}.json", file.model_dump_json(exclude_none=True))

    def publish(self, one_file: str | None) -> None:
        """Give the output its name: the directory of files, or its only file, after the provenance of that.

        The output is marked with its job, where the file system has extended attributes.

        Raises:
            RefusedError: An output of that name was created in the meantime.
        """
        output_files = self.new if one_file is None else self.new / one_file
        if hasattr(os, "setxattr"):
            with suppress(OSError):
                os.setxattr(output_files, _MARK, read_foreign(self.directory / _JOB, MAX_BYTES))
        sync(self.new)
        require_free(self.output)
        if one_file is not None:
            provenance_file(output_files).rename(provenance_file(self.output))
            sync(self.output.absolute().parent)
        output_files.rename(self.output)
        sync(self.output.absolute().parent)


@contextmanager
def work_directory(output: Path, job: Mapping[str, object]) -> Iterator[WorkDirectory]:
    """Lock the work directory of an output; it is removed once the output exists, and remains otherwise.

    ``job`` identifies source, map and target: the remains of another job are not resumed.

    Raises:
        RefusedError: The output exists, another process makes it, or another job left something there.
        OSError: The directory cannot be made.
    """
    directory = work_directory_of(output)
    require_free(output)
    with _locked(directory):
        require_free(output)
        _require_same_job(directory, job)
        for name in (_NEW, _DONE):
            (directory / name).mkdir(exist_ok=True)
        yield WorkDirectory(output, directory)
        if output.exists():
            _remove(directory)


def made_by(output: Path) -> dict[str, object]:
    """Return the job that an output is marked with; empty where there is no mark."""
    if not hasattr(os, "getxattr"):
        return {}
    try:
        return _job_of(os.getxattr(output, _MARK))
    except OSError:
        return {}


@contextmanager
def leftover_work_directory(output: Path, job: Mapping[str, object], one_file: str | None) -> Iterator[bool]:
    """Lock the work directory of an existing output; yield True if this job made it and was killed during cleanup.

    In this case the directory is removed at the end.

    Raises:
        RefusedError: Another process holds the lock.
    """
    directory = work_directory_of(output)
    if not directory.is_dir():
        yield False
        return
    with _locked(directory):
        if not any((directory / name).exists() for name in (_JOB, _NEW, _DONE)):  # was removed but for the lock
            _remove(directory)
            yield False
            return
        output_files = directory / _NEW if one_file is None else directory / _NEW / one_file
        is_same_job = _recorded_job(directory) == decode_json(_job_text(job)) and not output_files.exists()
        yield is_same_job
        if is_same_job:
            _remove(directory)


def _remove(directory: Path) -> None:
    """Remove the directory, the job's record last; files that cannot be removed do no harm."""
    with suppress(OSError):
        for inner in (_NEW, _DONE):
            if (directory / inner).exists():
                shutil.rmtree(directory / inner)
        (directory / _LOCK).unlink()
        shutil.rmtree(directory)


def work_directory_of(output: Path) -> Path:
    """Return the hidden directory next to an output."""
    return output.with_name(f".{output.name}.reshard")


def require_free(output: Path) -> None:
    """Refuse to overwrite anything.

    Raises:
        RefusedError: Something of that name exists.
    """
    if os.path.lexists(output):
        recorded = work_directory_of(output)
        removable = f"; {recorded}, from making it, can be removed" if recorded.exists() else ""
        raise RefusedError(OUTPUT_UNUSABLE, f"{output} exists already{removable}", "name another output, or remove it")


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the directory's lock. The process that made the output in the meantime has removed the locked file."""
    while True:
        directory.mkdir(exist_ok=True)
        handle = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not lock_file(handle):
                message = f"another process is writing {directory.name.removeprefix('.').removesuffix('.reshard')}"
                raise RefusedError(OUTPUT_UNUSABLE, message, "wait for it, or end it")
            try:
                is_same = os.path.samestat(os.fstat(handle), (directory / _LOCK).stat())
            except FileNotFoundError:
                is_same = False
            if is_same:
                yield
                return
        finally:
            os.close(handle)


def _require_same_job(directory: Path, job: Mapping[str, object]) -> None:
    file = directory / _JOB
    text = _job_text(job)
    if not file.exists():
        for name in (_NEW, _DONE):  # begun before the job was recorded: useless
            shutil.rmtree(directory / name, ignore_errors=True)
        write_output(file, text)
        return
    recorded = _recorded_job(directory)
    if recorded != decode_json(text):
        differs = next((key for key in job if recorded.get(key) != job[key]), "what it made")
        raise RefusedError(
            OUTPUT_UNUSABLE,
            f"{directory} is the work directory of another reshard: {differs} differs",
            f"run that reshard again to finish it, remove {directory}, or name another output",
        )


def _job_text(job: Mapping[str, object]) -> str:
    return json.dumps(job, sort_keys=True)


def _recorded_job(directory: Path) -> dict[str, object]:
    """Return the recorded job; empty if none can be read."""
    try:
        return _job_of(read_foreign(directory / _JOB, MAX_BYTES))
    except OSError:
        return {}


def _job_of(content: bytes) -> dict[str, object]:
    """Return the job that a record has; empty if it is damaged."""
    try:
        recorded = decode_json(content)
    except ValueError:
        return {}
    return recorded if isinstance(recorded, dict) else {}
