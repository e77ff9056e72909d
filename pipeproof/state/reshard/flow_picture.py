"""The flows of a reshard as an SVG picture: bands from present to future holders, and tensors that are resharded.

A colour represents the present holder. Numbers show the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from pipeproof.comm.mesh import Mesh
from pipeproof.state.region_text import and_more, counted, range_text, size_words
from pipeproof.state.regions import Region
from pipeproof.state.reshard.flows import ZEROS, Flow, Flows, ReshardedTensors
from pipeproof.state.reshard.reshard_codes import NOT_CONVERTIBLE, RefusedError
from pipeproof.state.reshard.shard_layout import ShardLayout
from pipeproof.views.colours import is_dark
from pipeproof.views.svg import SIZE_OF_TITLE, SIZES, label_in, px, rect, shortened, svg_page, text, tooltip

MAX_HOLDERS = 64
"""Most holders of one side: more bands are not distinguishable."""
_WIDTH, _MARGIN, _COLUMNS, _MAX_CELLS = 960, 16, 4, 24
_COLOURS = ("#3461c1", "#e0ac12", "#27803f", "#b03a9b", "#38b6c9", "#d1603d", "#8250df", "#8a9a5b")
"""Colours of the present holders; the ninth has that of the first again."""
NEUTRAL = "#7d7d7d"
"""Colour of elements that no holder has."""
_STYLE = ".cut{fill:none;stroke:#fff;stroke-width:1.5}.band{fill-opacity:.45}"
_DARK = ".cut{stroke:#0d1117}.band{fill-opacity:.6}"


def require_drawable(*sides: ShardLayout) -> None:
    """Refuse layouts with too many holders for a picture.

    Raises:
        RefusedError: More than ``MAX_HOLDERS`` ranks or files hold a layout.
    """
    for side in sides:
        num = len({held.where for shards in side.shards.values() for held in shards})
        if num > MAX_HOLDERS:
            message = (
                f"{side.name} has {num:,} ranks or files that hold shards, and a picture shows {MAX_HOLDERS} at most"
            )
            raise RefusedError(
                NOT_CONVERTIBLE, message, "omit --plot, or draw plans with the same sharding on fewer ranks"
            )


def flows_svg(flows: Flows, source: LayoutLabel, target: LayoutLabel) -> str:
    """Return the picture, for at most ``MAX_HOLDERS`` holders on each side."""
    colours = {sender: _COLOURS[at % len(_COLOURS)] for at, sender in enumerate(flows.senders)} | {ZEROS: NEUTRAL}
    bands = Bands(flows, colours)
    top = TOP + bands.height + 44
    rows = [
        flows.resharded[first : first + _COLUMNS] for first in range(0, min(len(flows.resharded), _MAX_CELLS), _COLUMNS)
    ]
    height = top + sum(max(map(height_of, row)) for row in rows) + 16
    head = f"{source.name} to {target.name}: {size_words(sum(flows.num_bytes.values()))}"
    lines = [
        text(_MARGIN, 24, shortened(head, _WIDTH - 2 * _MARGIN, SIZE_OF_TITLE), "title"),
        text(LEFT, TOP - 14, "held by", "faint end"),
        text(RIGHT, TOP - 14, "will be held by", "faint"),
        *bands.svg(source, target),
        text(_MARGIN, top - 8, _summary(flows), "faint"),
    ]
    y = top + 14
    for row in rows:
        for column, resharded in enumerate(row):
            lines += cell(resharded, _MARGIN + column * WIDTH, y, colours)
        y += max(map(height_of, row))
    return svg_page((_WIDTH, height), head, lines, _STYLE, _DARK)


def _summary(flows: Flows) -> str:
    whole = f"{counted(flows.num_whole, 'tensor')} {'goes' if flows.num_whole == 1 else 'go'} whole"
    if not flows.resharded:
        return whole
    more = and_more(len(flows.resharded) - _MAX_CELLS, "kind")
    return f"{whole}; resharded are those below{more}, in the colours of their present holders: from rank → to rank"


LEFT, RIGHT, TOP = 230, 730, 64
"""End of the names on the left, begin of those on the right, and space above the bars."""
_BAR, _LABEL_GAP, _GAP, _NAME_MARGIN = 12, 8, 6, 4
"""Width of bars, distance from their names, distance from each other, and margin of names."""
_MIN_EVEN, _MIN_BAR, _MAX_HEIGHT = 32, 12, 480
"""Least height of a bar if all are even, else as far as there is room, and greatest height of all bars."""


class Bands:
    """Bars of holders on both sides, as high as their bytes, and bands between them."""

    def __init__(self, flows: Flows, colours: Mapping[str, str]) -> None:
        self._flows, self._colours = flows, colours
        self._bytes = sum(flows.num_bytes.values()) or 1
        sides = flows.senders, flows.receivers
        own = [{holder: self._bytes_of(holder, side) for holder in holders} for side, holders in enumerate(sides)]
        most = max(map(len, sides))
        smallest = min((size for of_side in own for size in of_side.values()), default=1)
        self._room = max(most * _MIN_EVEN, min(_MAX_HEIGHT, _MIN_BAR * self._bytes / smallest))
        self.height = round(self._room + (most - 1) * _GAP)
        self._senders, self._receivers = (self._bars(of_side) for of_side in own)

    def _bytes_of(self, holder: str, side: int) -> int:
        return sum(size for pair, size in self._flows.num_bytes.items() if pair[side] == holder)

    def _bars(self, sizes: Mapping[str, int]) -> dict[str, tuple[float, float]]:
        """Return by holder the top and the height of its bar, centred in the picture."""
        bars, y = {}, TOP + (self.height - self._room - (len(sizes) - 1) * _GAP) / 2
        for holder, size in sizes.items():
            bars[holder] = y, self._height(size)
            y += self._height(size) + _GAP
        return bars

    def _height(self, size: int) -> float:
        return self._room * size / self._bytes

    def svg(self, source: LayoutLabel, target: LayoutLabel) -> Iterator[str]:
        """Yield the marks from back to front: bands, bars, and names."""
        begun = {sender: y for sender, (y, _) in self._senders.items()}
        ended = {receiver: y for receiver, (y, _) in self._receivers.items()}
        for sender, receiver in product(self._senders, self._receivers):
            size = self._flows.num_bytes.get((sender, receiver), 0)
            if size:
                shape = _band(begun[sender], ended[receiver], self._height(size))
                what = tooltip(f"{sender} to {receiver}: {size_words(size)}")
                yield f'<path class="band" fill="{self._colours[sender]}" d="{shape}">{what}</path>'
                begun[sender] += self._height(size)
                ended[receiver] += self._height(size)
        for sender, (y, height) in self._senders.items():
            yield rect(self._colours[sender], LEFT + _LABEL_GAP, y, _BAR, height, tooltip(source.label(sender)))
        for receiver, (y, height) in self._receivers.items():
            yield rect(NEUTRAL, RIGHT - _LABEL_GAP - _BAR, y, _BAR, height, tooltip(target.label(receiver)))
        yield from _labels(self._senders, source, LEFT, "end")
        yield from _labels(self._receivers, target, RIGHT, "")


def _labels(bars: Mapping[str, tuple[float, float]], side: LayoutLabel, x: int, look: str) -> Iterator[str]:
    """Yield the names next to their bars, without those that would overlap."""
    last = 0.0
    for holder, (y, height) in bars.items():
        middle = y + height / 2 + 4
        if middle >= last + SIZES[0]:
            yield text(x, middle, shortened(side.label(holder), LEFT - _NAME_MARGIN), look)
            last = middle


def _band(y: float, to_y: float, height: float) -> str:
    left, right = LEFT + _LABEL_GAP + _BAR, RIGHT - _LABEL_GAP - _BAR
    half = (left + right) // 2
    over = f"M{left} {px(y)}C{half} {px(y)} {half} {px(to_y)} {right} {px(to_y)}"
    y, to_y = y + height, to_y + height
    return f"{over}V{px(to_y)}C{half} {px(to_y)} {half} {px(y)} {left} {px(y)}Z"


WIDTH = 232
"""Width of the space of a tensor."""
_ABOVE, _BELOW = 34, 18
"""Space for name and shape, and to the next row."""
_DRAWN_WIDTH, _DRAWN_HEIGHT = 208, 96
_FLATTEST, _TALLEST = 4.0, 0.75
"""Limits of width by height of a drawn tensor."""
_MIN_FRAMED = 3
"""Least width and height of a framed region."""


def height_of(resharded: ReshardedTensors) -> int:
    """Return the height of the space of a tensor."""
    return round(_ABOVE + _drawn_size(resharded.shape)[1] + _BELOW)


def _drawn_size(shape: Sequence[int]) -> tuple[float, float]:
    """Return width and height of a drawn tensor."""
    ratio = min(max(shape[-1] / prod(shape[:-1]), _TALLEST), _FLATTEST)
    width = min(_DRAWN_WIDTH, _DRAWN_HEIGHT * ratio)
    return width, width / ratio


def cell(resharded: ReshardedTensors, x: float, y: float, colours: Mapping[str, str]) -> Iterator[str]:
    """Yield a tensor: its name, and sender and receiver of each region."""
    yield text(x, y + 10, shortened(resharded.name, WIDTH))
    what = ", optimizer states" if resharded.is_state else ""
    yield text(x, y + 24, " x ".join(map(str, resharded.shape)) + what, "faint")
    num_rows, num_columns = prod(resharded.shape[:-1]), resharded.shape[-1]
    width, height = _drawn_size(resharded.shape)
    for flow in resharded.flows:
        label = f"{range_text(flow.region, resharded.shape)}: {flow.sender} to {flow.receiver}"
        left, wide = (width * number / num_columns for number in (flow.region.offsets[-1], flow.region.extents[-1]))
        for first, num in _rectangles(flow.region, resharded.shape):
            place = x + left, y + _ABOVE + height * first / num_rows, wide, height * num / num_rows
            yield rect(colours[flow.sender], *place, tooltip(label))
            if min(place[2:]) >= _MIN_FRAMED:  # a frame would hide what is thinner
                yield rect("cut", *place)
            yield _label(flow, place, on_dark=is_dark(colours[flow.sender]))


def _rectangles(region: Region, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the rows of a region, first and number, with all dims but the last flattened into rows."""
    *outer, (start, extent) = [(0, 1), *zip(region.offsets[:-1], region.extents[:-1], strict=True)]
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
    """Return ``2→0`` as large as fits; empty where it does not fit, or neither is a rank."""
    x, y, width, height = place
    sender, receiver = rank_number(flow.sender), rank_number(flow.receiver)
    if not (sender or receiver):
        return ""
    middle, room = (x + width / 2, y + height / 2), (width - 2, height - 2)
    return label_in(middle, room, (f"{sender}→{receiver}",), on_dark=on_dark)


@dataclass(frozen=True, slots=True)
class LayoutLabel:
    """Name of a layout, and the mesh of its ranks where it is known."""

    name: str
    mesh: Mesh | None = None

    def label(self, holder: str) -> str:
        """``rank 3 (tp 1, pp 1)``; axes of size 1 are left out."""
        rank = rank_number(holder)
        if self.mesh is None or not rank:
            return holder
        sizes = dict(zip(self.mesh.axes, self.mesh.sizes, strict=True))
        place = ", ".join(f"{axis} {at}" for axis, at in self.mesh.coords(int(rank)).items() if sizes[axis] > 1)
        return f"{holder} ({place})" if place else holder


def rank_number(holder: str) -> str:
    """Return the number of a rank; empty for a file."""
    return holder.removeprefix("rank ") if holder.startswith("rank ") else ""
