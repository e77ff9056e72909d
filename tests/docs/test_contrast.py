"""Contrast of text by WCAG, AA (4.5), computed from the style sheets of the site and of the pages for a browser."""

import re
from pathlib import Path

import pytest

import pipeproof.views
from pipeproof.views.svg import luminance

VIEWS = Path(pipeproof.views.__file__).parent
SHEETS = {
    "site": Path(__file__).parents[2] / "docs" / "site.css",
    "timeline": VIEWS / "html" / "page" / "page.css",
    "play": VIEWS / "play" / "page" / "play.css",
}
BASIC = ("text", "faint")
TEXTS = {
    "site": [
        *(
            (f"md-{text}", "md-default-bg-color")
            for text in ("default-fg-color", "default-fg-color--light", "typeset-a-color")
        ),
        ("md-primary-bg-color", "md-primary-fg-color"),
    ],
    "timeline": [
        *((text, paper) for text in BASIC for paper in ("paper", "panel", "lane")),
        *((text, "paper") for text in ("mark", "cause")),
    ],
    "play": [
        *((text, paper) for text in BASIC for paper in ("paper", "panel", "lane")),
        *((text, paper) for text in ("text", "good") for paper in ("good-paper", "paper")),
        *((text, paper) for text in ("text", "bad") for paper in ("bad-paper", "paper")),
        ("accent", "paper"),
    ],
}
"""Text and what it is written on, by sheet; of the site also all colours of code."""


def schemes(sheet):
    """The colours of the light and of the dark scheme of a sheet, by name."""
    light, dark = {}, {}
    for selector, body in re.findall(r"([^{}]+)\{([^{}]*)\}", SHEETS[sheet].read_text(encoding="utf-8")):
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})\b", body))
        (dark if "dark" in selector or "slate" in selector else light).update(colours)
    return {"light": light, "dark": light | dark}


def contrast(one, other):
    dark, bright = sorted((luminance(one), luminance(other)))
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("sheet", SHEETS)
def test_text_has_the_contrast_aa(sheet, scheme):
    colours = schemes(sheet)[scheme]
    pairs = list(TEXTS[sheet])
    if sheet == "site":
        codes = [name for name in colours if name.startswith("md-code-hl-") or name == "md-code-fg-color"]
        assert len(codes) == 12
        pairs += [(name, "md-code-bg-color") for name in codes]
    low = {pair: contrast(*(colours[name] for name in pair)) for pair in pairs}
    assert {pair: round(value, 2) for pair, value in low.items() if value < 4.5} == {}
