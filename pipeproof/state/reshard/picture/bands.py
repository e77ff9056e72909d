"""Bars of those who hold the bytes and of those who will, as high as their bytes, and bands between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from pipeproof.state.reshard.flows import Flows
from pipeproof.state.reshard.picture.marks import NOTHING, SIZES, px, rect, shortened, text, title
from pipeproof.state.reshard.picture.sides import Named
from pipeproof.state.reshard.words import size_words

LEFT, RIGHT, TOP = 230, 730, 64
"""Where names on the left end, where those on the right begin, and what is above the bars."""
_BAR, _BESIDE, _GAP, _MARGIN = 12, 8, 6, 4
"""How wide bars are; how far from their names, and from each other; and names from the edge."""
_EVEN, _LEAST, _MOST_HEIGHT = 32, 12, 480
"""Least height of a bar, where all are even, and where not, as far as there is room."""


class Bands:
    """Bars of holders on both sides, as high as their bytes, and bands between them."""

    def __init__(self, flows: Flows, colours: Mapping[str, str]) -> None:
        self._flows, self._colours = flows, colours
        self._bytes = sum(flows.num_bytes.values()) or 1
        sides = flows.givers, flows.takers
        own = [{holder: self._held(holder, side) for holder in holders} for side, holders in enumerate(sides)]
        most = max(map(len, sides))
        smallest = min((size for of_side in own for size in of_side.values()), default=1)
        self._room = max(most * _EVEN, min(_MOST_HEIGHT, _LEAST * self._bytes / smallest))
        self.height = round(self._room + (most - 1) * _GAP)
        self._given, self._taken = (self._bars(of_side) for of_side in own)

    def _held(self, holder: str, side: int) -> int:
        return sum(size for pair, size in self._flows.num_bytes.items() if pair[side] == holder)

    def _bars(self, sizes: Mapping[str, int]) -> dict[str, tuple[float, float]]:
        """By holder where its bar begins, and how high it is; all of them in the middle of the height."""
        bars, y = {}, TOP + (self.height - self._room - (len(sizes) - 1) * _GAP) / 2
        for holder, size in sizes.items():
            bars[holder] = y, self._high(size)
            y += self._high(size) + _GAP
        return bars

    def _high(self, size: int) -> float:
        return self._room * size / self._bytes

    def drawn(self, source: Named, target: Named) -> Iterator[str]:
        """From the back to the front: bands, bars, and what they are."""
        begun = {giver: y for giver, (y, _) in self._given.items()}
        ended = {taker: y for taker, (y, _) in self._taken.items()}
        for giver, taker in product(self._given, self._taken):
            size = self._flows.num_bytes.get((giver, taker), 0)
            if size:
                shape = _band(begun[giver], ended[taker], self._high(size))
                what = title(f"{giver} to {taker}: {size_words(size)}")
                yield f'<path class="band" fill="{self._colours[giver]}" d="{shape}">{what}</path>'
                begun[giver] += self._high(size)
                ended[taker] += self._high(size)
        for giver, (y, height) in self._given.items():
            yield rect(self._colours[giver], LEFT + _BESIDE, y, _BAR, height, title(source.words(giver)))
        for taker, (y, height) in self._taken.items():
            yield rect(NOTHING, RIGHT - _BESIDE - _BAR, y, _BAR, height, title(target.words(taker)))
        yield from _names(self._given, source, LEFT, "end")
        yield from _names(self._taken, target, RIGHT, "")


def _names(bars: Mapping[str, tuple[float, float]], side: Named, x: int, look: str) -> Iterator[str]:
    """Beside their bars; what would stand on another one is left out."""
    last = 0.0
    for holder, (y, height) in bars.items():
        middle = y + height / 2 + 4
        if middle >= last + SIZES[0]:
            yield text(x, middle, shortened(side.words(holder), LEFT - _MARGIN), look)
            last = middle


def _band(y: float, to_y: float, height: float) -> str:
    left, right = LEFT + _BESIDE + _BAR, RIGHT - _BESIDE - _BAR
    half = (left + right) // 2
    over = f"M{left} {px(y)}C{half} {px(y)} {half} {px(to_y)} {right} {px(to_y)}"
    y, to_y = y + height, to_y + height
    return f"{over}V{px(to_y)}C{half} {px(to_y)} {half} {px(y)} {left} {px(y)}Z"
