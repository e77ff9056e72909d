"""The marks that the picture is made of, and what they look like on light and on dark paper."""

from __future__ import annotations

from html import escape

NOTHING = "#7d7d7d"
"""The colour of what is nobody's, or not yet."""
SIZES = (11, 9, 8)
"""Of letters, in pixels; what fits in none of them is left out."""
STYLE = """\
text{font-family:ui-sans-serif,system-ui,'Segoe UI',Helvetica,Arial,sans-serif;font-size:11px;fill:#24292f}
.title{font-size:13px}.faint{fill:#57606a}.end{text-anchor:end}.mid{text-anchor:middle}.s9{font-size:9px}.s8{font-size:8px}
.paper{fill:#fff}.cut{fill:none;stroke:#fff;stroke-width:1.5}.band{fill-opacity:.45}
@media(prefers-color-scheme:dark){.paper{fill:#0d1117}.cut{stroke:#0d1117}text{fill:#d1d7e0}.faint{fill:#9198a1}}
text.on{fill:#fff}text.under{fill:#111}"""
"""Of the whole picture; the background is its own."""


def text(x: float, y: float, words: str, look: str = "") -> str:
    """Words whose base line begins there; ``look`` has classes of ``STYLE``."""
    attribute = f' class="{look}"' if look else ""
    return f'<text{attribute} x="{px(x)}" y="{px(y)}">{escape(words)}</text>'


def rect(colour: str | None, x: float, y: float, width: float, height: float, inside: str = "") -> str:
    """A box of a colour, or without one its frame alone."""
    look = 'class="cut"' if colour is None else f'fill="{colour}"'
    return f'<rect {look} x="{px(x)}" y="{px(y)}" width="{px(width)}" height="{px(height)}">{inside}</rect>'


def px(length: float) -> str:
    """To a hundredth of a pixel."""
    return f"{length:.2f}".rstrip("0").rstrip(".")
