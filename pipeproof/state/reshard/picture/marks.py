"""The marks that the picture is made of, and what they look like on light and on dark paper."""

from __future__ import annotations

from html import escape
from unicodedata import east_asian_width

from pipeproof.specs.render import printable

NOTHING = "#7d7d7d"
"""The colour of what is nobody's, or not yet."""
SIZES = (11, 9, 8)
"""Of letters, in pixels; what fits in none of them is left out."""
SIZE_OF_TITLE = 13
"""Of those of the line above all."""
LETTER = 0.62
"""Width of a letter as a share of its size, in a wide font."""
_WIDE = 1.0
"""That of Chinese ones and their like."""
STYLE = """\
text{font-family:ui-sans-serif,system-ui,'Segoe UI',Helvetica,Arial,sans-serif;font-size:11px;fill:#24292f}
.title{font-size:13px}.faint{fill:#57606a}.end{text-anchor:end}.mid{text-anchor:middle}.s9{font-size:9px}.s8{font-size:8px}
.paper{fill:#fff}.cut{fill:none;stroke:#fff;stroke-width:1.5}.band{fill-opacity:.45}
@media(prefers-color-scheme:dark){.paper{fill:#0d1117}.band{fill-opacity:.6}.cut{stroke:#0d1117}text{fill:#d1d7e0}.faint{fill:#9198a1}}
text.on{fill:#fff}text.under{fill:#111}"""
"""Of the whole picture; the background is its own."""


def text(x: float, y: float, words: str, look: str = "") -> str:
    """Words whose base line begins there; ``look`` has classes of ``STYLE``."""
    attribute = f' class="{look}"' if look else ""
    return f'<text{attribute} x="{px(x)}" y="{px(y)}">{_escaped(words)}</text>'


def _escaped(words: str) -> str:
    """As XML has it, which has no control characters, nor the bytes of file names that are no text."""
    return escape(printable(words))


def title(words: str) -> str:
    """What a reader sees who rests on a mark, or hears."""
    return f"<title>{_escaped(words)}</title>"


def shortened(words: str, room: float, size: int = SIZES[0]) -> str:
    """The words, or as much of both their ends as has room, in pixels."""
    most = room / size
    if sum(map(_width, words)) <= most:
        return words
    ends: tuple[list[str], list[str]] = [], []
    left, sides = most - _WIDE, (iter(words), iter(reversed(words)))
    while True:
        for end, letters in zip(ends, sides, strict=True):
            letter = next(letters)
            left -= _width(letter)
            if left < 0:
                return "".join((*ends[0], "…", *reversed(ends[1])))
            end.append(letter)


def _width(letter: str) -> float:
    return _WIDE if east_asian_width(letter) in "WF" else LETTER


def rect(colour: str | None, x: float, y: float, width: float, height: float, inside: str = "") -> str:
    """A box of a colour, or without one its frame alone."""
    look = 'class="cut"' if colour is None else f'fill="{colour}"'
    return f'<rect {look} x="{px(x)}" y="{px(y)}" width="{px(width)}" height="{px(height)}">{inside}</rect>'


def px(length: float) -> str:
    """To a hundredth of a pixel."""
    return f"{length:.2f}".rstrip("0").rstrip(".")
