"""The board as a picture: a row for each group, a mark for each measurement at predicted / measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pipeproof.views.svg import rect, svg_page, text, tooltip
from validation.board.accuracy_board import Prediction, accuracies, by_group
from validation.board.board_output import percent
from validation.board.measurement import Quantity

_LEFT, _WIDTH, _RIGHT, _TOP, _ROW = 250, 480, 120, 58, 26
_LIMITS = (0.4, 2.5)
"""Smallest and largest ratio; marks outside are drawn at the edge."""
_GRID = (0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
_STYLE = ".grid{fill:#d0d7de}.one{fill:#57606a}.band{fill:#1a7f37;fill-opacity:.12}.mark{fill:#0969da;fill-opacity:.55}"
_DARK = ".grid{fill:#30363d}.one{fill:#9198a1}.mark{fill:#58a6ff;fill-opacity:.6}"


def board_picture(predictions: Sequence[Prediction]) -> str:
    """Return the picture as SVG; ratios are on a logarithmic axis, and the band is 10 % to either side."""
    groups = [(key, [p for p in members if p.predicted is not None]) for key, members in by_group(predictions).items()]
    groups = [(key, members) for key, members in groups if members]
    height = _TOP + _ROW * len(groups) + 16
    return svg_page((_LEFT + _WIDTH + _RIGHT, height), "Predicted / measured", _marks(groups, height), _STYLE, _DARK)


def _x(ratio: float) -> float:
    low, high = map(math.log, _LIMITS)
    inside = min(max(math.log(ratio), low), high)
    return _LEFT + _WIDTH * (inside - low) / (high - low)


def _marks(groups: Sequence[tuple[tuple[str, Quantity], list[Prediction]]], height: int) -> Iterator[str]:
    yield text(12, 22, "Predicted / measured; one mark per measurement", "title")
    low, high = _x(0.9), _x(1.1)
    yield rect("band", low, _TOP - 10, high - low, height - _TOP)
    for ratio in _GRID:
        yield rect("one" if ratio == 1 else "grid", _x(ratio), _TOP - 10, 1, height - _TOP)
        yield text(_x(ratio), _TOP - 16, f"{ratio:g}", "mid faint s9")
    yield text(_LEFT + _WIDTH + 14, _TOP - 16, "MAPE, bias", "faint s9")
    for number, ((group, quantity), members) in enumerate(groups):
        middle = _TOP + _ROW * number + 8
        (accuracy,) = accuracies(members)
        yield text(12, middle + 3, group)
        for prediction in members:
            ratio = 1 + prediction.error
            label = f"{prediction.measurement.name} ({quantity}): {percent(prediction.error, signed=True)}"
            yield rect("mark", _x(ratio) - 2, middle - 5, 4, 10, tooltip(label))
        figures = f"{percent(accuracy.mape)}, {percent(accuracy.bias, signed=True)}"
        yield text(_LEFT + _WIDTH + 14, middle + 3, figures)
