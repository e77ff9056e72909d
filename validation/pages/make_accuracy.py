"""Writes pages, picture and stored errors of the board: ``docs/accuracy*``, ``docs/images/accuracy.svg``.

``python validation/pages/make_accuracy.py`` writes, ``--check`` exits 1 if one of them is stale. It takes minutes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from pages import DOCS, EVIDENCE, fill, main

from validation.board.accuracy_board import (
    MEASUREMENTS,
    Prediction,
    Predictor,
    accuracies,
    read_measurements,
)
from validation.board.accuracy_picture import board_picture
from validation.board.board_output import groups_in_markdown, rows_in_markdown

STORED = EVIDENCE / "accuracy.json"
_MEASUREMENTS_HEAD = """# Measurements and their predictions

The rows of [the board](accuracy.md), which describes the sources, the plans and the errors. `python -m
validation.board --rows` prints them, `--plans DIR` writes the plan of each. `validation/pages/make_accuracy.py` writes
this page.

"""


def predictions() -> list[Prediction]:
    """Predict every measurement that comes with pipeproof."""
    files, unread = read_measurements([MEASUREMENTS])
    assert not unread, unread
    predictor = Predictor()
    return [predictor.predict(row) for file in files for row in file.rows]


def stored(rows: Sequence[Prediction]) -> str:
    """Return the errors of each group as JSON."""
    groups = [
        {"group": one.group, "quantity": one.quantity, "count": one.count, "omitted": one.omitted,
         "mape": None if one.mape is None else round(one.mape, 6)}
        for one in accuracies(rows)
    ]  # fmt: skip
    return json.dumps(groups, indent=1) + "\n"


if __name__ == "__main__":
    board = predictions()
    page = EVIDENCE / "accuracy.md"
    sys.exit(
        main(
            "validation/pages/make_accuracy.py",
            {
                page: fill(page, {"groups": groups_in_markdown(board)}),
                EVIDENCE / "accuracy-measurements.md": _MEASUREMENTS_HEAD + rows_in_markdown(board),
                DOCS / "images" / "accuracy.svg": board_picture(board),
                STORED: stored(board),
            },
        )
    )
