"""Files of PyTorch's distributed checkpoint (DCP): written and read by all ranks of a group, whole or not at all."""

from __future__ import annotations

import ctypes
import errno
import io
import os
import secrets
import shutil
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.foreign_text import open_foreign
from pipeproof.state.dcp.dcp_checkpoint import is_dcp, require_files
from pipeproof.state.dcp.dcp_metadata import DcpMetadata, DcpObject, read_metadata
from pipeproof.state.state_codes import DCP_MISMATCH, DcpError, DcpMismatchError
from pipeproof.state.torch_archive import load_archive
from pipeproof.system_calls import sync

_FIX_DIRECTORY = "free space, or name another directory"
RNG_RESTORED = "rng_restored"
"""Key that a load adds to what was saved as ``extra``."""
_Result = TypeVar("_Result")


class Ranks:
    """The ranks of a group, or this process alone."""

    def __init__(self, group: Any) -> None:
        self.group, self.is_alone = group, not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self.is_alone else dist.get_rank(group)
        self.size = 1 if self.is_alone else dist.get_world_size(group)

    def gather(self, value: _Result) -> list[_Result]:
        """Return the values of all ranks, in their order."""
        if self.is_alone:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def together(self, work: Callable[[], _Result]) -> _Result:
        """Return the result of ``work``, or raise the error of the first rank that has one, on all ranks."""
        result, error = None, None
        try:
            result = work()
        except (PipeproofError, PipelineError) as raised:
            error = raised
        content: Any = error.findings if isinstance(error, PipeproofError) else None if error is None else [str(error)]
        first = next(filter(None, self.gather(content)), [None])[0]
        if error is not None:
            raise error
        if isinstance(first, str):
            raise PipelineError.reported(first)
        if first is not None:
            kind = DcpMismatchError if first.code == DCP_MISMATCH.code else DcpError
            raise kind(first.message, first.help or "")
        return result  # type: ignore[return-value]


def write_checkpoint(ranks: Ranks, path: Path, content: Mapping[str, Any]) -> None:
    """Write into a directory next to the final one; rank 0 renames it when it is whole."""
    part = path.with_name(f".{path.name}.part")

    def on_rank_0(work: Callable[[], object]) -> None:
        ranks.together(lambda: work() if ranks.rank == 0 else None)

    mark = ranks.gather(secrets.token_hex(16))[0]

    def prepare() -> None:
        with _writing(path):
            if path.exists() and not is_dcp(path) and (not path.is_dir() or any(path.iterdir())):
                raise DcpError(f"{path} exists, and is not a distributed checkpoint", "name another directory")
            if part.exists():
                shutil.rmtree(part)
            part.mkdir(parents=True)
            (part / mark).touch()

    def require_shared() -> None:
        if not (part / mark).exists():
            facts = f"rank {ranks.rank} on {socket.gethostname()} sees another directory {part} than rank 0"
            raise DcpError(facts, "save to a directory that all hosts share")

    def discard() -> None:
        shutil.rmtree(part, ignore_errors=True)

    def finish() -> None:
        require_files(part, read_metadata(part))
        with _writing(path):
            sync(part)
            replace_directory(part, path)

    on_rank_0(prepare)
    try:
        ranks.together(require_shared)
    except PipeproofError:
        on_rank_0(discard)
        raise
    on_rank_0((part / mark).unlink)
    with _quiet():
        try:
            writer = dcp.FileSystemWriter(part, sync_files=True)
            dcp.save(dict(content), storage_writer=writer, process_group=ranks.group, no_dist=ranks.is_alone)
        except (dcp.CheckpointException, OSError, ValueError, RuntimeError) as error:
            raise DcpError(f"{part} cannot be written: {error}", _FIX_DIRECTORY) from error
    on_rank_0(finish)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DcpError(f"{path} cannot be written: {error.strerror}", _FIX_DIRECTORY) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide DCP's warnings about ranks with different names, and about a process without a group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


_CURRENT_DIRECTORY, _EXCHANGE = -100, 2
"""``AT_FDCWD`` and ``RENAME_EXCHANGE`` of Linux."""


