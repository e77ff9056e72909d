"""The work directory of a reshard: a hidden directory next to the output, from which a second call resumes.

``.NAME.reshard`` has ``job.json`` (source, map and target of the reshard), ``new`` (the output, as far as it exists),
and in ``done`` a record of each file that is on the disk. The output gets its name by one rename. If the process is
killed before the rename, this directory remains.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from pipeproof.atomic_write import write_output
from pipeproof.foreign_text import decode_json
from pipeproof.state.reshard.reshard_codes import OUTPUT_UNUSABLE, RefusedError
from pipeproof.state.state_index import ShardFile, provenance_file
from pipeproof.system_calls import lock_file, sync

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
                file = ShardFile.model_validate_json((self.directory / _DONE / f"{name}.json").read_bytes())
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
                os.setxattr(output_files, _MARK, (self.directory / _JOB).read_bytes())
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
        return _job_of((directory / _JOB).read_bytes())
    except OSError:
        return {}


def _job_of(content: bytes) -> dict[str, object]:
    """Return the job that a record has; empty if it is damaged."""
    try:
        recorded = decode_json(content)
    except ValueError:
        return {}
    return recorded if isinstance(recorded, dict) else {}
