"""Writes pages, picture and stored errors of the board: ``docs/accuracy*``, ``docs/images/accuracy.svg``.

The errors of steps rule the intervals of predictions (``pipeproof/cost/step_errors.json``).

``python validation/pages/make_accuracy.py`` writes, ``--check`` exits 1 if one of them is stale. It takes minutes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
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
from validation.board.measurement import Measurement
from validation.board.terms import Term

STORED = EVIDENCE / "accuracy.json"
RESIDUALS = EVIDENCE / "accuracy_residuals.json"
_MEASUREMENTS_HEAD = """# Measurements and their predictions

The rows of [the board](accuracy.md), which describes the sources, the plans and the errors. `python -m
validation.board --rows` prints them, `--plans DIR` writes the plan of each. `validation/pages/make_accuracy.py` writes
this page.

"""


_PREDICTOR = Predictor()
"""One for each process: rows with the same plan follow one another."""


def _scored(row: Measurement) -> tuple[Prediction, Residual | None, Mapping[Term, float] | None]:
    prediction = _PREDICTOR.predict(row)
    return prediction, _PREDICTOR.residual(prediction), _PREDICTOR.terms(row)


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
    files, unread = read_measurements([MEASUREMENTS])
    assert not unread, unread
    with ProcessPoolExecutor() as pool:
        scored = list(pool.map(_scored, [row for file in files for row in file.rows], chunksize=8))
    board, terms = [row for row, _, _ in scored], [of_row for _, _, of_row in scored]
    residuals = [found for _, found, _ in scored if found is not None]
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
