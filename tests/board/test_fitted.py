"""Fitted constants, the refusal of rows of other releases, and intervals from errors."""

import json
from dataclasses import astuple
from math import log
from pathlib import Path

import pytest

from pipeproof.cost.device_tables import device_table
from pipeproof.cost.step_error import StepError, step_error
from validation.board.accuracy_board import MEASUREMENTS, Predictor, read_measurements
from validation.board.constants import (
    FAMILIES,
    PRODUCTS,
    LeftOut,
    fitted,
    host_us,
    memory_share,
    value_of,
    with_constants,
    without,
)
from validation.board.fit_constants import fit_constants
from validation.board.golden_records import Record, record_of
from validation.board.intervals import Residual, all_of, coverages, step_errors, to_text
from validation.board.measurement import Quantity

ROOT = Path(__file__).parents[2]
RESIDUALS = ROOT / "validation" / "results" / "accuracy_residuals.json"


def rows_of(name):
    return [row for file in read_measurements([MEASUREMENTS / name])[0] for row in file.rows]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_package_has_the_constants_that_were_fitted_to_all_rows(family):
    for device in FAMILIES[family]:
        table = device_table(device)
        assert table.memory_efficiency == pytest.approx(value_of(memory_share(family)), abs=0.04)
        if family != "hopper":  # whose host comes from earlier fits to tests of Megatron-LM
            assert table.host_us == pytest.approx(value_of(host_us(family)), rel=0.06)


def test_the_products_of_gb300_are_those_that_were_fitted():
    shares = {curve.dtype: curve.efficiency for curve in device_table("gb300").products}
    assert shares["bfloat16"] == shares["float8"] == pytest.approx(value_of(PRODUCTS), abs=0.035)


def test_a_row_is_scored_with_constants_of_other_models_and_of_other_systems():
    row = next(row for row in rows_of("megatron_goldens.json") if row.plan and "A100" in row.system)
    name = host_us(row.system)
    others = {left_out: without(row, left_out) for left_out in LeftOut}
    assert others[LeftOut.SYSTEM][name] != value_of(name)
    for values in others.values():
        changed = with_constants(row, values).plan["cost"]["analytic"]
        share = row.plan["cost"]["analytic"]["host_us"] / value_of(name)
        assert changed["host_us"] in (
            pytest.approx(values.get(name, value_of(name)), abs=0.01),
            pytest.approx(values.get(name, value_of(name)) * share, rel=0.3),
        )
    assert with_constants(row, {}) is row


def test_constants_of_a_family_are_in_the_table_of_a_plan():
    row = next(row for row in rows_of("mlperf_llama405b_steps.csv") if "H100" in row.group)
    table = with_constants(row, {memory_share("hopper"): 0.5}).plan["cost"]["analytic"]["table"]
    assert table["memory_efficiency"] == 0.5
    assert with_constants(row, {memory_share("ampere"): 0.5}) is row
    slower = Predictor().predict(with_constants(row, {memory_share("hopper"): 0.3}))
    assert slower.predicted > Predictor().predict(row).predicted


def test_no_constant_was_fitted_to_what_it_is_left_out_for():
    """Without an entry for its model or system, a row was in no fit, and is scored with the values of all others."""
    rows = rows_of("mlperf_llama405b_steps.csv")
    for row in rows:
        if row.plan is None:
            continue
        device = row.plan["cost"]["analytic"]["device"]
        family = next(name for name, devices in FAMILIES.items() if device in devices)
        assert row.model in fitted()[memory_share(family)][LeftOut.MODEL]
        assert row.system in fitted()[memory_share(family)][LeftOut.SYSTEM]


@pytest.mark.slow
def test_the_fit_of_the_hosts_of_tests_gives_the_stored_constants():
    found = fit_constants(rows_of("megatron_goldens.json"))
    assert len(found) > 3
    for name, values in found.items():
        assert values["all"] == pytest.approx(fitted()[name]["all"], rel=0.02), name


