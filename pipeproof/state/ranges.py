"""Ranges and boxes read of files: all of it comes, or an error that names the file.

Files are read and not mapped into memory: where a mapped file is cut short, or
its disk fails, the system ends the whole process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from pipeproof.state.boxes import Box, row_numels, span_of
from pipeproof.state.codes import StateError, reading
from pipeproof.state.reshard.cast import Bits

BESIDE = 2**20
"""Most bytes that are read beside where they belong, if nobody says how many."""
_MOST_OPEN = 32
"""A state may have more files than a process may have open."""
_GAP = 2**14
"""Up to so many bytes in a row that nobody asked for are read along: one more call takes as long."""


class FileArray(NamedTuple):
    """An array that begins at the byte ``start`` of a file; ``dtype`` has the bits of its elements."""

    path: Path
    start: int
    extents: tuple[int, ...]
    dtype: np.dtype[Any]


class RangeReader:
    """Reads of files, for one thread; each is opened when it is first asked for. ``mend`` is for damaged files.

    What cannot be read straight to where it belongs is read beside, at most ``beside`` bytes, and stays there until
    the next such read: boxes that lie between each other, such as queries and keys of a fused weight, are read once.
    """

    def __init__(self, mend: str, beside: int = BESIDE) -> None:
        self._mend = mend
        self._handles: dict[Path, int] = {}
        self._beside = np.empty(beside, np.uint8)
        self._there: tuple[Path, int, int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        while self._handles:
            os.close(self._handles.popitem()[1])

    def read(self, path: Path, start: int, content: npt.NDArray[np.uint8], num_ranges: int = 1, apart: int = 0) -> None:
        """Fill ``content`` with ranges of a file, each as long, the first from ``start`` on; ``apart`` from the next.

        Raises:
            StateError: the file cannot be read, or ends before.
        """
        size = content.size // num_ranges
        with reading(path, self._mend):
            handle = self._opened(path)
            for number in range(num_ranges):
                at, left = start + number * apart, content[number * size : (number + 1) * size].data
                while left:  # Linux reads at most 2 GiB at once, and a network's disk may give less
                    num = os.preadv(handle, [left], at)
                    if not num:
                        message = f"{path} is cut short: it ends before the byte {at + len(left)}"
                        raise StateError(message, self._mend)
                    at, left = at + num, left[num:]

    def read_box(self, array: FileArray, box: Box, out: Bits, change: Callable[[Bits], Bits] | None = None) -> None:
        """Put a box of an array into ``out``, which has the box's extents and any strides.

        ``change`` makes of the array's elements those of ``out``, where these are of another type.

        Raises:
            StateError: the file cannot be read, or ends before.
        """
        item, (first, stop) = array.dtype.itemsize, span_of(box, array.extents)
        straight = out.reshape(-1).view(np.uint8) if change is None and out.flags.c_contiguous else None
        dim = next((dim for dim, extent in enumerate(box.extents) if extent > 1), None)
        if straight is not None and stop - first == box.numel:
            self.read(array.path, array.start + first * item, straight)
            return
        if dim is None:
            out[...] = _changed(self._apart(array, box, 1, 1), change)
            return
        row, most = row_numels(array.extents)[dim], self._beside.size // item
        if stop - first == box.numel:  # no other box lies between: so few bytes stay in a core's cache until they move
            most = min(most, BESIDE // item)
        begin, end = span_of(box.between(dim, 0, 1), array.extents)
        run, is_range = end - begin, end - begin == box.numel // box.extents[dim]
        has_gap = (row - run) * item > _GAP
        if straight is not None and has_gap and is_range:
            self.read(array.path, array.start + first * item, straight, box.extents[dim], row * item)
            return
        at_once = most // (run if has_gap else row) if is_range or not has_gap else 0
        for at in range(box.offsets[dim], box.stops[dim], at_once or 1):
            part = box.between(dim, at, min(at + (at_once or 1), box.stops[dim]))
            target = out[part.within(box).slices]
            if not at_once:
                self.read_box(array, part, target, change)
            elif has_gap:
                target[...] = _changed(self._apart(array, part, part.extents[dim], row), change)
            else:
                target[...] = _changed(self._along(array, part, dim), change)

    def _apart(self, array: FileArray, box: Box, num_ranges: int, row: int) -> Bits:
        """A box of ranges that begin each a ``row`` of elements behind the one before; nothing else is read."""
        item, self._there = array.dtype.itemsize, None
        content = self._beside[: box.numel * item]
        self.read(array.path, array.start + span_of(box, array.extents)[0] * item, content, num_ranges, row * item)
        return content.view(array.dtype).reshape(box.extents)

    def _along(self, array: FileArray, box: Box, dim: int) -> Bits:
        """A box of some indices of ``dim``, and one of each dim before; all that the array has of these is read."""
        item, rows = array.dtype.itemsize, row_numels(array.extents)
        begin = sum(at * row for at, row in zip(box.offsets[: dim + 1], rows[: dim + 1], strict=True)) * item
        size = box.extents[dim] * rows[dim] * item
        asked = array.path, array.start + begin, array.start + begin + size
        there = self._there
        if there is None or there[0] != asked[0] or not there[1] <= asked[1] <= asked[2] <= there[2]:
            self._there = None  # until all of it is
            self.read(array.path, asked[1], self._beside[:size])
            self._there = there = asked
        place = asked[1] - there[1] + span_of(box, array.extents)[0] * item - begin
        return np.ndarray(box.extents, array.dtype, self._beside, place, [row * item for row in rows])

    def _opened(self, path: Path) -> int:
        """A handle; where there are many, that which was not asked for longest is closed."""
        handle = self._handles.pop(path, None)
        if handle is None:
            if len(self._handles) == _MOST_OPEN:
                os.close(self._handles.pop(next(iter(self._handles))))
            handle = os.open(path, os.O_RDONLY)
        self._handles[path] = handle
        return handle


def _changed(values: Bits, change: Callable[[Bits], Bits] | None) -> Bits:
    return values if change is None else change(values)
