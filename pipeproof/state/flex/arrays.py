"""Where arrays stand in the files of Paddle's checkpoint: safetensors, or ``.distcp``, pickles of numpy's arrays."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.state.flex.codes import FlexError
from pipeproof.state.flex.pickles import Made, Name, Span, read_pickle
from pipeproof.state.header import StoredArray, read_header

DISTCP = ".distcp"
_NAMES_TABLE = "StructuredToParameterName@@"
"""Beside the arrays: Paddle's names of the parameters, which are not used here."""
_RECONSTRUCT = [Name(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")]
_TYPES = {
    **{f"f{size}": f"float{8 * size}" for size in (2, 4, 8)},
    **{f"{short}{size}": f"{name}{8 * size}" for short, name in (("i", "int"), ("u", "uint")) for size in (1, 2, 4, 8)},
    "b1": "bool",
}
_MEND = "save the checkpoint anew with `safetensors=True`"


def arrays_of(path: Path) -> Mapping[str, StoredArray]:
    """The arrays of a file by key; none is read.

    In a ``.distcp`` file bfloat16 is uint16: numpy has no type for it.

    Raises:
        StateError: the file is missing, cut short, or not one of arrays.
    """
    if path.suffix != DISTCP:
        return read_header(path).arrays
    content = read_pickle(path)
    if not isinstance(content, dict):
        raise FlexError(f"{path} holds no arrays by name", _MEND)
    return {key: _array(path, key, one) for key, one in content.items() if key != _NAMES_TABLE}


def is_type(stored: str, said: str) -> bool:
    """Whether arrays of the type ``said`` stand in a file as ``stored``."""
    return stored == said or (stored, said) == ("uint16", "bfloat16")


def _array(path: Path, key: Any, made: Any) -> StoredArray:
    """What numpy's ``ndarray.__reduce__`` writes: (version, shape, type, is in Fortran's order, bytes)."""
    if not isinstance(key, str) or not isinstance(made, Made) or made.what not in _RECONSTRUCT:
        asked = f"{made.what.module}.{made.what.name}" if isinstance(made, Made) else type(made).__name__
        raise FlexError(f"{path} has {asked} as {key!r}, and not an array; nothing of it was run", _MEND)
    try:
        _, shape, kind, is_fortran, content = made.state
        dtype, order = kind.arguments[0], kind.state[1]
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise FlexError(f"{path}: {key} is no array of numpy's: {error}", _MEND) from error
    if dtype not in _TYPES or order == ">" or not isinstance(content, Span) or (is_fortran and len(shape) > 1):
        raise FlexError(f"{path}: {key} is an array of a type or order that is not read: {order}{dtype}", _MEND)
    array = StoredArray(_TYPES[dtype], tuple(shape), content.start)
    if content.length != prod(shape) * dtype_bytes(array.dtype):
        raise FlexError(f"{path}: {key} has {content.length} bytes, and {array.num_bytes} make {list(shape)}", _MEND)
    return array