def replace_directory(new: Path, path: Path) -> None:
    """Give a directory the name ``path``; a directory of that name is exchanged with it at once, then removed.

    Where a file system cannot exchange, the old directory is ``.NAME.old`` for a moment.

    Raises:
        OSError: The file system refuses.
    """
    if not path.exists():
        new.rename(path)
    elif _exchange(new, path):
        sync(path.parent)
        shutil.rmtree(new)
    else:
        old = path.with_name(f".{path.name}.old")
        path.rename(old)
        new.rename(path)
        sync(path.parent)
        shutil.rmtree(old)
    sync(path.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two directories; return False if the system cannot."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    arguments = (_CURRENT_DIRECTORY, os.fsencode(first), _CURRENT_DIRECTORY, os.fsencode(second), _EXCHANGE)
    if function(*arguments) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number))


def open_checked(path: Path) -> DcpMetadata:
    """Return the metadata of a checkpoint after a check that its files have the lengths in it.

    Raises:
        DcpError: There is no checkpoint, its metadata is a foreign pickle, or a file is missing or cut short.
    """
    old = path.with_name(f".{path.name}.old")
    if not is_dcp(path):
        fix = (
            f"rename {old} to {path}: a save was killed"
            if is_dcp(old)
            else "name the directory that `save_dcp` was given"
        )
        raise DcpError(f"{path} is not a distributed checkpoint: it has no .metadata", fix)
    metadata = read_metadata(path)
    require_files(path, metadata)
    return metadata


def read_checkpoint(ranks: Ranks, path: Path, tensors: dict[str, Any]) -> None:
    """Fill this rank's ``tensors`` by name, in place; all ranks call it.

    Raises:
        DcpError: A file cannot be read.
    """
    with _quiet():
        try:
            reader = dcp.FileSystemReader(path)
            dcp.load(tensors, storage_reader=reader, process_group=ranks.group, no_dist=ranks.is_alone)
        except (dcp.CheckpointException, OSError, ValueError, RuntimeError) as error:
            raise DcpError(f"{path} cannot be read: {error}", "copy the checkpoint again") from error


class StoredObjects:
    """The objects of a checkpoint other than tensors. Nothing that they name is executed."""

    def __init__(self, path: Path, metadata: DcpMetadata) -> None:
        self.path, self.table = path, metadata.objects
        self._streams = dict[str, Any]()
        self._plain = dict[bytes, Any]()
        """Values by content: thousands of parameters have the same learning rate."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for stream in self._streams.values():
            stream.close()

    def read(self, name: str) -> Any:
        """Return an object.

        Raises:
            DcpError: It is damaged, or needs a pickle to be executed.
        """
        stored: DcpObject = self.table[name]
        try:
            if stored.file not in self._streams:
                self._streams[stored.file] = open_foreign(self.path / stored.file)
            stream = self._streams[stored.file]
            stream.seek(stored.start)
            content = stream.read(stored.length)
            if content not in self._plain:
                value = load_archive(content)
                if not _is_plain(value):
                    return value
                self._plain[content] = value
            return self._plain[content]
        except Exception as error:
            message = f"{self.path / stored.file}: {name} cannot be read: {str(error).partition(chr(10))[0]}"
            raise DcpError(
                message, "copy the checkpoint again from where it was saved, and check its origin"
            ) from error


_PLAIN = (bool, int, float, str, type(None))


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(item, _PLAIN) for item in value))


def require_plain(values: Mapping[str, Any]) -> None:
    """Refuse values that could be loaded only by executing a pickle.

    Raises:
        DcpMismatchError: There is such a value, or a name that loads use for a result of their own.
    """
    if RNG_RESTORED in values:
        raise DcpMismatchError(f"`extra` has {RNG_RESTORED!r}, which is a result of load_dcp", "give it another name")
    for name, value in values.items():
        if _is_plain(value):
            continue
        stream = io.BytesIO()
        try:
            torch.save(value, stream)
            stream.seek(0)
            torch.load(stream, weights_only=True)
        except Exception as error:
            message = f"{name} is a {type(value).__name__}, which cannot be loaded without executing a pickle"
            fix = "save numbers, text, tensors, and lists and dicts of them: a `state_dict()`, and not the object"
            raise DcpMismatchError(message, fix) from error


def contiguous(value: Any) -> Any:
    """Return a tensor in C order, as other readers of the checkpoint expect it."""
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    return value.detach().contiguous() if is_plain and not value.is_contiguous() else value


def wrapped_container(value: Any) -> Any:
    """Return a container or tensor as the element of a tuple, which DCP keeps as one object."""
    return (value,) if is_container(value) else value


def is_container(value: Any) -> bool:
    """Return True for values that DCP would not keep as one object."""
    return isinstance(value, Mapping | list | torch.Tensor)
