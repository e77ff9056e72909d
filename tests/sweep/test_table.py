"""The output of a sweep for people and programs: best first, chosen columns, refusals with their codes, pictures."""

import io
import re
from fractions import Fraction

import pytest
from rich.console import Console

from pipeproof.analysis.sweep.evaluate_point import PointResult, Status
from pipeproof.analysis.sweep.results_table import best_first, render_table
from pipeproof.analysis.sweep.sweep_points import Point, Sweep


def result(number, settings, makespan, **figures):
    figures = {"sequence": Fraction(1), "idle": Fraction(0), "most_idle": Fraction(0), "peak": 1, **figures}
    return PointResult(
        f"{number:016x}", settings, Status.OK, Fraction(makespan), Fraction(figures["sequence"]),
        Fraction(figures["idle"]), Fraction(figures["most_idle"]), figures["peak"], figures.get("warnings", ()),
    )  # fmt: skip


RESULTS = (
    result(0, {"schedule.kind": "1f1b", "topology.pp": 2}, 300, sequence=2, peak=3, warnings=("PP411",)),
    result(1, {"schedule.kind": "gpipe", "topology.pp": 4}, 100, sequence="10/3", idle="1/4", peak=9),
    PointResult("2" * 16, {"topology.pp": 5}, Status.REFUSED, code="PP140", message="not for [5]"),
    result(3, {"schedule.kind": "1f1b", "topology.pp": 4}, 100, sequence=1, peak=2),
    PointResult("4" * 16, {"topology": {"pp": 6, "tp": None}}, Status.FAILED, message="died, twice"),
)
SWEEP = Sweep(
    "base.yaml", ("schedule.kind", "topology.pp", "topology"),
    tuple(Point(one.settings, {}, one.id) for one in RESULTS),
)  # fmt: skip


def text_of(**options):
    stream = io.StringIO()
    options = {"sort": "makespan", "top": 20, **options}
    render_table(SWEEP, RESULTS, Console(file=stream, width=100, highlight=False), **options)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("by", "order"), [("makespan", [1, 3, 0]), ("sequence", [3, 0, 1]), ("idle", [0, 3, 1]), ("peak", [3, 0, 1])]
)
def test_best_first_and_equal_ones_in_order(by, order):
    assert [int(one.id, 16) for one in best_first(RESULTS, by)] == order


def test_the_table_has_the_chosen_columns_and_says_why_points_are_missing():
    text = text_of()
    assert [line.split() for line in text.splitlines()[2:5]] == [
        ["gpipe", "4", "-", "100", "us", "3.33", "us", "25.0%", "9"],
        ["1f1b", "4", "-", "100", "us", "1", "us", "0.0%", "2"],
        ["1f1b", "2", "-", "300", "us", "2", "us", "0.0%", "3"],
    ]
    assert "refused PP140: 1; first topology.pp=5: not for [5]" in text
    assert "failed: 1; first topology=pp 6, tp null: died, twice" in text
    assert "warning PP411: 1 of 3" in text
    assert re.split("  +", text.splitlines()[1]) == [
        "kind",
        "pp",
        "topology",
        "makespan",
        "per sequence",
        "idle",
        "peak",
    ]


def test_rows_can_be_fewer():
    first, _, row, *rest = text_of(sort="peak", top=1).splitlines()
    assert first == "best by peak: 1 of 5 points"
    assert row.split()[:2] == ["1f1b", "4"]
    assert rest[:2] == [
        "times are placeholders (100 us forward, 200 us backward per stage): proportions only",
        "warning PP411: 1 of 3; `pipeproof --explain PP411`",
    ]
