"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from pipeproof.system_calls import sync


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield the path of a hidden file to write, which replaces ``path`` at the end of the block.

    After an error, and before SIGTERM, SIGHUP or SIGQUIT ends the process, the hidden file is removed. If SIGKILL ends
    it in the block, ``path`` is unchanged and ``.NAME.PID`` remains. Nothing is synchronized: a power loss may leave an
    empty file. `output_file` synchronizes.

    Raises:
        OSError: the file cannot take its place.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with _removed_at_the_end_of_the_process(new):
        try:
            yield new
            new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def _removed_at_the_end_of_the_process(file: Path) -> Iterator[None]:
    """Let signals that end the process, and that nothing else handles, remove a file first; in the main thread."""
    if threading.current_thread() is not threading.main_thread():  # others cannot set what a signal does
        yield
        return

    own = os.getpid()

    def end(signum: int, frame: FrameType | None) -> None:
        if os.getpid() == own:  # and not a fork
            file.unlink(missing_ok=True)
        signal.signal(signum, signal.SIG_DFL)
        signal.raise_signal(signum)

    signums = [getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP", "SIGQUIT")]
    handled = [signum for signum in signums if signum is not None and signal.getsignal(signum) is signal.SIG_DFL]
    for signum in handled:
        signal.signal(signum, end)
    try:
        yield
    finally:
        for signum in handled:
            if signal.getsignal(signum) is end:
                signal.signal(signum, signal.SIG_DFL)


@contextlib.contextmanager
def output_file(path: Path) -> Iterator[Path]:
    """Yield a path to write: the file that the user names appears whole and on disk, or what exists survives.

    The new file keeps the permissions of the old one, and a symbolic link keeps its target. A file that is not regular,
    such as a pipe or ``/dev/stdout``, is written in place.

    Raises:
        OSError: the file cannot be written; it names ``path``.
    """
    if path.absolute().is_relative_to("/dev") or (path.exists() and not path.is_file()):
        yield path
        return
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    try:
        with atomic_write(target) as new:
            yield new
            if target.exists():
                shutil.copymode(target, new)
            sync(new)
        sync(target.parent)
    except OSError as error:
        if error.filename is None or Path(error.filename) == new:
            error.filename = str(path)
        raise


def write_output(path: Path, text: str) -> None:
    """Write a text file that the user names, in UTF-8, with its line ends as they are.

    Raises:
        OSError: the file cannot be written; what exists survives.
    """
    with output_file(path) as new:
        new.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file that the user names.

    Raises:
        OSError: the file cannot be written; what exists survives.
    """
    write_output(path, json.dumps(content, indent=2) + "\n")
