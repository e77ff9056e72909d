"""A tensor that is cut anew: its boxes in the colours of who holds them now, and who gives them to whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod

from pipeproof.sim.colours import is_dark
from pipeproof.state.boxes import Box
from pipeproof.state.reshard.flows import Flow, Recut
from pipeproof.state.reshard.picture.marks import LETTER, SIZES, rect, shortened, text, title
from pipeproof.state.reshard.picture.sides import number_of
from pipeproof.state.reshard.words import box_words

WIDTH = 232
"""Of the place that a tensor has."""
_ABOVE, _BELOW = 34, 18
"""Room for its name and shape, and to the next row."""
_DRAWN_WIDTH, _DRAWN_HEIGHT = 208, 96
_FLATTEST, _TALLEST = 4.0, 0.75
"""Width by height of a drawn tensor, whatever its own is."""
_LEAST_FRAMED = 3
"""Width and height of a box."""


def height_of(recut: Recut) -> int:
    """Of the place that a tensor takes."""
    return round(_ABOVE + _drawn_size(recut.shape)[1] + _BELOW)


def _drawn_size(shape: Sequence[int]) -> tuple[float, float]:
    """Width and height."""
    ratio = min(max(shape[-1] / prod(shape[:-1]), _TALLEST), _FLATTEST)
    width = min(_DRAWN_WIDTH, _DRAWN_HEIGHT * ratio)
    return width, width / ratio


def cell(recut: Recut, x: float, y: float, colours: Mapping[str, str]) -> Iterator[str]:
    """A tensor by its name, with who gives and who takes each box of it."""
    yield text(x, y + 10, shortened(recut.name, WIDTH))
    what = ", what the optimizer keeps" if recut.is_kept else ""
    yield text(x, y + 24, " x ".join(map(str, recut.shape)) + what, "faint")
    num_rows, num_columns = prod(recut.shape[:-1]), recut.shape[-1]
    width, height = _drawn_size(recut.shape)
    for flow in recut.flows:
        words = f"{box_words(flow.box, recut.shape)}: {flow.giver} to {flow.taker}"
        left, wide = (width * number / num_columns for number in (flow.box.offsets[-1], flow.box.extents[-1]))
        for first, num in _rectangles(flow.box, recut.shape):
            place = x + left, y + _ABOVE + height * first / num_rows, wide, height * num / num_rows
            yield rect(colours[flow.giver], *place, title(words))
            if min(place[2:]) >= _LEAST_FRAMED:  # a frame would hide what is thinner
                yield rect(None, *place)
            yield _label(flow, place, on_dark=is_dark(colours[flow.giver]))


def _rectangles(box: Box, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The rows of a box, first and number, where all dims but the last are rows one below the other."""
    *outer, (start, extent) = [(0, 1), *zip(box.offsets[:-1], box.extents[:-1], strict=True)]
    *sizes, num_inner = [1, *shape[:-1]]
    first, num = 0, 0
    for place in product(*(range(begin, begin + many) for begin, many in outer)):
        row = 0
        for at, size in zip(place, sizes, strict=True):
            row = row * size + at
        row = row * num_inner + start
        if num and row != first + num:
            yield first, num
            num = 0
        first, num = (first if num else row), num + extent
    yield first, num


def _label(flow: Flow, place: tuple[float, float, float, float], *, on_dark: bool) -> str:
    """``2→0``, or less of it, as large as fits; nothing where none does."""
    x, y, width, height = place
    giver, taker = number_of(flow.giver), number_of(flow.taker)
    words = f"{giver}→{taker}" if giver or taker else ""
    for size in SIZES:
        if words and size <= height - 2 and len(words) * size * LETTER <= width - 2:
            look = f"mid {'on' if on_dark else 'under'}" + (f" s{size}" if size != SIZES[0] else "")
            return text(x + width / 2, y + height / 2 + size * 0.36, words, look)
    return ""
