"""The board as text, JSON and Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from pipeproof.atomic_write import write_output
from pipeproof.views.tables import print_table
from validation.board.accuracy_board import Accuracy, Prediction, accuracies, by_group
from validation.board.intervals import Residual, all_of, coverages
from validation.board.terms import Term, correlations


def percent(value: float | None, *, signed: bool = False) -> str:
    """Return a share as a percentage, or ``-``."""
    return "-" if value is None else f"{100 * value:{'+' if signed else ''}.1f} %"


def accuracy_cells(accuracy: Accuracy) -> tuple[str, ...]:
    """Return the cells of a group: name, quantity, numbers of rows, errors."""
    return (
        accuracy.group,
        accuracy.quantity,
        str(accuracy.count),
        str(accuracy.omitted),
        percent(accuracy.mape),
        percent(accuracy.other_models),
        percent(accuracy.other_systems),
        percent(accuracy.fitted),
        percent(accuracy.median),
        percent(accuracy.worst, signed=True),
        percent(accuracy.bias, signed=True),
    )


ACCURACY_HEADINGS = (
    "group", "quantity", "rows", "without a plan", "MAPE", "other models", "other systems", "fitted", "median", "worst",
    "bias",
)  # fmt: skip
ROW_HEADINGS = ("measurement", "measured", "predicted", "error")


def row_cells(prediction: Prediction) -> tuple[str, ...]:
    """Return the cells of a row; a row without a prediction has the reason in place of its error."""
    measurement = prediction.measurement
    measured = f"{measurement.measured:.4g}" if measurement.measured else "-"
    if prediction.predicted is None:
        return measurement.name, measured, "-", prediction.reason
    return measurement.name, measured, f"{prediction.predicted:.4g}", percent(prediction.error, signed=True)


def print_board(predictions: Sequence[Prediction], console: Console, *, rows: bool) -> None:
    """Print the errors of each group, and with ``rows`` each measurement before them."""
    if rows:
        for (group, quantity), members in by_group(predictions).items():
            console.print(f"{group}: {quantity}", style="bold", soft_wrap=True, markup=False)
            print_table(_right(ROW_HEADINGS, 1, 3), map(row_cells, members), console)
            for note in notes_of(members):
                console.print(f"  approximate: {note}", soft_wrap=True, markup=False)
            console.print()
    headings = _right(ACCURACY_HEADINGS, 2, 11)
    print_table(headings, map(accuracy_cells, accuracies(predictions)), console, optional=("median", "without a plan"))


COVERAGE_HEADINGS = ("held-out models of", "models", "rows", "in their 80 % interval")


def coverage_cells(residuals: Sequence[Residual]) -> list[tuple[str, ...]]:
    """Return by device and kind of model the held-out models, and the mean share in their intervals; then of all."""
    found = coverages(residuals)
    return [
        (one.kind, str(one.num_models), str(one.num_rows), percent(one.covered))
        for one in (*found, *([all_of(found)] if found else []))
    ]


def print_coverages(residuals: Sequence[Residual], console: Console) -> None:
    """Print the share of held-out models in the intervals of other models."""
    console.print()
    print_table(_right(COVERAGE_HEADINGS, 1, 4), coverage_cells(residuals), console)


TERM_HEADINGS = ("group", *Term, "goes with the error most")


def print_terms(
    predictions: Sequence[Prediction], terms: Sequence[Mapping[Term, float] | None], console: Console
) -> None:
    """Print by group the mean share of each term, and the correlation of the shares with the errors of time."""
    console.print()
    console.print("mean share of a step, and its correlation with log(predicted / measured time) of the group's rows")
    print_table(TERM_HEADINGS, term_cells(predictions, terms), console)


def term_cells(
    predictions: Sequence[Prediction], terms: Sequence[Mapping[Term, float] | None]
) -> list[tuple[str, ...]]:
    """Return by group the cells of ``print_terms``; none for groups whose steps have no terms."""
    of_row = {id(prediction): of for prediction, of in zip(predictions, terms, strict=True) if of is not None}
    cells = []
    for (group, _), members in by_group(predictions).items():
        rows = [row for row in members if row.predicted is not None and id(row) in of_row]
        if not rows:
            continue
        found = correlations([of_row[id(row)] for row in rows], [row.time_error for row in rows])
        ranked = sorted(found.items(), key=lambda entry: -abs(entry[1][1]))
        share_cells = [f"{100 * share:.0f} % {goes_with:+.2f}" for share, goes_with in found.values()]
        cells.append((group, *share_cells, ranked[0][0].value))
    return cells


def _right(headings: Sequence[str], first: int, last: int) -> list[str]:
    return [f">{heading}" if first <= index < last else heading for index, heading in enumerate(headings)]


def notes_of(predictions: Sequence[Prediction]) -> list[str]:
    """Return the approximations of the plans of predicted rows, each once."""
    return list(dict.fromkeys(n for p in predictions if p.predicted is not None for n in p.measurement.notes))


def board_to_json(predictions: Sequence[Prediction], unread: Sequence[str]) -> dict[str, Any]:
    """Return the board as JSON; see ``board.schema.json``."""
    return {
        "groups": [asdict(accuracy) for accuracy in accuracies(predictions)],
        "measurements": [_row_to_json(prediction) for prediction in predictions],
        "unread_files": list(unread),
    }


def _row_to_json(prediction: Prediction) -> dict[str, Any]:
    measurement = prediction.measurement
    return {
        "group": measurement.group,
        "quantity": measurement.quantity,
        "name": measurement.name,
        "measured": measurement.measured or None,
        "predicted": prediction.predicted,
        "error": None if prediction.predicted is None else prediction.error,
        "reason": prediction.reason or None,
        "approximate": list(measurement.notes),
    }


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; bars in cells are escaped."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def groups_in_markdown(predictions: Sequence[Prediction]) -> str:
    """Return the table of groups in Markdown."""
    return markdown_table(ACCURACY_HEADINGS, list(map(accuracy_cells, accuracies(predictions))))


def rows_in_markdown(predictions: Sequence[Prediction]) -> str:
    """Return a section for each group in Markdown: its rows, the approximations of their plans, rows without a plan."""
    return "\n".join(_sections(predictions))


def _sections(predictions: Sequence[Prediction]) -> Iterator[str]:
    for (group, quantity), members in by_group(predictions).items():
        yield f"### {group}: {quantity}\n"
        predicted = [row_cells(p) for p in members if p.predicted is not None]
        if predicted:
            yield markdown_table(ROW_HEADINGS, predicted)
        if notes := notes_of(members):
            yield "Approximate in these plans:\n\n" + "".join(f"- {note}\n" for note in notes)
        reasons: dict[str, list[str]] = {}
        for prediction in members:
            if prediction.predicted is None:
                reasons.setdefault(prediction.reason, []).append(prediction.measurement.name)
        if reasons:
            rows = [(reason, str(len(names)), "; ".join(dict.fromkeys(names))) for reason, names in reasons.items()]
            yield markdown_table(("no prediction, because", "rows", "measurements"), rows)


def board_page(predictions: Sequence[Prediction]) -> str:
    """Return the whole board as one Markdown page."""
    return (
        f"# Predicted and measured\n\n{groups_in_markdown(predictions)}\n"
        f"Errors are (predicted - measured) / measured.\n\n## Measurements\n\n{rows_in_markdown(predictions)}"
    )


def write_plans(predictions: Sequence[Prediction], directory: Path) -> int:
    """Write the plan of each measurement as YAML, named by group and row; return their number."""
    directory.mkdir(parents=True, exist_ok=True)
    number = 0
    for index, prediction in enumerate(predictions):
        measurement = prediction.measurement
        if measurement.plan is None:
            continue
        name = re.sub(r"[^\w.]+", "-", f"{measurement.group} {measurement.name}", flags=re.ASCII)[:120]
        head = f"# {measurement.name}\n# measured: {measurement.measured:.6g} ({measurement.quantity})\n"
        notes = "".join(f"# approximate: {note}\n" for note in measurement.notes)
        plan = yaml.safe_dump(dict(measurement.plan), sort_keys=False, width=120, default_flow_style=None)
        write_output(directory / f"{index:04d}-{name}.yaml", head + notes + plan)
        number += 1
    return number
