"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield the path of a hidden file to write, which replaces ``path`` at the end of the block.

    After an error the hidden file is removed. If the process is killed in the block, ``path`` is unchanged and
    ``.NAME.PID`` remains. Nothing is synchronized: a power loss may leave an empty file.

    Raises:
        OSError: the file cannot take its place.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
