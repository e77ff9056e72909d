"""The writer of SVG pictures: colours of operations, the page with its style sheet, rectangles, texts and their width.

A picture is self-contained: no script, nothing loaded from elsewhere, its own
background, and colours that follow the reader's light or dark setting. All
text is escaped, and has no control characters, which XML cannot contain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from html import escape
from types import MappingProxyType
from unicodedata import east_asian_width

from pipeproof.diagnostics.text_output import printable
from pipeproof.schedule.ops import OpKind

KIND_COLOURS: Mapping[OpKind, tuple[str, str]] = MappingProxyType(
    {
        OpKind.FORWARD: ("#3461c1", "#a9c4f2"),
        OpKind.BACKWARD: ("#27803f", "#a4dbb2"),
        OpKind.BACKWARD_INPUT: ("#38b6c9", "#b5e6ee"),
        OpKind.BACKWARD_WEIGHT: ("#e0ac12", "#f6e2a0"),
    }
)
"""Colours on light paper of a rank's first stage, and paler ones of others; the page for a browser has the same."""
COLLECTIVE, IDLE = "#b03a9b", "#eef0f3"


def channels(colour: str) -> tuple[int, int, int]:
    """Red, green and blue of ``#rrggbb``, each from 0 to 255."""
    red, green, blue = (int(colour[offset : offset + 2], 16) for offset in (1, 3, 5))
    return red, green, blue


def is_dark(colour: str) -> bool:
    """True if white text has the greater contrast on this colour (WCAG 2)."""
    own = luminance(colour)
    return (1.0 + 0.05) / (own + 0.05) > (own + 0.05) / 0.05


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2, from 0 of black to 1 of white."""
    linear = (
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in (channel / 255 for channel in channels(colour))
    )
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


SIZES = (11, 9, 8)
"""Sizes of text in pixels; a label that fits in none of them is left out. The classes ``s9`` and ``s8`` select one."""
LETTER = 0.64
"""Width of most letters in a wide font, in parts of their size."""
_WIDTHS = {".": 0.32, "W": 1.0, "…": 1.0}
"""Widths of letters that differ from it. Chinese and similar letters are as wide as ``W``."""

_STYLE = """\
text{font-family:ui-sans-serif,system-ui,'Segoe UI',Helvetica,Arial,sans-serif;font-size:11px;fill:#24292f}
.s9{font-size:9px}.s8{font-size:8px}.title{font-size:13px}.faint{fill:#57606a}.mid{text-anchor:middle}.end{text-anchor:end}
.paper{fill:#fff}"""
_DARK = ".paper{fill:#0d1117}text{fill:#d1d7e0}.faint{fill:#9198a1}"
_LABELS = "text.on{fill:#fff}text.under{fill:#111}"
"""Texts on dark and on light marks; the reader's setting does not change them, so this is the last rule."""


def svg_page(size: tuple[int, int], head: str, marks: Iterable[str], style: str = "", dark: str = "") -> str:
    """The picture of ``size`` (width, height) with ``head`` as its title; ``marks`` are in order from back to front.

    ``style`` and ``dark`` are rules for the classes of the marks, ``dark`` of those that differ on dark paper.
    """
    width, height = size
    area = f'width="{width}" height="{height}"'
    rules = f"{_STYLE}\n{style}\n@media(prefers-color-scheme:dark){{{_DARK}{dark}}}\n{_LABELS}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {area} role="img">',
        tooltip(head),
        f"<style>{rules}</style>",
        f'<rect class="paper" {area}/>',
        *marks,
        "</svg>",
    ]
    return "\n".join([*lines, ""])


def rect(
    look: str, x: float | Fraction, y: float | Fraction, width: float | Fraction, height: float | Fraction,
    inside: str = "",
) -> str:  # fmt: skip
    """A rectangle; ``look`` is a colour ``#rrggbb`` or a class, ``inside`` may have a tooltip."""
    paint = f'fill="{look}"' if look.startswith("#") else f'class="{look}"'
    start = f'<rect {paint} x="{px(x)}" y="{px(y)}" width="{px(width)}" height="{px(height)}"'
    return f"{start}>{inside}</rect>" if inside else f"{start}/>"


def text(x: float | Fraction, y: float | Fraction, label: str, look: str = "") -> str:
    """A text with its base line at (x, y); ``look`` has classes."""
    attribute = f' class="{look}"' if look else ""
    return f'<text{attribute} x="{px(x)}" y="{px(y)}">{_escaped(label)}</text>'


def label_in(middle: tuple[float, float], room: tuple[float, float], lines: Sequence[str], *, on_dark: bool) -> str:
    """Lines that are centred at ``middle``, as large as ``room`` (width, height) holds; empty if none fits."""
    widest = max(map(width_of, lines))
    for size in SIZES:
        if widest * size <= room[0] and len(lines) * size <= room[1]:
            look = f"mid {'on' if on_dark else 'under'}" + (f" s{size}" if size != SIZES[0] else "")
            x, y = middle
            first = y + size * (0.36 - (len(lines) - 1) / 2)
            return "".join(text(x, first + number * size, line, look) for number, line in enumerate(lines))
    return ""


def tooltip(label: str) -> str:
    """The tooltip of a mark, or the title of the picture, which screen readers read, too."""
    return f"<title>{_escaped(label)}</title>"


def width_of(label: str) -> float:
    """The width of a text in parts of its size."""
    return sum(_WIDTHS.get(letter, 1.0 if east_asian_width(letter) in "WF" else LETTER) for letter in label)


def px(length: float | Fraction) -> str:
    """A length, to a hundredth of a pixel."""
    return decimal(length, 2)


def decimal(number: float | Fraction, digits: int = 3) -> str:
    """A number with up to ``digits`` digits after the point."""
    return f"{float(number):.{digits}f}".rstrip("0").rstrip(".")


def _escaped(label: str) -> str:
    return escape(printable(label))
