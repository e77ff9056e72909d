"""The metadata of Paddle's checkpoint: which part of which tensor stands in which file.

It is a pickle of three dataclasses of ``paddle.distributed.flex_checkpoint.
dcp.metadata`` (Paddle 3.3): a ``Metadata`` with, by key, what the parts are
(``LocalTensorMetadata``), and by part (``LocalTensorIndex``) the file. A part
is a box of the whole tensor (``global_offset``, ``local_shape``), and of a
sharded optimizer's state a range of the flattened box (``flattened_range``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from pipeproof.state.flex.codes import FlexError
from pipeproof.state.flex.pickles import Made, Name, read_pickle
from pipeproof.state.flex.pickling import pickled

SUFFIX = ".metadata"
MODULE = "paddle.distributed.flex_checkpoint.dcp.metadata"
_MODULES = (MODULE, "paddle.distributed.checkpoint.metadata")
"""Where Paddle has the three classes, and where releases before 3.2 had them."""
_MEND = "save the checkpoint anew, or copy its metadata anew from where it was saved"


@dataclass(frozen=True, slots=True)
class FlexPart:
    """A part of a tensor, as Paddle says it: ``whole`` is the shape of the tensor, ``flat`` a range of the box."""

    key: str
    offsets: tuple[int, ...]
    extents: tuple[int, ...]
    flat: tuple[int, int] | None
    dtype: str
    whole: tuple[int, ...]
    file: str
    is_copy: bool = False
    """Another rank's file has it, too, and Paddle reads that one."""

    @property
    def numel(self) -> int:
        """How many elements the file has of it."""
        return prod(self.extents) if self.flat is None else self.flat[1] - self.flat[0]


def read_metadata(path: Path) -> tuple[FlexPart, ...]:
    """All parts that a metadata file speaks of.

    Raises:
        FlexError: it is no metadata of Paddle's, names a class that is none of Paddle's three, or says two things.
    """
    said = _fields(path, read_pickle(path), "Metadata")
    try:
        described, stored = said["state_dict_metadata"], said["storage_metadata"]
        shapes = _Shapes(path, described)
        return tuple(shapes.part(_fields(path, index, "LocalTensorIndex"), file) for index, file in stored.items())
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FlexError(f"{path} is no metadata of Paddle's: {error!r}", _MEND) from error


class _Shapes:
    """What the first table says of each part, to be found by what the second one says of it."""

    def __init__(self, path: Path, described: Mapping[str, Iterable[Any]]) -> None:
        self._path = path
        self._found: dict[tuple[Any, ...], tuple[str, tuple[int, ...]]] = {}
        self._extents: dict[tuple[Any, ...], tuple[int, ...]] = {}
        for key, parts in described.items():
            told = [_fields(path, part, "LocalTensorMetadata") for part in parts]
            boxes = [(_whole_numbers(one["global_offset"]), _whole_numbers(one["local_shape"])) for one in told]
            for one, (offsets, extents) in zip(told, boxes, strict=True):
                whole = one.get("global_shape")
                shape = _reach(boxes) if whole is None else _whole_numbers(whole)
                if not len(offsets) == len(extents) == len(shape):
                    raise FlexError(f"{path}: a part of {key} is not of as many dims as the tensor", _MEND)
                place = (key, offsets, _flat_of(one))
                for known in ((*place, extents), (*place, None)):  # older releases have no shape in the index
                    self._found[known] = one["dtype"], shape
                    self._extents[known] = extents

    def part(self, index: Mapping[str, Any], file: str) -> FlexPart:
        key, offsets, flat = index["tensor_key"], _whole_numbers(index["global_offset"]), _flat_of(index)
        extents = None if index.get("local_shape") is None else _whole_numbers(index["local_shape"])
        place = (key, offsets, flat, extents)
        if place not in self._found:
            where = f"the part of {key} at {list(offsets)}"
            raise FlexError(f"{self._path} names a file for {where}, and does not say what it is", _MEND)
        if not isinstance(file, str) or Path(file).name != file:
            raise FlexError(f"{self._path}: {key} is to stand in {file!r}, which is no name of a file beside", _MEND)
        dtype, shape = self._found[place]
        if flat is not None and not 0 <= flat[0] <= flat[1] <= prod(self._extents[place]):
            raise FlexError(f"{self._path}: {list(flat)} is no range of {key}'s part at {list(offsets)}", _MEND)
        return FlexPart(key, offsets, self._extents[place], flat, dtype, shape, file, bool(index.get("replica_id")))


def _fields(path: Path, made: Any, name: str) -> Mapping[str, Any]:
    """The fields of an instance of one of Paddle's three classes."""
    if not isinstance(made, Made):
        raise FlexError(f"{path} has {type(made).__name__} where Paddle's {name} should be", _MEND)
    if made.what not in [Name(module, name) for module in _MODULES] or made.arguments:
        asked = f"{made.what.module}.{made.what.name}"
        raise FlexError(
            f"{path} asks for {asked} where Paddle's {name} should be; nothing of it was run",
            "a pickle runs what it names when Paddle loads it: do not load this file, and ask where it comes from",
        )
    if not isinstance(made.state, dict):
        raise FlexError(f"{path}: a {name} has no fields", _MEND)
    return made.state


def _flat_of(one: Mapping[str, Any]) -> tuple[int, int] | None:
    if not one.get("is_flattened") or one.get("flattened_range") is None:
        return None
    start, stop = _whole_numbers(one["flattened_range"])
    return start, stop


def _reach(boxes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> tuple[int, ...]:
    """The shape where none is said: how far the parts go."""
    stops = [tuple(start + length for start, length in zip(*box, strict=True)) for box in boxes]
    return tuple(map(max, zip(*stops, strict=True)))


def _whole_numbers(values: Any) -> tuple[int, ...]:
    numbers = tuple(values)
    if not all(type(value) is int and value >= 0 for value in numbers):
        raise ValueError(f"{values!r} are no whole numbers")
    return numbers


def metadata_of(parts: Iterable[FlexPart]) -> bytes:
    """A metadata file that speaks of ``parts``, as Paddle reads it."""
    described, stored = dict[str, list[Made]](), dict[Made, str]()
    for part in parts:
        place = {
            "global_offset": part.offsets,
            "local_shape": part.extents,
            "is_flattened": part.flat is not None,
            "flattened_range": part.flat,
        }
        told = {**place, "dtype": part.dtype, "global_shape": part.whole}
        described.setdefault(part.key, []).append(Made(Name(MODULE, "LocalTensorMetadata"), (), told))
        index = {**place, "tensor_key": part.key, "replica_id": 1 if part.is_copy else None}
        stored[Made(Name(MODULE, "LocalTensorIndex"), (), index)] = part.file
    tables = {
        "state_dict_metadata": described,
        "storage_metadata": stored,
        "flat_mapping": {key: (key,) for key in described},
    }
    return pickled(Made(Name(MODULE, "Metadata"), (), tables))
