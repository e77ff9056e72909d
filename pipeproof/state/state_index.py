"""The index of a saved state: an entry for each tensor, and the shards in each file.

The index and the files are enough to assemble any tensor, and to shard it differently. A shard is a region of the whole
tensor: its ``offsets`` and ``extents`` along each dim. If an optimizer is sharded over data-parallel ranks, a shard is
a range of such a region, flattened in C order (``flat``). Every element of a tensor is in one file exactly once, for
any number of ranks that held it.

The files are safetensors; the key of a shard in its file is the tensor's name.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from pipeproof.foreign_text import decode_json, read_foreign
from pipeproof.state.regions import Region, flat_regions
from pipeproof.state.state_codes import StateError, reading

INDEX_FILE = "index.json"
_PROVENANCE = ".provenance.json"
MAX_BYTES = 2**28
"""Largest index that is read."""

_Count = Annotated[int, Field(ge=0)]
_Dims = Annotated[tuple[_Count, ...], Field(strict=False)]
_BY_NAME: dict[str, JsonValue] = {"required": []}
"""Schema of a mapping whose keys are names: none is required."""
_Keys: TypeAlias = Annotated[dict[str, str], Field(json_schema_extra=_BY_NAME)]
Sharding: TypeAlias = Annotated[dict[str, _Count | Literal["flat"]], Field(json_schema_extra=_BY_NAME)]
TensorKind = Literal["weight", "moment", "counter", "expert_bias"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TensorEntry(_Frozen):
    """One whole tensor of the state."""

    kind: TensorKind = Field(
        description="`weight`: updated by the optimizer; `moment`: an optimizer state of a weight's shape; `counter`: "
        "a scalar optimizer state; `expert_bias`: the bias of a router's choice."
    )
    dtype: str = Field(description="Type of the elements.")
    shape: _Dims = Field(description="Shape of the whole tensor.")
    weight: str | None = Field(default=None, description="The weight of a moment or counter.")
    cut: Sharding | None = Field(
        default=None,
        description="By axis of the mesh: the dim along which its ranks have shards, in their order; `flat`: each rank "
        "has a range of the flattened region. Empty if it is not sharded; absent if unknown.",
    )

    def is_same(self, other: TensorEntry) -> bool:
        """Return True for the same tensor, with any sharding."""
        return (self.kind, self.dtype, self.shape, self.weight) == (other.kind, other.dtype, other.shape, other.weight)


class Shard(_Frozen):
    """A shard of a tensor, in the file that lists it."""

    tensor: str = Field(description="Name of the tensor, and its key in the file, unless the file has `keys`.")
    offsets: _Dims = Field(description="Begin of the shard in the whole tensor, per dim.")
    extents: _Dims = Field(description="Size of the shard, per dim.")
    flat: Annotated[tuple[_Count, _Count], Field(strict=False)] | None = Field(
        default=None,
        description="The half-open range of the region, flattened in C order, that the file has; absent for all of it.",
    )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the file."""
        return self.extents if self.flat is None else (self.flat[1] - self.flat[0],)

    def regions(self) -> Iterator[tuple[int, Region]]:
        """Yield its elements as regions of the whole tensor.

        Each region is one range of the file, and comes with the number of elements before it.
        """
        if self.flat is None:
            yield 0, Region(self.offsets, self.extents)
            return
        first = 0
        for region in flat_regions(self.extents, self.flat):
            yield first, region.shifted(self.offsets)
            first += region.numel

    @model_validator(mode="after")
    def _require_consistent(self) -> Self:
        if len(self.offsets) != len(self.extents):
            raise ValueError("offsets and extents are not of as many dims")
        if self.flat is not None and not self.flat[0] < self.flat[1] <= prod(self.extents):
            raise ValueError("flat is not a range of the shard")
        return self


