"""What may be opened as a file: a pipe would be waited for, and a device has no end."""

from __future__ import annotations

import stat
from pathlib import Path


def regular_size(path: Path) -> int:
    """The size of a file in bytes.

    Raises:
        OSError: it is not there, or is a directory, a pipe or a device.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(0, "it is a directory, a pipe or a device, and no file")
    return found.st_size
