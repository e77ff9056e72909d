"""Writes pages, picture and stored errors of the board: ``docs/accuracy*``, ``docs/images/accuracy.svg``.

The errors of steps rule the intervals of predictions (``pipeproof/cost/step_errors.json``).

``python validation/pages/make_accuracy.py`` writes, ``--check`` exits 1 if one of them is stale. It takes minutes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import astuple

from pages import DOCS, EVIDENCE, fill, main

from pipeproof.cost.step_error import TABLE as STEP_ERRORS
from validation.board.accuracy_board import (
    MEASUREMENTS,
    Prediction,
    Predictor,
    accuracies,
    read_measurements,
)
from validation.board.accuracy_picture import board_picture
from validation.board.board_output import (
    COVERAGE_HEADINGS,
    TERM_HEADINGS,
    coverage_cells,
    groups_in_markdown,
    markdown_table,
    rows_in_markdown,
    term_cells,
)
from validation.board.intervals import Residual, step_errors, to_text

STORED = EVIDENCE / "accuracy.json"
RESIDUALS = EVIDENCE / "accuracy_residuals.json"
_MEASUREMENTS_HEAD = """# Measurements and their predictions

The rows of [the board](accuracy.md), which describes the sources, the plans and the errors. `python -m
validation.board --rows` prints them, `--plans DIR` writes the plan of each. `validation/pages/make_accuracy.py` writes
this page.

"""


def predictions(predictor: Predictor) -> list[Prediction]:
    """Predict every measurement that comes with pipeproof."""
    files, unread = read_measurements([MEASUREMENTS])
    assert not unread, unread
    return [predictor.predict(row) for file in files for row in file.rows]


def residuals_of(rows: Sequence[Prediction], predictor: Predictor) -> list[Residual]:
    """Return the errors of the predicted steps, which rule intervals."""
    return [found for row in rows if (found := predictor.residual(row)) is not None]


def residuals_to_text(residuals: Sequence[Residual]) -> str:
    """Return the errors as JSON, a line for each."""
    return "[\n" + ",\n".join(json.dumps(astuple(one)) for one in residuals) + "\n]\n"


def stored(rows: Sequence[Prediction]) -> str:
    """Return the errors of each group as JSON."""
    groups = [
        {"group": one.group, "quantity": one.quantity, "count": one.count, "omitted": one.omitted,
         "mape": None if one.mape is None else round(one.mape, 6),
         "fitted": None if one.fitted is None else round(one.fitted, 6)}
        for one in accuracies(rows)
    ]  # fmt: skip
    return json.dumps(groups, indent=1) + "\n"


if __name__ == "__main__":
    predictor = Predictor()
    board = predictions(predictor)
    residuals = residuals_of(board, predictor)
    terms = [predictor.terms(row.measurement) for row in board]
    page = EVIDENCE / "accuracy.md"
    sys.exit(
        main(
            "validation/pages/make_accuracy.py",
            {
                page: fill(
                    page,
                    {
                        "groups": groups_in_markdown(board),
                        "coverage": markdown_table(COVERAGE_HEADINGS, coverage_cells(residuals)),
                        "terms": markdown_table(TERM_HEADINGS, term_cells(board, terms)),
                    },
                ),
                EVIDENCE / "accuracy-measurements.md": _MEASUREMENTS_HEAD + rows_in_markdown(board),
                DOCS / "images" / "accuracy.svg": board_picture(board),
                STORED: stored(board),
                RESIDUALS: residuals_to_text(residuals),
                STEP_ERRORS: to_text(step_errors(residuals)),
            },
        )
    )