def test_rows_of_another_releases_code_and_unsteady_runs_have_a_reason():
    rows = {(row.name, row.quantity): row for row in rows_of("megatron_goldens.json")}
    name = "gpt3_mcore_te_tp1_pp4_resume_torch_dist_persistent_disable_bias_linear, dev_dgx_a100"
    assert "--timing-log-level 2" in rows[name, Quantity.STEP].reason
    assert rows[name, Quantity.ALLOCATED].plan is not None  # timers need no memory
    unsteady = "gpt3_mcore_te_tp1_pp4_vp1_uneven_pipeline_1node, dev_dgx_gb200"
    assert "half of the run's own steps lie" in rows[unsteady, Quantity.STEP].reason
    assert record_of("no_such_case", "dev_dgx_h100") is None
    other = Record("2026-01-01", "26.02", ("--vocab-size",), 0.01)
    assert "--vocab-size" in other.no_step()
    assert "--vocab-size" in other.no_memory()
    assert not Record("2026-01-01", "26.02", (), 0.01).no_step()


def test_a_container_without_fused_attention_stores_scores():
    rows = {row.name: row for row in rows_of("megatron_goldens.json") if row.quantity is Quantity.ALLOCATED}
    case = "gpt3_mcore_te_tp2_pp2_resume_torch_dist"
    before, now = (rows[f"{case}, {machine}"] for machine in ("lts_dgxa100_dracooci", "lts_dgx_a100"))
    assert before.plan["cost"]["analytic"]["attention"] == "unfused"
    assert abs(Predictor().predict(before).error) < 0.02
    assert abs(Predictor().predict(now).error) < 0.03


def residual(error, model="a", *, device="h100", bound="host", system="a"):
    return Residual(device, False, bound, system, model, log(1 + error))


def test_an_interval_covers_four_of_five_models():
    rows = [residual(error, str(error)) for error in (0.01, -0.02, 0.03, -0.04, 0.05, 0.06, 0.07, 0.08, 0.09)]
    often = [residual(0.01, "0.01") for _ in range(90)]  # one model, however often it was measured
    for number, given in ((9, rows), (99, rows + often)):
        models, found, mean, within = step_errors(given)["h100"]["dense"]["host"]
        assert (models, found, mean) == (9, number, 0.05)
        assert within == pytest.approx(0.08, abs=1e-3)  # the eighth of nine: 0.8 (9 + 1)


def test_few_models_have_the_interval_of_all_devices():
    own = [residual(0.01, device="h200", system=system) for system in "ab"]
    others = [residual(0.1, str(number)) for number in range(4)]
    assert step_errors(own)["h200"]["dense"]["host"] == [1, 2, 0.01, 0.01]
    assert step_errors(own + others)["h200"]["dense"]["host"] == [1, 2, 0.01, 0.1]
    elsewhere = [residual(0.1, str(number), bound="computations") for number in range(4)]
    assert step_errors(own + elsewhere)["h200"]["dense"]["host"] == [1, 2, 0.01, 0.01]


def test_a_model_is_held_out_with_all_of_its_rows():
    rows = [residual(0.01 * index, str(index)) for index in range(1, 11)] + [residual(1.0, "far"), residual(1.0, "far")]
    (found,) = coverages(rows)
    assert (found.num_models, found.num_rows) == (11, 12)
    assert found.covered == pytest.approx(9 / 11)  # without "10" the ninth of ten models is within 0.09
    assert coverages([residual(0.1), residual(0.1), residual(0.1)]) == []  # nothing but its own model
    half = [residual(0.1, str(number)) for number in range(9)] + [residual(0.1, "half"), residual(1.0, "half")]
    assert all_of(coverages(half)).covered == pytest.approx(0.95)


def test_the_table_of_the_package_is_that_of_the_boards_errors():
    stored = [Residual(*one) for one in json.loads(RESIDUALS.read_text())]
    assert len(stored) > 500
    assert astuple(stored[0])[0] in {device for devices in FAMILIES.values() for device in devices}
    table = ROOT / "pipeproof" / "cost" / "step_errors.json"
    assert to_text(step_errors(stored)) == table.read_text()


def test_four_of_five_held_out_models_lie_in_their_interval():
    stored = [Residual(*one) for one in json.loads(RESIDUALS.read_text())]
    assert all_of(coverages(stored)).covered == pytest.approx(0.8, abs=0.1)


def test_the_interval_of_a_step():
    error = StepError("h100, dense", 5, 8, 0.1, 0.25)
    assert error.interval(100.0) == (80.0, 125.0)
    assert step_error("mi300x", has_experts=False) is None
    assert step_error("h100", has_experts=False, bound="no such bound").kind == "h100, dense"
