"""System calls that differ between Linux, macOS and Windows: cores, locks, reads at a position, writing to the disk.

Everything but the parts that start ranks uses POSIX only through this file and `signals`. ``make lint`` checks the
types for all three systems: a name that one system lacks is an error.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CAN_START_RANKS = sys.platform == "linux"
"""True where `run`, `rehearse` and the doctor's measurements can start processes."""


def num_cores() -> int:
    """Number of cores that this process may use; elsewhere than on Linux all cores of the machine."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def address_space_limit() -> int | None:
    """Largest address space of this process in bytes (``ulimit -v``); None if there is no limit."""
    if sys.platform == "win32":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def open_files_limit() -> int | None:
    """Most files that this process may have open (``ulimit -n``); None if there is no limit."""
    if sys.platform == "win32":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if limit == resource.RLIM_INFINITY else limit


def lock_file(handle: int) -> bool:
    """Lock an open file for this process until its handle is closed; return False if another process has the lock.

    The kernel removes the lock when the process ends in any way. Windows locks the first byte, which others then cannot
    read; POSIX systems lock against this function only.

    Raises:
        OSError: The file system has no locks.
    """
    from filelock import lock_descriptor

    return lock_descriptor(handle, blocking=False)


def open_to_read(path: Path) -> int:
    """Open a regular file; return its handle. A read from a pipe would block, and a device has no end.

    Raises:
        OSError: The file cannot be opened, or is a directory, a pipe or a device.
    """
    if sys.platform == "win32":
        handle = os.open(path, os.O_RDONLY | os.O_BINARY)  # it would translate the ends of lines
    else:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe without a writer would block, too
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a regular file", str(path))
    return handle


def read_at(handle: int, content: memoryview, position: int) -> int:
    """Read bytes from a position of a file into ``content``; return their number, 0 at the end of the file.

    Fewer than ``content`` has are possible: Linux reads at most 2 GiB at once, and a network's disk may give less. Only
    one thread may use the handle.

    Raises:
        OSError: The bytes cannot be read.
    """
    if sys.platform != "win32":
        return os.preadv(handle, [content], position)
    os.lseek(handle, position, os.SEEK_SET)
    block = os.read(handle, min(len(content), _MOST_READ))
    content[: len(block)] = block
    return len(block)


_MOST_READ = 2**24
"""Bytes of one read that is copied."""


def forget_cached(handle: int, begin: int) -> None:
    """Let the system start writing a file to the disk, and drop its cached pages from ``begin`` on (Linux)."""
    if sys.platform == "linux":
        os.posix_fadvise(handle, begin, 0, os.POSIX_FADV_DONTNEED)


def sync(path: Path) -> None:
    """Make a file, or the entries of a directory, survive a power loss. Windows has no such call for directories.

    Raises:
        OSError: The file cannot be opened or written.
    """
    if sys.platform == "win32" and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def interrupt_blocked() -> Iterator[None]:
    """Block SIGINT of this thread and of processes that the block starts. Windows cannot."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def kill(pid: int) -> None:
    """End a process at once, without cleanup: SIGKILL, or TerminateProcess.

    Raises:
        OSError: There is no such process, or it belongs to another user.
    """
    if sys.platform == "win32":
        os.kill(pid, signal.SIGTERM)
    else:
        os.kill(pid, signal.SIGKILL)
