"""Every change of files that a process makes, counted and recorded; it kills itself at one of them.

The counted operations are stored below, by name: a change that a process makes in another way would be missed, so tests
hold the bytes recorded against the files.
"""

import builtins
import io
import os
import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path

_WRITES = ("write", "pwrite", "writev", "pwritev")
_BY_HANDLE = ("fsync", "fdatasync", "ftruncate", "posix_fallocate")
_BY_PATH = ("rename", "replace", "link", "symlink", "unlink", "remove", "mkdir", "rmdir", "truncate")
_OTHERS = ("copy_file_range", "sendfile", "splice")
"""Not expected: they would write bytes that are not counted."""
_MAKES = os.O_CREAT | os.O_TRUNC


@dataclass
class Operation:
    name: str
    path: str
    """Path of the file; for a rename its old path."""
    num_bytes: int = 0
    to: str = ""


@dataclass
class Death:
    """The operation (counted from 0; None: never) at which the process ends, and the share of its bytes written
    before."""

    at: int | None = None
    fraction: float = 0.0
    log: list[Operation] = field(default_factory=list)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def install(self):
        """From now on, for the rest of this process."""
        for name in _WRITES:
            setattr(os, name, self._writing(name, getattr(os, name)))
        for name in _BY_HANDLE:
            setattr(os, name, self._by_handle(name, getattr(os, name)))
        for name in _BY_PATH:
            setattr(os, name, self._by_path(name, getattr(os, name)))
        for name in _OTHERS:
            setattr(os, name, self._refused(name))
        self._os_open, self._open = os.open, io.open
        os.open = self._opening
        io.open = builtins.open = self._opened
        return self

    def step(self, operation, partly=lambda num_bytes: None):
        """Count one; at the fatal one carry out a shard of it, and end as a machine that is switched off ends."""
        with self._lock:
            self.log.append(operation)
            if self.at == len(self.log) - 1:
                if self.fraction:
                    partly(int(operation.num_bytes * self.fraction))
                os.kill(os.getpid(), signal.SIGKILL)

    def _writing(self, name, real):
        positioned = name.startswith("p")

        def write(handle, content, *place):
            blocks = content if name.endswith("v") else [content]
            compose = b"".join(bytes(block) for block in blocks)
            first = place[:1] if positioned else ()
            part = os_pwrite if positioned else os_write
            self.step(
                Operation(name, _path_of(handle), len(compose)),
                lambda num_bytes: part(handle, compose[:num_bytes], *first),
            )
            return real(handle, content, *place)

        os_pwrite, os_write = _REAL["pwrite"], _REAL["write"]
        return write

    def _by_handle(self, name, real):
        def call(handle, *more):
            self.step(Operation(name, _path_of(handle)))
            return real(handle, *more)

        return call

    def _by_path(self, name, real):
        def call(path, *more, **options):
            to = str(more[0]) if name in ("rename", "replace", "link", "symlink") else ""
            self.step(Operation(name, _below(path, options.get("dir_fd")), to=to and str(Path(to).absolute())))
            return real(path, *more, **options)

        return call

    def _refused(self, name):
        def call(*arguments):
            raise AssertionError(f"{name} changes a file and is not counted: {arguments}")

        return call

    def _opening(self, path, flags, mode=0o777, *, dir_fd=None):
        if flags & _MAKES:
            self.step(Operation("open", _below(path, dir_fd)))
        return self._os_open(path, flags, mode, dir_fd=dir_fd)

    def _opened(self, file, mode="r", *more, **options):
        if not set(mode) & set("wax+"):
            return self._open(file, mode, *more, **options)
        path = _path_of(file) if isinstance(file, int) else str(Path(file).absolute())
        if not isinstance(file, int):
            self.step(Operation("open", path))
        return _Written(self._open(file, mode, *more, **options), path, self)


_REAL = {name: getattr(os, name) for name in _WRITES}


class _Written:
    """A stream each of whose writes is counted, and is in the file when it returns."""

    def __init__(self, stream, path, death):
        self._stream, self._path, self._death = stream, path, death

    def write(self, content):
        length = len(content.encode()) if isinstance(content, str) else memoryview(content).nbytes

        def partly(num_bytes):
            text = isinstance(content, str)
            self._stream.write(content[:num_bytes] if text else memoryview(content).cast("B")[:num_bytes])
            self._stream.flush()

        self._death.step(Operation("write", self._path, length), partly)
        written = self._stream.write(content)
        self._stream.flush()
        return written

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._stream.close()

    def __getattr__(self, name):
        return getattr(self._stream, name)


def _path_of(handle):
    return str(Path(f"/proc/self/fd/{handle}").readlink())


def _above(path):
    return str(Path(path).parent)


def _below(path, dir_fd):
    return str(Path(path).absolute() if dir_fd is None else Path(_path_of(dir_fd), path))


def require_all_bytes_counted(log, root):
    """Counted operations wrote the whole content of the files."""
    written, made = {}, {}
    for one in log:
        if one.name in _WRITES:
            written[one.path] = written.get(one.path, 0) + one.num_bytes
        if one.name in ("rename", "replace"):
            made[one.path] = one.to
    for path in filter(Path.is_file, Path(root).rglob("*")):
        found = sum(num for name, num in written.items() if _moved(name, made) == str(path))
        assert found == path.stat().st_size, (path, found)


def require_renamed_after_sync(log):
    """Before a directory or file gets its last name it is on the disk, with all in it; then the name itself is."""
    last = {}
    for place, one in enumerate(log):
        if one.name in (*_WRITES, "open", "ftruncate", "truncate"):
            last[one.path] = place
        if one.name in ("unlink", "remove"):
            last.pop(one.path, None)
    renames = [(place, one) for place, one in enumerate(log) if one.name in ("rename", "replace")]
    assert renames
    synced = [(place, one.path) for place, one in enumerate(log) if one.name in ("fsync", "fdatasync")]
    for place, one in renames:
        inside = [path for path in last if path == one.path or path.startswith(one.path + "/")]
        assert inside, one
        for path in inside:
            assert any(last[path] < when < place and what == path for when, what in synced), (path, one)
        changed = [p for p, other in enumerate(log[:place]) if _above(other.path) == one.path
                   and other.name in ("open", "unlink", "remove", "rename", "replace", "mkdir")]  # fmt: skip
        if changed:
            assert any(changed[-1] < when < place and what == one.path for when, what in synced), one
        above = _above(one.to)
        assert any(when > place and what == above for when, what in synced), ("the name itself", one)


def _moved(path, made):
    for before, after in made.items():
        if path == before or path.startswith(before + "/"):
            path = after + path[len(before) :]
    return path
