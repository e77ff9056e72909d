"""Where a reshard writes until all is there: a hidden directory beside its output, which a second call goes on with.

In ``.NAME.reshard`` stand ``job.json`` (what is being made, of what), ``new``
(the output, or what there is of it), and in ``done`` a note for each file of it
that is on the disk. The output gets its name by one rename. Whoever is killed
before leaves this directory alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from pipeproof.state.files import sync
from pipeproof.state.index import ShardFile
from pipeproof.state.reshard.refused import NO_PLACE, RefusedError

_JOB, _NEW, _DONE, _LOCK = "job.json", "new", "done", "lock"


@dataclass(frozen=True, slots=True)
class Workplace:
    """The hidden directory of one output, which this process alone works in."""

    output: Path
    directory: Path

    @property
    def new(self) -> Path:
        """Where the files are written."""
        return self.directory / _NEW

    def finished(self, names: Mapping[str, object]) -> dict[str, ShardFile]:
        """The files that an earlier call wrote to their end, of those that are asked for."""
        found = {}
        for name in names:
            try:
                file = ShardFile.model_validate_json((self.directory / _DONE / f"{name}.json").read_bytes())
                size = (self.new / name).stat().st_size
            except (OSError, ValidationError):
                continue
            if file.name == name and file.size_bytes == size:
                found[name] = file
        return found

    def note(self, file: ShardFile) -> None:
        """A file is on the disk, and right."""
        _write_whole(self.directory / _DONE / f"{file.name}.json", file.model_dump_json(exclude_none=True))

    def publish(self, one_file: str | None) -> None:
        """Give the output its name: the directory of files, or the one file of them.

        Raises:
            RefusedError: somebody made one of that name in the meantime.
        """
        made = self.new if one_file is None else self.new / one_file
        sync(self.new)
        require_free(self.output)
        made.rename(self.output)
        sync(self.output.absolute().parent)


@contextmanager
def workplace(output: Path, job: Mapping[str, object]) -> Iterator[Workplace]:
    """The hidden directory for an output, locked; it is removed when the output is there, and stays where it is not.

    ``job`` says what is made of what: what another job left is not gone on with.

    Raises:
        RefusedError: the output is there, another process makes it, or another job left something there.
        OSError: the directory cannot be made.
    """
    directory = workplace_of(output)
    require_free(output)
    with _locked(directory):
        require_free(output)
        _require_same_job(directory, job)
        for name in (_NEW, _DONE):
            (directory / name).mkdir(exist_ok=True)
        yield Workplace(output, directory)
        if output.exists():
            _tidy(directory)


@contextmanager
def left_behind(output: Path, job: Mapping[str, object], one_file: str | None) -> Iterator[bool]:
    """What is beside an output that is there, locked: whether this job made the output, and was killed while it tidied.

    If so, it is removed at the end.

    Raises:
        RefusedError: another process is at it.
    """
    directory = workplace_of(output)
    if not directory.is_dir():
        yield False
        return
    with _locked(directory):
        if not any((directory / name).exists() for name in (_JOB, _NEW, _DONE)):  # was removed but for the lock
            _tidy(directory)
            yield False
            return
        made = directory / _NEW if one_file is None else directory / _NEW / one_file
        is_of_job = _job_in(directory) == json.loads(_job_text(job)) and not made.exists()
        yield is_of_job
        if is_of_job:
            _tidy(directory)


def _tidy(directory: Path) -> None:
    """Remove the directory, last of all what says of which job it is; what cannot be removed is in nobody's way."""
    with suppress(OSError):
        for inner in (_NEW, _DONE):
            if (directory / inner).exists():
                shutil.rmtree(directory / inner)
        (directory / _LOCK).unlink()
        shutil.rmtree(directory)


def workplace_of(output: Path) -> Path:
    """The hidden directory beside an output."""
    return output.with_name(f".{output.name}.reshard")


def require_free(output: Path) -> None:
    """Refuse to write over anything.

    Raises:
        RefusedError: something of that name is there.
    """
    if os.path.lexists(output):
        left = workplace_of(output)
        also = f"; {left}, from making it, can be removed" if left.exists() else ""
        raise RefusedError(NO_PLACE, f"{output} exists already{also}", "name another place, or remove it")


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the directory's lock; whoever made the output in the meantime has removed the file that it was on."""
    while True:
        directory.mkdir(exist_ok=True)
        handle = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                message = f"another process is writing {directory.name.removeprefix('.').removesuffix('.reshard')}"
                raise RefusedError(NO_PLACE, message, "wait for it, or end it") from error
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
        for name in (_NEW, _DONE):  # begun before the job was said: worth nothing
            shutil.rmtree(directory / name, ignore_errors=True)
        _write_whole(file, text)
        return
    left = _job_in(directory)
    if left != json.loads(text):
        differs = next((key for key in job if left.get(key) != job[key]), "what it made")
        raise RefusedError(
            NO_PLACE,
            f"{directory} was left by a reshard that is not this one: {differs} differs",
            f"run that one again to its end, remove {directory}, or name another output",
        )


def _job_text(job: Mapping[str, object]) -> str:
    return json.dumps(job, sort_keys=True)


def _job_in(directory: Path) -> dict[str, object]:
    """The job that is noted there; nothing where none can be read."""
    try:
        left = json.loads((directory / _JOB).read_bytes())
    except (OSError, ValueError):
        left = None
    return left if isinstance(left, dict) else {}


def _write_whole(file: Path, text: str) -> None:
    """Write a small file so that it is there whole or not at all."""
    part = file.with_name(f"{file.name}.part")
    with part.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    part.rename(file)
    sync(file.parent)
