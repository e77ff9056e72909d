"""The seal of a file that no index speaks of: the SHA-256 of itself, in the metadata of its own header.

It is that of the whole file, header and tensors, as it is with 64 times ``-``
where the seal stands. So it is written when all else is: a file is taken to be
unfinished as long as one ``-`` is left.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from pipeproof.state.codes import StateError, reading
from pipeproof.state.files import digest_of
from pipeproof.state.header import header_bytes

SEAL_KEY = "pipeproof_sha256"
UNSEALED = "-" * 64
_SEAL = re.compile("[0-9a-f]{64}")
_MEND = "copy the file anew from where it was saved; who changes it on purpose leaves its `pipeproof_sha256` out"


def place_of_seal(start: bytes, seal: str = UNSEALED) -> int:
    """The byte of the file where a seal begins; ``start`` is all before the first tensor. -1: it is not there."""
    before = f'"{SEAL_KEY}":"'.encode()  # within a name, quotes have a backslash each
    found = start.find(before + seal.encode() + b'"')
    return found + len(before) if found >= 0 else -1


def unsealed(start: bytes, seal: str) -> bytes:
    """The beginning of a file as it was before it was sealed."""
    place = place_of_seal(start, seal)
    return start if place < 0 else start[:place] + UNSEALED.encode() + start[place + len(UNSEALED) :]


def seal_in(metadata: Mapping[str, str], path: Path) -> str | None:
    """The seal of a file; None for files of other tools.

    Raises:
        StateError: it was never finished.
    """
    seal = metadata.get(SEAL_KEY)
    if seal is not None and not _SEAL.fullmatch(seal):
        message = f"{path} was not written to its end: `{SEAL_KEY}` in its metadata is no SHA-256"
        raise StateError(message, "make it anew: the same command goes on where it was ended")
    return seal


def require_sealed(path: Path, seal: str, between: Callable[[], None] = lambda: None) -> None:
    """Refuse a file that is not as it was when it got its seal; ``between`` is as for ``digest_of``.

    Raises:
        StateError: a byte of it was changed, or it cannot be read.
    """
    with reading(path, _MEND):
        sha256 = digest_of(path, between, unsealed(header_bytes(path), seal))
    if sha256 != seal:
        raise StateError(f"{path} was changed: its SHA-256 is not the {seal[:12]}.. that it has of itself", _MEND)
