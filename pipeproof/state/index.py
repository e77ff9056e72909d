"""The index of a saved state: for each tensor what it is, for each file which parts of which tensors it holds.

Any tensor of the state can be put together, and cut in another way, from the
index and the files alone. A part is a box of the whole tensor: where it
begins (``offsets``) and how far it goes (``extents``) along each dim. Where an
optimizer is sharded over data-parallel ranks, a part is a range of such a box,
flattened in C order (``flat``). Every element of a tensor stands in one file
exactly once, whatever the number of ranks that held it.

The files are safetensors; the key of a part in its file is the tensor's name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from pipeproof.state.boxes import Box, flat_boxes
from pipeproof.state.codes import StateError, reading
from pipeproof.state.regular import regular_size

INDEX_FILE = "index.json"
MAX_BYTES = 2**28
"""Largest index that is read."""

_Count = Annotated[int, Field(ge=0)]
_Dims = Annotated[tuple[_Count, ...], Field(strict=False)]
_BY_NAME: dict[str, JsonValue] = {"required": []}
"""For a mapping whose keys are names: none of them must be there."""
_Keys: TypeAlias = Annotated[dict[str, str], Field(json_schema_extra=_BY_NAME)]
Cut: TypeAlias = Annotated[dict[str, _Count | Literal["flat"]], Field(json_schema_extra=_BY_NAME)]
TensorKind = Literal["weight", "moment", "counter", "expert_bias", "buffer"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TensorEntry(_Part):
    """One tensor of the state, whole."""

    kind: TensorKind = Field(
        description="`weight`: what the optimizer updates; `moment`: what it keeps, of a weight's shape; `counter`: "
        "what it keeps beside; `expert_bias`: what moves a router's choice; `buffer`: what an own layer changes "
        "beside; of several data-parallel replicas each has its own, and they stand along dim 0."
    )
    dtype: str = Field(description="Type of the elements.")
    shape: _Dims = Field(description="The whole tensor's, as if there were one rank.")
    weight: str | None = Field(default=None, description="Of which weight a moment or counter is.")
    cut: Cut | None = Field(
        default=None,
        description="By axis of the mesh the dim along which its ranks have parts, in their order; `flat`: each has a "
        "range of the flattened part. Empty where it is not cut; not there where nobody said.",
    )

    def is_same(self, other: TensorEntry) -> bool:
        """Whether both are one tensor, however it is cut."""
        return (self.kind, self.dtype, self.shape, self.weight) == (other.kind, other.dtype, other.shape, other.weight)


class Shard(_Part):
    """A part of a tensor, in the file that names it."""

    tensor: str = Field(description="Name of the tensor, and key in the file, if that has no `keys`.")
    offsets: _Dims = Field(description="Where the part begins in the whole tensor, per dim.")
    extents: _Dims = Field(description="How far it goes, per dim.")
    flat: Annotated[tuple[_Count, _Count], Field(strict=False)] | None = Field(
        default=None,
        description="The half-open range of the part, flattened in C order, that the file has; without it, all.",
    )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the file."""
        return self.extents if self.flat is None else (self.flat[1] - self.flat[0],)

    def boxes(self) -> Iterator[tuple[int, Box]]:
        """Its elements as boxes of the whole tensor, each one range of what the file has; how many stand before it."""
        if self.flat is None:
            yield 0, Box(self.offsets, self.extents)
            return
        first = 0
        for box in flat_boxes(self.extents, self.flat):
            yield first, box.moved(self.offsets)
            first += box.numel

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        if len(self.offsets) != len(self.extents):
            raise ValueError("offsets and extents are not of as many dims")
        if self.flat is not None and not self.flat[0] < self.flat[1] <= prod(self.extents):
            raise ValueError("flat is no range of the part")
        return self


