"""The file ``.metadata`` of PyTorch's distributed checkpoint (DCP): the chunks of each tensor, and their files.

It is a pickle of dataclasses of ``torch.distributed.checkpoint.metadata`` (PyTorch 2.3 to 2.13). ``Metadata`` has two
tables: ``state_dict_metadata`` by name (a ``TensorStorageMetadata`` with type, shape and chunks, or
``BytesStorageMetadata`` for any other object), and ``storage_data`` by name and offsets (``MetadataIndex``) the file
and the bytes in it (``_StorageInfo``). Of the ranks that hold the same chunk, one has written it.

PyTorch's own ``FileSystemReader.read_metadata`` calls ``pickle.load`` (2.13 too): it executes everything that the file
names. So this module reads and checks the file before PyTorch opens a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeproof.diagnostics.problems import grouped
from pipeproof.foreign_text import MALFORMED
from pipeproof.state.flex.pickles import (
    ForeignNameError,
    GlobalName,
    PickledObject,
    UnreadablePickleError,
    unpickled,
    whole_numbers,
)
from pipeproof.state.state_codes import DcpError, is_file_name, reading
from pipeproof.state.torch_archive import FIX

METADATA_FILE = ".metadata"
_MODULE = "torch.distributed.checkpoint.metadata"
_INFO = GlobalName("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_SIZE = GlobalName("torch", "Size")
_LAYOUT = GlobalName("torch.serialization", "_get_layout")
_CLASSES = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
_ALLOWED = {
    *(GlobalName(_MODULE, name) for name in _CLASSES),
    _INFO,
    _SIZE,
    _LAYOUT,
    *(GlobalName("pathlib", name) for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")),
    *(GlobalName("pathlib._local", name) for name in ("PosixPath", "WindowsPath")),
    GlobalName("collections", "OrderedDict"),
}
_DTYPES = frozenset(
    {
        *(f"float{bits}" for bits in (16, 32, 64)),
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
        "bfloat16",
        "bool",
        "float8_e4m3fn",
        "float8_e5m2",
    }
)
"""Types of tensors that are read, under PyTorch's names, which are also pipeproof's."""
_ANY_DTYPE = re.compile(r"bool|(bfloat|float|u?int|complex|quint|qint)\d+\w*")
"""Names of PyTorch's types; one that is not supported is refused later, with the name of the tensor."""
_FIX_FOREIGN = "PyTorch executes what a pickle names: do not load this file, and check its origin"


@dataclass(frozen=True, slots=True)
class DcpChunk:
    """A region of a tensor; the archive of its elements is at the bytes ``start`` to ``start + length`` of a file."""

    offsets: tuple[int, ...]
    extents: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A whole tensor, and its chunks."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[DcpChunk, ...]


@dataclass(frozen=True, slots=True)
class DcpObject:
    """An object other than a tensor, such as a learning rate: an archive of ``torch.save`` in a file."""

    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """Tensors and other objects of a checkpoint by name."""

    tensors: Mapping[str, DcpTensor]
    objects: Mapping[str, DcpObject]

    def spans(self) -> Mapping[str, int]:
        """Return by file the bytes that it must have at least."""
        chunks = (chunk for tensor in self.tensors.values() for chunk in tensor.chunks)
        stored: Iterable[DcpChunk | DcpObject] = (*chunks, *self.objects.values())
        ends = grouped((each.file, each.start + each.length) for each in stored)
        return {file: max(of_file) for file, of_file in ends.items()}


def read_metadata(directory: Path) -> DcpMetadata:
    """Return the content of a checkpoint's ``.metadata``. Nothing that it names is imported or executed.

    Raises:
        DcpError: It is not metadata of DCP, names anything except the classes of DCP, or contradicts itself.
        StateError: It cannot be read.
    """
    path = directory / METADATA_FILE
    with reading(path, FIX):
        try:
            metadata = _fields(path, unpickled(path, allows=_is_allowed), "Metadata")
        except ForeignNameError as error:
            message = f"{path} names {error}, which no metadata of DCP has; nothing of it was executed"
            raise DcpError(message, _FIX_FOREIGN) from error
        except UnreadablePickleError as error:
            raise DcpError(f"{path} is damaged, or no metadata of PyTorch's DCP: {error}", FIX) from error
    try:
        return _metadata(path, metadata)
    except MALFORMED as error:
        raise DcpError(f"{path} is not metadata of PyTorch's DCP: {error!r}", FIX) from error