class ShardFile(_Frozen):
    """One file, written by one rank."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9._-]+$", description="Name of a file next to the index; not used in a provenance file."
    )
    rank: _Count = Field(description="The rank that wrote it.")
    size_bytes: _Count = Field(description="Its size.")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="The SHA-256 of the whole file.")
    shards: Annotated[tuple[Shard, ...], Field(strict=False)] = Field(description="Shards in the file.")
    keys: _Keys | None = Field(
        default=None,
        description="Keys of tensors in the file that differ from their names: in files that Paddle wrote.",
    )

    def key_of(self, tensor: str) -> str:
        """Return the key of a tensor in the file."""
        return (self.keys or {}).get(tensor, tensor)


class DataPosition(_Frozen):
    """Data that training has used: the micro-batches of all data-parallel ranks."""

    steps: _Count = Field(description="Number of optimizer steps.")
    sequences: _Count = Field(description="Number of sequences in these steps.")
    tokens: _Count | None = Field(default=None, description="Number of tokens; absent if the length is unknown.")


class StateIndex(_Frozen):
    """Content of ``index.json``, and of the provenance file of a merged file."""

    pipeproof_state: Literal[1] = Field(description="Version of the format.")
    steps_done: _Count = Field(
        description="Number of optimizer steps done. 0: weights alone, of any origin, from which training starts."
    )
    digest: str = Field(description="Digest of the plan that saved it, or for which it was resharded.")
    from_beginning: bool = Field(
        default=True,
        description="True if that plan alone made it, from step 0 on. False after steps of another plan, which adds in "
        "another order, or if it started from other weights.",
    )
    data_before: DataPosition | None = Field(
        default=None,
        description="Data used before the micro-batches of a step changed last; absent if all steps had the "
        "micro-batches of `values` and `mesh`.",
    )
    framework: str = Field(description="`run.backend` of that plan.")
    versions: dict[str, str] = Field(
        json_schema_extra=_BY_NAME, description="Versions of pipeproof, the framework, numpy and Python."
    )
    mesh: dict[str, int] = Field(json_schema_extra=_BY_NAME, description="Sizes of the mesh's axes, the fastest first.")
    values: dict[str, JsonValue] = Field(
        json_schema_extra=_BY_NAME, description="Keys of the plan that values depend on, dotted."
    )
    tensors: dict[str, TensorEntry] = Field(
        json_schema_extra=_BY_NAME,
        description="The tensors by name. Empty in the provenance of a file whose tensors have other names.",
    )
    files: Annotated[tuple[ShardFile, ...], Field(strict=False)] = Field(description="The files.")
    sha256: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{64}$",
        description="SHA-256 of the index itself: of its JSON without this key, with sorted keys and no white space.",
    )

    @property
    def is_weights_only(self) -> bool:
        """True if the state has no optimizer states: an optimizer then starts from its initial state."""
        return self.steps_done == 0

    @model_validator(mode="after")
    def _require_consistent(self) -> Self:
        unprintable = next((name for name in self.tensors if not name.isprintable()), None)
        if unprintable is not None:
            raise ValueError(f"{unprintable!a} is not a name of a tensor: it is not printable")
        after_step = (name for name, entry in self.tensors.items() if entry.kind in ("moment", "counter"))
        first = next(after_step, None) if self.is_weights_only else None
        if first is not None:
            raise ValueError(f"steps_done is 0, and {first} is what an optimizer has after a step")
        return self


def read_index(directory: Path) -> StateIndex:
    """Return the index of the state in ``directory``.

    Raises:
        StateError: There is none, or it cannot be read.
    """
    return _read(directory / INDEX_FILE, "name a directory that `pipeproof run --save` wrote")


def provenance_file(path: Path) -> Path:
    """Return the provenance file of a merged file: the index of its content, next to it.

    The merged file itself has only its tensors: files of equal content are equal.
    """
    return path.with_name(path.name + _PROVENANCE)


def read_provenance(path: Path) -> StateIndex | None:
    """Return the provenance of a merged file, with one file; None if there is none, as for files of other tools.

    Raises:
        StateError: It cannot be read.
    """
    file = provenance_file(path)
    if not os.path.lexists(file):
        return None
    fix = "copy it again from where the file was written; remove it to use the file without its origin"
    provenance = _read(file, fix)
    if len(provenance.files) != 1:
        raise StateError(f"{file} must describe one file, and lists {len(provenance.files)}", fix)
    return provenance


def _read(file: Path, fix: str) -> StateIndex:
    with reading(file, fix):
        content = read_foreign(file, MAX_BYTES)
    return parse_index(content, str(file), fix)


def parse_index(content: bytes | str, name: str, fix: str) -> StateIndex:
    """Return the index in a text; ``name`` names the text in messages.

    Raises:
        StateError: The text is not an index, or its SHA-256 differs from the value that it contains.
    """
    try:
        index = StateIndex.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(map(str, first["loc"])) or "the whole of it"
        raise StateError(f"{name} is not the index of a state: {location}: {first['msg']}", fix) from error
    if index.sha256 is not None and index.sha256 != _sha256_without_itself(content):
        raise StateError(
            f"{name} was changed: its SHA-256 is not the {index.sha256[:12]}.. that it has of itself",
            "copy the state again from where it was saved; to change an index on purpose, remove its `sha256`",
        )
    return index


def index_text(index: StateIndex) -> str:
    """Return the text of the index file, with the SHA-256 of itself: a changed offset would move values."""
    bare = index.model_copy(update={"sha256": None}).model_dump_json(exclude_none=True)
    whole = index.model_copy(update={"sha256": _sha256_without_itself(bare)})
    return whole.model_dump_json(indent=1, exclude_none=True) + "\n"


def _sha256_without_itself(content: bytes | str) -> str:
    try:
        whole = decode_json(content)
    except ValueError:  # a number with more digits than Python reads: not from a saved index
        return ""
    bare = {key: value for key, value in whole.items() if key != "sha256"}
    text = json.dumps(bare, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def state_json_schema() -> dict[str, Any]:
    """Return the JSON Schema of an index; ``docs/schemas`` has it as a file."""
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "pipeproof: index of a saved state"}
    return {**StateIndex.model_json_schema(), **dialect}