class ShardFile(_Part):
    """One file, written by one rank."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$", description="Beside the index.")
    rank: _Count = Field(description="The rank that wrote it.")
    size_bytes: _Count = Field(description="Its size.")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="The SHA-256 of the whole file.")
    shards: Annotated[tuple[Shard, ...], Field(strict=False)] = Field(description="The parts that it holds.")
    keys: _Keys | None = Field(
        default=None,
        description="By tensor its key in the file, where that is not its name: in files that Paddle wrote.",
    )

    def key_of(self, tensor: str) -> str:
        """Under which key the file has its part of a tensor."""
        return (self.keys or {}).get(tensor, tensor)


class StateIndex(_Part):
    """What stands in ``index.json``."""

    pipeproof_state: Literal[1] = Field(description="Version of the format.")
    steps_done: _Count = Field(
        description="Optimizer steps behind this state; the next counts. 0: these are weights alone, of whatever "
        "origin, from which training begins."
    )
    digest: str = Field(description="Digest of the plan that saved it, or for which it was cut anew.")
    from_beginning: bool = Field(
        default=True,
        description="Whether that plan alone made it, from step 0 on. Where it is false, steps of another plan, "
        "which adds in another order, or other weights are behind it.",
    )
    framework: str = Field(description="`run.backend` of that plan.")
    versions: dict[str, str] = Field(
        json_schema_extra=_BY_NAME, description="Of pipeproof, the framework, numpy and Python."
    )
    mesh: dict[str, int] = Field(
        json_schema_extra=_BY_NAME, description="Sizes of the mesh's axes, from the fastest on."
    )
    values: dict[str, JsonValue] = Field(
        json_schema_extra=_BY_NAME, description="Keys of the plan on which values depend, dotted."
    )
    tensors: dict[str, TensorEntry] = Field(json_schema_extra=_BY_NAME, description="The tensors by name.")
    files: Annotated[tuple[ShardFile, ...], Field(strict=False)] = Field(description="The files.")
    sha256: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{64}$",
        description="The SHA-256 of the index itself: of its JSON without this key, keys sorted and nothing between.",
    )

    @property
    def is_weights_only(self) -> bool:
        """Whether an optimizer is to begin anew with it."""
        return self.steps_done == 0

    @model_validator(mode="after")
    def _says_one_thing(self) -> Self:
        odd = next((name for name in self.tensors if not name.isprintable()), None)
        if odd is not None:
            raise ValueError(f"{odd!a} is no name of a tensor: it is not printable")
        made = (name for name, one in self.tensors.items() if one.kind in ("moment", "counter"))
        first = next(made, None) if self.is_weights_only else None
        if first is not None:
            raise ValueError(f"steps_done is 0, and {first} is what an optimizer has after a step")
        return self


def read_index(directory: Path) -> StateIndex:
    """The index of the state in ``directory``.

    Raises:
        StateError: there is none, or it cannot be read.
    """
    file = directory / INDEX_FILE
    mend = "name a directory that `pipeproof run --save` wrote"
    with reading(file, mend):
        if regular_size(file) > MAX_BYTES:
            raise StateError(f"{file} has more than {MAX_BYTES} bytes", mend)
        content = file.read_bytes()
    return parse_index(content, str(file), mend)


def parse_index(content: bytes | str, where: str, mend: str) -> StateIndex:
    """The index in a text; ``where`` that stands, for people.

    Raises:
        StateError: it is none, or has not the SHA-256 that it has of itself.
    """
    try:
        index = StateIndex.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole of it"
        raise StateError(f"{where} is not the index of a state: {place}: {first['msg']}", mend) from error
    if index.sha256 is not None and index.sha256 != _own_sha256(content):
        raise StateError(
            f"{where} was changed: its SHA-256 is not the {index.sha256[:12]}.. that it has of itself",
            "copy the state anew from where it was saved; who changes an index on purpose leaves its `sha256` out",
        )
    return index


def index_text(index: StateIndex, indent: int | None = 1) -> str:
    """The index as its file has it, with the SHA-256 of itself: a place of a part that is changed moves values."""
    bare = index.model_copy(update={"sha256": None}).model_dump_json(exclude_none=True)
    whole = index.model_copy(update={"sha256": _own_sha256(bare)})
    return whole.model_dump_json(indent=indent, exclude_none=True) + ("\n" if indent else "")


def _own_sha256(content: bytes | str) -> str:
    try:
        whole = json.loads(content)
    except ValueError:  # a number of more digits than Python reads: nothing that was written here
        return ""
    bare = {key: value for key, value in whole.items() if key != "sha256"}
    text = json.dumps(bare, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def state_json_schema() -> dict[str, Any]:
    """The JSON Schema of an index; ``docs/schemas`` has it as a file."""
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "pipeproof: index of a saved state"}
    return {**StateIndex.model_json_schema(), **dialect}