def _is_allowed(global_name: GlobalName) -> bool:
    is_dtype = global_name.module == "torch" and _ANY_DTYPE.fullmatch(global_name.name) is not None
    return global_name in _ALLOWED or is_dtype


def _metadata(path: Path, metadata: Mapping[str, Any]) -> DcpMetadata:
    stored = dict[tuple[str, tuple[int, ...] | None], DcpObject]()
    for index, info in metadata["storage_data"].items():
        fields, storage = _fields(path, index, "MetadataIndex"), _fields(path, info, "_StorageInfo")
        if storage.get("transform_descriptors"):
            transforms = ", ".join(map(str, storage["transform_descriptors"]))
            raise DcpError(f"{path}: {fields['fqn']} is stored as {transforms}", "save it without `_extensions`")
        offsets = None if fields.get("offset") is None else _sizes(fields["offset"])
        stored[_text(fields["fqn"]), offsets] = _place(path, fields["fqn"], storage)
    tensors, objects = dict[str, DcpTensor](), dict[str, DcpObject]()
    for name, entry in metadata["state_dict_metadata"].items():
        if entry.global_name == GlobalName(_MODULE, "BytesStorageMetadata"):
            objects[_text(name)] = _stored_at(path, stored, name, None)
            continue
        fields = _fields(path, entry, "TensorStorageMetadata")
        shape, dtype = _sizes(fields["size"]), _dtype(path, name, fields["properties"])
        chunks = []
        for chunk in fields["chunks"]:
            part = _fields(path, chunk, "ChunkStorageMetadata")
            offsets, extents = _sizes(part["offsets"]), _sizes(part["sizes"])
            if not len(offsets) == len(extents) == len(shape):
                raise DcpError(f"{path}: a chunk of {name} and the tensor differ in their number of dims", FIX)
            archive = _stored_at(path, stored, name, offsets)
            chunks.append(DcpChunk(offsets, extents, archive.file, archive.start, archive.length))
        tensors[_text(name)] = DcpTensor(dtype, shape, tuple(chunks))
    return DcpMetadata(tensors, objects)


def _stored_at(
    path: Path,
    stored: Mapping[tuple[str, tuple[int, ...] | None], DcpObject],
    name: str,
    offsets: tuple[int, ...] | None,
) -> DcpObject:
    if (name, offsets) not in stored:
        where = name if offsets is None else f"the chunk of {name} at {list(offsets)}"
        raise DcpError(f"{path} has no file for {where}", FIX)
    return stored[name, offsets]


def _place(path: Path, name: str, info: Mapping[str, Any]) -> DcpObject:
    file, start, length = info["relative_path"], *whole_numbers((info["offset"], info["length"]))
    if not is_file_name(file):
        raise DcpError(f"{path}: {name} is in {file!r}, which does not name a file next to it", FIX)
    return DcpObject(file, start, length)


def _dtype(path: Path, name: str, properties: Any) -> str:
    if not isinstance(properties, PickledObject) or not isinstance(properties.state, tuple):
        raise DcpError(f"{path}: {name} has no properties", FIX)
    dtype = properties.state[0]
    if not isinstance(dtype, GlobalName) or dtype.module != "torch" or dtype.name not in _DTYPES:
        shown = dtype.name if isinstance(dtype, GlobalName) else repr(dtype)
        fix = "remove such tensors, or convert them to a type of safetensors files"
        raise DcpError(f"{path}: {name} has the type {shown}, which is not supported", fix)
    return dtype.name


def _fields(path: Path, instance: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(instance, PickledObject) or instance.global_name.name != name:
        type_name = instance.global_name.name if isinstance(instance, PickledObject) else type(instance).__name__
        raise DcpError(f"{path} has {type_name} where DCP's {name} should be", FIX)
    if not isinstance(instance.state, dict):
        raise DcpError(f"{path}: a {name} has no fields", FIX)
    return instance.state


def _sizes(size: Any) -> tuple[int, ...]:
    if isinstance(size, PickledObject) and size.global_name == _SIZE:
        (numbers,) = size.arguments
        return whole_numbers(numbers)
    return whole_numbers(size)


def _text(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is not a name")
    return name
