"""Errors of predictions by group, the stored ones, and the forms of the board."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from pipeproof.specs.load_plan import load_plan
from validation.board.__main__ import measurements
from validation.board.accuracy_board import (
    MEASUREMENTS,
    SETS,
    Prediction,
    Predictor,
    accuracies,
    read_measurements,
)
from validation.board.constants import LeftOut
from validation.board.measurement import Measurement, Quantity

ROOT = Path(__file__).parents[2]
STORED = {
    (one["group"], one["quantity"]): one
    for one in json.loads((ROOT / "validation" / "results" / "accuracy.json").read_text())
}
TOLERANCE = 0.001
"""Largest growth of a MAPE, as a share."""


def prediction(measured, predicted, group="some", reason=""):
    plan = {} if not reason else None
    left_out = {LeftOut.MODEL: predicted + 1, LeftOut.SYSTEM: predicted + 2} if predicted else {}
    return Prediction(Measurement(group, "row", Quantity.STEP, measured, plan, reason), predicted, reason, left_out)


def test_errors_of_a_group_by_hand():
    rows = [prediction(10, 11), prediction(10, 8), prediction(10, 10), prediction(5, None, reason="none")]
    (accuracy,) = accuracies(rows)
    assert (accuracy.count, accuracy.omitted) == (3, 1)
    assert accuracy.fitted == pytest.approx(0.1)
    assert accuracy.other_models == pytest.approx((0.2 + 0.1 + 0.1) / 3)
    assert accuracy.other_systems == pytest.approx((0.3 + 0.0 + 0.2) / 3)
    assert accuracy.mape == accuracy.other_systems  # the larger one
    assert accuracy.median == pytest.approx(0.1)
    assert accuracy.worst == pytest.approx(-0.2)
    assert accuracy.bias == pytest.approx(-1 / 30)


def worse(group, stored):
    """Differences that are worse than stored, as text; empty if there are none."""
    if group.count < stored["count"]:
        return f"{group.group}: {group.count} predictions, {stored['count']} are stored"
    if stored["mape"] is not None and group.mape > stored["mape"] + TOLERANCE:
        return f"{group.group}, {group.quantity}: MAPE {group.mape:.2%}, stored is {stored['mape']:.2%}"
    return ""


@pytest.mark.slow(only=["vtrain", "megatron-bridge", "mlperf"])
@pytest.mark.parametrize("name", SETS)
def test_no_group_is_worse_than_stored(name):
    """If one is on purpose: python validation/pages/make_accuracy.py stores the errors of today."""
    predictor = Predictor()
    rows = [row for file in read_measurements([MEASUREMENTS])[0] if file.set == name for row in file.rows]
    groups = accuracies(predictor.predict(row) for row in rows)
    assert groups
    missing = [one.group for one in groups if (one.group, one.quantity) not in STORED]
    assert not missing, "run python validation/pages/make_accuracy.py"
    assert [text for one in groups if (text := worse(one, STORED[one.group, one.quantity]))] == []


def invoke(*arguments):
    return CliRunner().invoke(measurements, [*map(str, arguments)], catch_exceptions=False)


def test_json_fits_its_schema_and_has_the_errors_of_the_rows():
    done = invoke(MEASUREMENTS / "megatron_goldens.json", "--format", "json")
    board = json.loads(done.stdout)
    schema = json.loads((ROOT / "validation" / "board" / "board.schema.json").read_text())
    Draft202012Validator(schema).validate(board)
    row = next(row for row in board["measurements"] if row["predicted"] is not None)
    assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1)
    assert all(row["reason"] for row in board["measurements"] if row["predicted"] is None)


def test_plans_picture_and_page_are_written(tmp_path):
    picture, page, plans = tmp_path / "board.svg", tmp_path / "board.md", tmp_path / "plans"
    done = invoke(MEASUREMENTS / "own_h200_steps.json", "--plot", picture, "--page", page, "--plans", plans)
    assert done.exit_code == 0
    written = sorted(plans.glob("*.yaml"))
    assert len(written) == 33
    assert load_plan(written[0]).spec.cost.analytic.device == "h200"
    assert ET.fromstring(picture.read_text()).tag.endswith("svg")
    assert "### own runs, 2 H200, step: forwards and backwards of a step, s" in page.read_text()
