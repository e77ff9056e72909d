"""Files of others: opened as regular files of a limited size; JSON and TOML decoded with a limit of depth.

All readers open files here: no input blocks, and a file that is larger than its kind can be is not read whole. Every
text that cannot be decoded raises the same error.

Python's own depth limit differs between its versions and raises RecursionError. Also a value that Python still decodes
can be too deep for later code.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Literal, TextIO, TypeVar

from pipeproof.system_calls import open_to_read

MAX_DEPTH = 64
"""Most objects and lists in one another."""
MOST_RANKS = 2**20
"""Most ranks that a plan, the log of a rank or a ring may state: what is made for each of them stays small."""
MOST_JSON_BYTES = 2**26
"""Largest JSON file that is decoded as a whole, where its kind has no smaller limit."""
OF_OTHER_TRAINERS = re.compile(
    r"""^(\s*["']?pipe[-_]parallel[-_]size|\s*["']?train_(micro_)?batch_size|\s*["']?zero_optimization|cutoff_len"""
    r"|actor_train|  megatron_cfg|  pp_size|  pp_engine|  pre_trainer)[\w\"']*:|^\s*megatron (sft|pt|rlhf)\b",
    re.MULTILINE,
)
"""Keys of gpt-neox, DeepSpeed, LLaMA-Factory, ROLL, NeMo-RL, NeMo Automodel, nanotron, Primus; commands of ms-swift."""
NOT_READ = (
    "a file of a trainer that is not read: call `pipeproof.interop.from_arguments` in its process, or give the block "
    "of arguments that it prints"
)
"""Description of their files, with what to give instead."""
MALFORMED = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, ZeroDivisionError, RecursionError,
)  # fmt: skip
"""Errors of code that reads the parts of a decoded value, if the value has an unexpected form."""
Decoded = TypeVar("Decoded")
_TOO_DEEP = f"values are nested more than {MAX_DEPTH} deep"


class ForeignTextError(ValueError):
    """A text cannot be decoded, is nested too deeply, has too long a number, or needs more memory than there is."""


class IncompleteValueError(ForeignTextError):
    """No JSON value was found: there is none, or its end is missing."""


def open_foreign(path: Path, max_bytes: int | None = None) -> BinaryIO:
    """Open a file; without ``max_bytes`` the caller reads it part by part.

    Raises:
        OSError: It cannot be opened, is a directory, a pipe or a device, or has more than ``max_bytes``.
    """
    stream = os.fdopen(open_to_read(path), "rb")
    if max_bytes is not None and os.fstat(stream.fileno()).st_size > max_bytes:
        stream.close()
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", str(path))
    return stream


def read_foreign(path: Path, max_bytes: int = MOST_JSON_BYTES) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: As of `open_foreign`.
    """
    with open_foreign(path, max_bytes) as stream:
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:  # the file grows, or is in /proc and has no size
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", str(path))
    return content


def open_foreign_text(
    path: Path, *, errors: Literal["strict", "replace"] = "strict", newline: str | None = None
) -> TextIO:
    """Open a text in UTF-8, also compressed by gzip; the caller must bound its reads.

    Raises:
        OSError: As of `open_foreign`; reading can raise it, too, with EOFError and UnicodeDecodeError.
    """
    stream = open_foreign(path)
    content: Any = stream
    if stream.peek(2)[:2] == b"\x1f\x8b":  # type: ignore[attr-defined]  # of BufferedReader
        content = gzip.GzipFile(fileobj=stream)
    return io.TextIOWrapper(content, encoding="utf-8", errors=errors, newline=newline)


def regular_size(path: Path) -> int:
    """Return the size of a regular file in bytes.

    Raises:
        OSError: As of `open_foreign`.
    """
    with open_foreign(path) as stream:
        return os.fstat(stream.fileno()).st_size


def decode_json(
    text: str | bytes | bytearray, *, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """Decode a JSON text; ``object_pairs_hook`` is as in ``json.loads``.

    Raises:
        ForeignTextError: It cannot be decoded, or has more than ``MAX_DEPTH`` levels.
    """
    value = _guarded(lambda: json.loads(text, object_pairs_hook=object_pairs_hook))
    brackets = (b"[", b"{") if isinstance(text, bytes | bytearray) else ("[", "{")
    if sum(map(text.count, brackets)) > MAX_DEPTH:  # type: ignore[arg-type]
        _require_shallow(value)
    return value


def decode_json_value(decoder: json.JSONDecoder, text: str, at: int) -> tuple[Any, int]:
    """Decode the JSON value that begins at a place of a text; return it, and the place after it.

    Raises:
        IncompleteValueError: There is no value, or the text ends within it.
        ForeignTextError: It has more than ``MAX_DEPTH`` levels, or a number of too many digits.
    """
    try:
        value, end = _guarded(lambda: decoder.raw_decode(text, at))
    except ForeignTextError as error:
        if isinstance(error.__cause__, json.JSONDecodeError):
            raise IncompleteValueError(str(error)) from error
        raise
    if text.count("[", at, end) + text.count("{", at, end) > MAX_DEPTH:
        _require_shallow(value)
    return value, end


def decode_toml(text: str) -> dict[str, Any]:
    """Decode a TOML text; a dotted key has a level for each dot.

    Raises:
        ForeignTextError: It cannot be decoded, or has more than ``MAX_DEPTH`` levels.
    """
    import tomllib  # few commands read TOML

    value: dict[str, Any] = _guarded(lambda: tomllib.loads(text))
    _require_shallow(value)
    return value


def _guarded(decode: Callable[[], Decoded]) -> Decoded:
    try:
        return decode()
    except ValueError as error:  # invalid, no UTF-8, or a number of thousands of digits
        raise ForeignTextError(str(error)) from error
    except RecursionError as error:
        raise ForeignTextError(_TOO_DEEP) from error
    except MemoryError as error:
        raise ForeignTextError("its values need more memory than this process can have") from error


def _require_shallow(value: Any) -> None:
    """Raise ForeignTextError if lists and dicts are more than ``MAX_DEPTH`` deep. Does not recurse."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list))
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
        if not level:
            return
    raise ForeignTextError(_TOO_DEEP)
