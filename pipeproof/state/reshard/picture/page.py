"""What moves where, as an SVG picture: bands from those who hold the bytes to those who will, and tensors cut anew.

The picture stands by itself, as those of schedules do: no script, nothing
loaded from elsewhere, colours that follow the reader's light or dark setting.
A colour is that of who holds the elements now. Numbers say the same.
"""

from __future__ import annotations

from pipeproof.state.reshard.flows import ZEROS, Flows
from pipeproof.state.reshard.picture.bands import LEFT, RIGHT, TOP, Bands
from pipeproof.state.reshard.picture.cells import WIDTH, cell, height_of
from pipeproof.state.reshard.picture.marks import NOTHING, SIZE_OF_TITLE, STYLE, shortened, text, title
from pipeproof.state.reshard.picture.sides import Named
from pipeproof.state.reshard.refused import NOT_MADE_OF_IT, RefusedError
from pipeproof.state.reshard.sides import Side
from pipeproof.state.reshard.words import and_more, counted, size_words

MOST_HOLDERS = 64
"""On a side: bands of more cannot be told apart."""
_WIDTH, _MARGIN, _COLUMNS, _MOST_CELLS = 960, 16, 4, 24
_COLOURS = ("#3461c1", "#e0ac12", "#27803f", "#b03a9b", "#38b6c9", "#d1603d", "#8250df", "#8a9a5b")
"""Of who holds bytes now; the ninth has that of the first again."""


def require_few(*sides: Side) -> None:
    """Refuse what would be too many bands to tell apart.

    Raises:
        RefusedError: more than ``MOST_HOLDERS`` ranks or files hold a side.
    """
    for side in sides:
        num = len({part.where for parts in side.parts.values() for part in parts})
        if num > MOST_HOLDERS:
            message = (
                f"{side.name} has {num:,} ranks or files that hold parts, and a picture shows {MOST_HOLDERS} at most"
            )
            raise RefusedError(
                NOT_MADE_OF_IT, message, "leave --picture out, or draw plans that are cut alike on fewer ranks"
            )


def flows_svg(flows: Flows, source: Named, target: Named) -> str:
    """The picture, of at most ``MOST_HOLDERS`` a side."""
    colours = {giver: _COLOURS[at % len(_COLOURS)] for at, giver in enumerate(flows.givers)} | {ZEROS: NOTHING}
    bands = Bands(flows, colours)
    top = TOP + bands.height + 44
    rows = [flows.recut[first : first + _COLUMNS] for first in range(0, min(len(flows.recut), _MOST_CELLS), _COLUMNS)]
    height = top + sum(max(map(height_of, row)) for row in rows) + 16
    size = f'width="{_WIDTH}" height="{height}"'
    head = f"{source.name} to {target.name}: {size_words(sum(flows.num_bytes.values()))}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" {size} role="img">',
        title(head),
        f"<style>{STYLE}</style>",
        f'<rect class="paper" {size}/>',
        text(_MARGIN, 24, shortened(head, _WIDTH - 2 * _MARGIN, SIZE_OF_TITLE), "title"),
        text(LEFT, TOP - 14, "who holds it", "faint end"),
        text(RIGHT, TOP - 14, "who will hold it", "faint"),
        *bands.drawn(source, target),
        text(_MARGIN, top - 8, _of_tensors(flows), "faint"),
    ]
    y = top + 14
    for row in rows:
        for column, recut in enumerate(row):
            lines += cell(recut, _MARGIN + column * WIDTH, y, colours)
        y += max(map(height_of, row))
    return "\n".join([*lines, "</svg>", ""])


def _of_tensors(flows: Flows) -> str:
    whole = f"{counted(flows.num_whole, 'tensor')} {'goes' if flows.num_whole == 1 else 'go'} whole"
    if not flows.recut:
        return whole
    more = and_more(len(flows.recut) - _MOST_CELLS, "kind")
    return f"{whole}; cut anew are those below{more}, in the colours of who holds them: from rank → to rank"
