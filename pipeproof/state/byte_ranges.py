"""Reading ranges and regions of files, casts, and whole safetensors files with their SHA-256.

A region is read completely, or an error names the file.

Files are read and not memory-mapped: if a mapped file is cut short, or its disk fails, the system ends the whole
process.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from pipeproof.foreign_text import open_foreign, regular_size
from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.state.regions import Region, row_numels, spanned_range
from pipeproof.state.safetensors_header import make_header, read_header, require_array
from pipeproof.state.state_codes import StateError, reading
from pipeproof.state.state_index import ShardFile, TensorEntry
from pipeproof.state.torch_archive import TorchArchive, load_bytes
from pipeproof.system_calls import open_to_read, read_at, sync

SCRATCH_BYTES = 2**20
"""Default size of the scratch buffer of a reader."""
_MAX_OPEN = 32
"""Most files that a reader keeps open: a state may have more files than a process may have open."""
_GAP = 2**14
"""Largest gap in bytes that is read along: one more system call would take as long."""


class ByteRange(NamedTuple):
    """A region of a tensor that is stored in C order from the byte ``start`` of a file on, or in an archive there.

    ``dtype`` has the bits of the elements.
    """

    path: Path
    start: int
    region: Region
    dtype: np.dtype[Any]
    archive: TorchArchive | None = None

    @property
    def extents(self) -> tuple[int, ...]:
        """Extents of the stored array."""
        return self.region.extents


class RangeReader:
    """A reader of files, for one thread.

    Each file is opened at its first use. ``fix`` is the suggested fix for damaged files.

    Bytes that cannot be read straight into their destination are read into a scratch buffer of ``scratch_bytes``. The
    buffer keeps them until the next such read: interleaved regions, such as queries and keys of a fused weight, are
    read once.
    """

    def __init__(self, fix: str, scratch_bytes: int = SCRATCH_BYTES) -> None:
        self._fix = fix
        self._handles: dict[Path, int] = {}
        self._scratch = np.empty(scratch_bytes, np.uint8)
        self._scratch_range: tuple[Path, int, int] | None = None
        self._loaded: tuple[Path, int, npt.NDArray[np.uint8]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        while self._handles:
            os.close(self._handles.popitem()[1])

    def read(
        self, path: Path, start: int, content: npt.NDArray[np.uint8], num_ranges: int = 1, stride: int = 0
    ) -> None:
        """Fill ``content`` with ``num_ranges`` byte ranges of one length.

        The first begins at ``start``, the next ones ``stride`` apart.

        Raises:
            StateError: The file cannot be read, or is too short.
        """
        size = content.size // num_ranges
        with reading(path, self._fix):
            handle = self._opened(path)
            for number in range(num_ranges):
                position, rest = start + number * stride, content[number * size : (number + 1) * size].data
                while rest:
                    num_read = read_at(handle, rest, position)
                    if not num_read:
                        message = f"{path} is cut short: it ends before the byte {position + len(rest)}"
                        raise StateError(message, self._fix)
                    position, rest = position + num_read, rest[num_read:]

    def read_region(
        self, array: ByteRange, region: Region, out: Bits, convert: Callable[[Bits], Bits] | None = None
    ) -> None:
        """Copy a region, counted from the begin of the stored one, into ``out`` of its extents and any strides.

        ``convert`` turns the array's elements into elements of ``out``, if their types differ.

        Raises:
            StateError: The file cannot be read, or is too short.
        """
        if array.archive is not None:
            elements = self.load(array.path, array.start, array.archive).view(array.dtype).reshape(array.extents)
            out[...] = _converted(elements[region.slices], convert)
            return
        item, (first, stop) = array.dtype.itemsize, spanned_range(region, array.extents)
        direct = out.reshape(-1).view(np.uint8) if convert is None and out.flags.c_contiguous else None
        dim = next((dim for dim, extent in enumerate(region.extents) if extent > 1), None)
        if direct is not None and stop - first == region.numel:
            self.read(array.path, array.start + first * item, direct)
            return
        if dim is None:
            out[...] = _converted(self._read_strided(array, region, 1, 1), convert)
            return
        row, max_elements = row_numels(array.extents)[dim], self._scratch.size // item
        if stop - first == region.numel:  # no other region lies between: small blocks stay in a core's cache
            max_elements = min(max_elements, SCRATCH_BYTES // item)
        begin, end = spanned_range(region.sliced(dim, 0, 1), array.extents)
        run, is_range = end - begin, end - begin == region.numel // region.extents[dim]
        has_gap = (row - run) * item > _GAP
        if direct is not None and has_gap and is_range:
            self.read(array.path, array.start + first * item, direct, region.extents[dim], row * item)
            return
        num_indices = max_elements // (run if has_gap else row) if is_range or not has_gap else 0
        for index in range(region.offsets[dim], region.stops[dim], num_indices or 1):
            block = region.sliced(dim, index, min(index + (num_indices or 1), region.stops[dim]))
            target = out[block.relative_to(region).slices]
            if not num_indices:
                self.read_region(array, block, target, convert)
            elif has_gap:
                target[...] = _converted(self._read_strided(array, block, block.extents[dim], row), convert)
            else:
                target[...] = _converted(self._read_enclosing(array, block, dim), convert)

    def _read_strided(self, array: ByteRange, region: Region, num_ranges: int, row: int) -> Bits:
        """Return a region of ranges that begin ``row`` elements apart; nothing between them is read."""
        item, self._scratch_range = array.dtype.itemsize, None
        content = self._scratch[: region.numel * item]
        self.read(
            array.path, array.start + spanned_range(region, array.extents)[0] * item, content, num_ranges, row * item
        )
        return content.view(array.dtype).reshape(region.extents)

    def _read_enclosing(self, array: ByteRange, region: Region, dim: int) -> Bits:
        """Return a region of some indices of ``dim`` and one of each earlier dim.

        All elements of the array at these indices are read.
        """
        item, rows = array.dtype.itemsize, row_numels(array.extents)
        begin = sum(index * row for index, row in zip(region.offsets[: dim + 1], rows[: dim + 1], strict=True)) * item
        size = region.extents[dim] * rows[dim] * item
        wanted_range = array.path, array.start + begin, array.start + begin + size
        cached = self._scratch_range
        if (
            cached is None
            or cached[0] != wanted_range[0]
            or not cached[1] <= wanted_range[1] <= wanted_range[2] <= cached[2]
        ):
            self._scratch_range = None  # until it is read in full
            self.read(array.path, wanted_range[1], self._scratch[:size])
            self._scratch_range = cached = wanted_range
        offset = wanted_range[1] - cached[1] + spanned_range(region, array.extents)[0] * item - begin
        return np.ndarray(region.extents, array.dtype, self._scratch, offset, [row * item for row in rows])

    def load(self, path: Path, start: int, archive: TorchArchive) -> npt.NDArray[np.uint8]:
        """Return the bytes of the tensor in an archive at the byte ``start``; the last one loaded is kept.

        Raises:
            StateError: The file cannot be read, or the archive is damaged or changed; or PyTorch is not installed.
        """
        if self._loaded is None or self._loaded[:2] != (path, start):
            content = np.empty(archive.length, np.uint8)
            self.read(path, start, content)
            self._loaded = path, start, load_bytes(path, start, content.tobytes(), archive)
        return self._loaded[2]

    def _opened(self, path: Path) -> int:
        """Return a handle; with too many open files, the least recently used one is closed."""
        handle = self._handles.pop(path, None)
        if handle is None:
            if len(self._handles) == _MAX_OPEN:
                os.close(self._handles.pop(next(iter(self._handles))))
            handle = open_to_read(path)
        self._handles[path] = handle
        return handle


def _converted(values: Bits, convert: Callable[[Bits], Bits] | None) -> Bits:
    return values if convert is None else convert(values)


Bits = npt.NDArray[Any]
"""Elements as unsigned integers of their size."""

CAST_DTYPES = ("float16", "bfloat16", "float32", "float64")
"""Types between which elements can be cast."""


def bits_dtype(dtype: str) -> np.dtype[Any]:
    """Return the unsigned integer type that has the size of a type."""
    return np.dtype(f"<u{dtype_bytes(dtype)}")


def cast(bits: Bits, dtype: str, to: str) -> Bits:
    """Cast elements of ``dtype`` to ``to``, rounding to nearest, ties to even.

    A cast to 16 bits goes through float32, as in Paddle and PyTorch: a float64 is rounded twice. NaN stays NaN.
    """
    if dtype == to:
        return bits
    with np.errstate(all="ignore"):  # too large is infinite, as in the frameworks
        if to == "float64":
            return _floats(bits, dtype).astype("<f8").view("<u8")
        single = _floats(bits, dtype).astype("<f4", copy=False)
        if to == "float32":
            return single.view("<u4")
        if to == "float16":
            return single.astype("<f2").view("<u2")
        return _bfloat16(single.view("<u4"))


def _floats(bits: Bits, dtype: str) -> Bits:
    """Return elements in a floating type that numpy has."""
    if dtype == "bfloat16":
        return (bits.astype("<u4") << 16).view("<f4")
    return bits.view({"float16": "<f2", "float32": "<f4", "float64": "<f8"}[dtype])


def _bfloat16(bits: Bits) -> Bits:
    """Round float32 bits to bfloat16.

    Half a unit in the last place is added, minus one if that place is even, then the rest is cut off.
    """
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    quiet = (bits >> 16) | 0x40  # a NaN with all its set bits in the lower half must not become infinite
    return np.where(is_nan, quiet, rounded).astype("<u2")


_BLOCK = 2**20
_FIX = "name an older state (`--resume DIR/step-..`), or copy the file again from where it was saved"


@dataclass(frozen=True, slots=True)
class ByteArray:
    """An array without a framework, because numpy has no bfloat16."""

    dtype: str
    shape: tuple[int, ...]
    content: npt.NDArray[np.uint8]
    """The elements in C order."""


def write_file(path: Path, arrays: Mapping[str, ByteArray]) -> tuple[int, str]:
    """Write a file and sync it to the disk; return its size in bytes and its SHA-256."""
    start, header = make_header({name: (array.dtype, array.shape) for name, array in arrays.items()}, {})
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as stream:
        for content in (
            memoryview(start),
            *(np.ascontiguousarray(arrays[name].content).data for name in header.arrays),
        ):
            digest.update(content)
            write_all(stream.fileno(), content)
    sync(path)
    size = path.stat().st_size
    assert size == header.size_bytes, f"an array of {path} has not the size of its shape"
    return size, digest.hexdigest()


def write_all(handle: int, content: memoryview) -> None:
    """Write all bytes: Linux writes at most 2 GiB at once, and a network disk may accept less."""
    while content:
        content = content[os.write(handle, content) :]


def read_file(path: Path) -> dict[str, ByteArray]:
    """Return all arrays of a file by name.

    Raises:
        StateError: The file is missing, or is not a safetensors file.
    """
    header = read_header(path)
    content = np.empty(header.size_bytes, np.uint8)
    with RangeReader(_FIX) as reader:
        reader.read(path, 0, content)
    return {
        name: ByteArray(array.dtype, array.shape, content[array.start : array.start + array.num_bytes])
        for name, array in header.arrays.items()
    }


def require_whole(path: Path, file: ShardFile, tensors: Mapping[str, TensorEntry]) -> None:
    """Refuse a file at ``path`` that does not match its entry in the index.

    Raises:
        StateError: The file is missing, shorter or longer, has other content, or holds other tensors.
    """
    with reading(path, _FIX):
        try:
            size = regular_size(path)
        except FileNotFoundError as error:
            first = file.shards[0].tensor if file.shards else "nothing"
            raise StateError(f"{path} is missing; it holds {len(file.shards)} tensors, {first} first", _FIX) from error
    if size != file.size_bytes:
        how = "cut short" if size < file.size_bytes else "longer"
        raise StateError(f"{path} is {how}: it has {size} bytes, and {file.size_bytes} in the index", _FIX)
    require_sha256(path, file.sha256, _FIX)
    _require_header(path, file, tensors)


def _require_header(path: Path, file: ShardFile, tensors: Mapping[str, TensorEntry]) -> None:
    header = read_header(path)
    for shard in file.shards:
        if shard.tensor not in tensors:
            message = f"{path} must hold {shard.tensor}, and the index has no tensor of that name"
            raise StateError(message, _FIX)
        require_array(path, header, file.key_of(shard.tensor), tensors[shard.tensor].dtype, shard.shape, _FIX)


def require_sha256(path: Path, sha256: str, fix: str, on_block: Callable[[], None] = lambda: None) -> None:
    """Refuse a file whose SHA-256 differs from the index; for ``on_block`` see ``digest_of``.

    Raises:
        StateError: The SHA-256 differs, or the file cannot be read.
    """
    with reading(path, fix):
        actual = digest_of(path, on_block)
    if actual != sha256:
        raise StateError(f"{path} was changed: its SHA-256 is not the {sha256[:12]}.. of the index", fix)


def digest_of(path: Path, on_block: Callable[[], None] = lambda: None) -> str:
    """Return the SHA-256 of a file; ``on_block`` is called between blocks, and may raise."""
    digest = hashlib.sha256()
    with open_foreign(path) as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
            on_block()
    return digest.hexdigest()
