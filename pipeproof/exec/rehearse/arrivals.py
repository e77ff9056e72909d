"""Which elements arrived: held against those that were promised, and, where they differ, looked for elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pipeproof.exec.rehearse.identity import Bytes, Source, elements
from pipeproof.specs.dtypes import dtype_bytes

_ENOUGH_BYTES = 8
"""How much of a range is looked for elsewhere: chance does not make so many bytes alike."""
_MOST_SEARCHED = 2**28
"""Elements of other tensors that are looked through for one that arrived wrongly."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions ``start .. stop`` of what arrived: elements from ``source_start`` on of ``source``.

    Without a ``source`` they are nobody's: zeros, where ``is_zero``, or unknown.
    """

    start: int
    stop: int
    source: Source | None
    source_start: int = 0
    is_zero: bool = False

    @property
    def text(self) -> str:
        """What lies there."""
        if self.source is None:
            return "zeros" if self.is_zero else "what no rank sends"
        return f"{self.range_text} of {self.source.text}"

    @property
    def range_text(self) -> str:
        """Which elements of the source."""
        return f"elements {self.source_start}..{self.source_start + self.stop - self.start}"


def pieces_of(
    content: Bytes, dtype: str, wanted: Sequence[Piece], others: Callable[[], Iterable[Source]]
) -> tuple[Piece, ...]:
    """What ``content`` really is, position by position of ``wanted``, which is returned where all is as it should be.

    ``others`` are the tensors to look through where it is not, the most likely ones first.
    """
    found: list[Piece] = []
    for piece in wanted:
        assert piece.source is not None
        here = elements(content[piece.start * dtype_bytes(dtype) : piece.stop * dtype_bytes(dtype)], dtype)
        stop = piece.source_start + piece.stop - piece.start
        there = elements(piece.source.content(piece.source_start, stop, dtype), dtype)
        if len(here) == len(there) and np.array_equal(here, there):
            found.append(piece)
        else:
            found += _Search(here, there, piece, dtype, [piece.source, *others()]).pieces()
    return tuple(found)


class _Search:
    """One range that is not as it should be."""

    def __init__(
        self, here: np.ndarray, there: np.ndarray, wanted: Piece, dtype: str, candidates: Sequence[Source]
    ) -> None:
        if len(here) < len(there):  # what never came is as what no rank sends
            here = np.concatenate([here, ~there[len(here) :]])
        self._here, self._there, self._wanted, self._dtype = here, there, wanted, dtype
        self._candidates = candidates
        self._window = -(-_ENOUGH_BYTES // dtype_bytes(dtype)) * (8 if dtype == "bool" else 1)

    def pieces(self) -> list[Piece]:
        wrong = np.flatnonzero(self._here != self._there)
        size = len(self._there)
        found: list[Piece] = []
        at = 0
        while at < size:
            next_wrong = int(wrong[np.searchsorted(wrong, at)]) if at <= int(wrong[-1]) else size
            if next_wrong > at:
                found.append(self._piece(at, next_wrong, self._wanted.source, self._wanted.source_start + at))
            if next_wrong < size:
                found.append(self._named(next_wrong))
            at = found[-1].stop - self._wanted.start
        return _joined(found)

    def _piece(
        self, start: int, stop: int, source: Source | None, source_start: int = 0, *, zero: bool = False
    ) -> Piece:
        by = self._wanted.start
        return Piece(start + by, stop + by, source, source_start, zero)

    def _named(self, at: int) -> Piece:
        """The longest range from ``at`` on of which it is known what it is."""
        here = self._here
        until = self._right_again(at)
        if not here[at:until].any():
            return self._piece(at, until, None, zero=True)
        window = here[at : at + self._window].tobytes()
        if len(window) >= _ENOUGH_BYTES:
            searched = 0
            for source in self._candidates:
                searched += source.numel
                if searched > _MOST_SEARCHED:
                    break
                whole = elements(source.content(0, source.numel, self._dtype), self._dtype)
                place = _find(whole.tobytes(), window, whole.itemsize)
                if place >= 0:
                    length = min(len(here) - at, len(whole) - place)
                    same = here[at : at + length] == whole[place : place + length]
                    length = length if same.all() else int(np.argmin(same))
                    return self._piece(at, at + length, source, place)
        return self._piece(at, until, None)

    def _right_again(self, at: int) -> int:
        """From where on, behind ``at``, elements are right again, more of them in a row than chance makes so."""
        counted = np.concatenate([[0], np.cumsum((self._here == self._there)[at:])])
        window = min(self._window, len(counted) - 1)
        begins = np.flatnonzero(counted[window:] - counted[:-window] == window)
        return at + int(begins[0]) if len(begins) else len(self._here)


def _find(whole: bytes, window: bytes, size: int) -> int:
    """Where elements of ``size`` bytes begin in ``whole`` that are those of ``window``; -1 if nowhere."""
    at = whole.find(window)
    while at >= 0 and at % size:
        at = whole.find(window, at + 1)
    return at // size if at >= 0 else -1


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours that continue each other as one."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if last is not None and last.source == piece.source and last.is_zero == piece.is_zero:
            follows = last.source_start + last.stop - last.start
            if piece.source is None or piece.source_start == follows:
                found[-1] = Piece(last.start, piece.stop, last.source, last.source_start, last.is_zero)
                continue
        found.append(piece)
    return found
