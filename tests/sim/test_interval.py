"""The 80 % interval of a simulated step with computed times."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from pipeproof.cli.main import main
from pipeproof.cost.analytic_times import AnalyticCosts
from pipeproof.cost.step_error import bound_of, step_error, step_error_of
from pipeproof.specs.load_plan import plan_from_dict

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "simulate.schema.json").read_text())
MODEL = {
    "kind": "gpt", "num_layers": 4, "hidden_size": 4096, "num_heads": 32, "ffn_size": 14336, "vocab_size": 32000,
    "seq_length": 4096,
}  # fmt: skip


def plan(cost, **model):
    return {
        "pipeproof": 1, "model": {**MODEL, **model}, "topology": {"pp": 2},
        "schedule": {"kind": "1f1b", "num_micro_batches": 4, "micro_batch_size": 1}, "cost": cost,
    }  # fmt: skip


def analytic(device, **keys):
    return {"analytic": {"device": device, "dtype": "bfloat16", **keys}}


def simulated(tmp_path, content, *options):
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(content))
    done = CliRunner().invoke(main, ["simulate", str(path), *options], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_a_step_has_the_interval_of_measured_ones(tmp_path):
    error = step_error("h100", has_experts=False, bound="computations")
    text = simulated(tmp_path, plan(analytic("h100", execution="graph")))
    assert "80 % interval: " in text
    steps = f"from the errors of {error.num_rows} measured steps of {error.num_models} models ({error.kind})"
    assert f"{steps}; few models, so other devices count too." in text
    assert "few models" not in simulated(tmp_path, plan(analytic("a100", execution="graph")))


def test_a_device_without_measured_rows_is_named(tmp_path):
    assert "no measured rows for this device" in simulated(tmp_path, plan(analytic("mi300x")))
    content = json.loads(simulated(tmp_path, plan(analytic("mi300x")), "--format", "json"))
    Draft202012Validator(SCHEMA).validate(content)
    assert content["interval"] is None


def test_json_has_the_ends_of_the_interval(tmp_path):
    content = json.loads(simulated(tmp_path, plan(analytic("h100")), "--format", "json"))
    Draft202012Validator(SCHEMA).validate(content)
    interval = content["interval"]
    assert interval["low"] < content["makespan"] < interval["high"]
    assert interval["low"] * interval["high"] == pytest.approx(content["makespan"] ** 2)


def test_given_times_have_no_interval(tmp_path):
    given = plan({"forward_us": 10, "backward_us": 20})
    assert "interval" not in simulated(tmp_path, given)
    assert "interval" not in json.loads(simulated(tmp_path, given, "--format", "json"))
    assert step_error_of(plan_from_dict(given).spec) is None


@pytest.mark.parametrize(
    ("keys", "model", "bound"),
    [
        ({"execution": "graph"}, {}, "computations"),
        ({}, {"hidden_size": 512, "num_heads": 8, "ffn_size": 2048, "seq_length": 256}, "host"),
    ],
)
def test_the_bound_of_the_slowest_stage(keys, model, bound):
    spec = plan_from_dict(plan(analytic("h100", **keys), **model)).spec
    assert bound_of(AnalyticCosts(spec, spec.cost.analytic)) == bound
