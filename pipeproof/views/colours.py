"""The colours of operations in every picture on light paper: by kind, paler for other stages of a rank.

The page for a browser has the same colours in its style sheet. Letters carry the same information as colours.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pipeproof.schedule.ops import OpKind

KIND_COLOURS: Mapping[OpKind, tuple[str, str]] = MappingProxyType(
    {
        OpKind.FORWARD: ("#3461c1", "#a9c4f2"),
        OpKind.BACKWARD: ("#27803f", "#a4dbb2"),
        OpKind.BACKWARD_INPUT: ("#38b6c9", "#b5e6ee"),
        OpKind.BACKWARD_WEIGHT: ("#e0ac12", "#f6e2a0"),
    }
)
"""Of a rank's first stage, and the paler one of others."""
COLLECTIVE, IDLE = "#b03a9b", "#eef0f3"


def channels(colour: str) -> tuple[int, int, int]:
    """Red, green and blue of ``#rrggbb``, each from 0 to 255."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
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
