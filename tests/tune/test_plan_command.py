"""``pipeproof tune`` without ``--gpus`` as a person or a script meets it."""

import json
import re

import pytest
import yaml

from pipeproof.specs.load_plan import load_plan
from tests.cli.commands import invoke
from tests.cli.test_tune import SCHEMA
from tests.plans import plan_dict
from tests.tune.plans import four_ranks


@pytest.fixture
def write(tmp_path):
    def write_plan(data):
        path = tmp_path / "plan.yaml"
        path.write_text(yaml.safe_dump(data, sort_keys=False))
        return path

    return write_plan


def as_json(path, *options):
    result = invoke("tune", path, "--format", "json", *options)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    content = json.loads(result.stdout)
    SCHEMA.validate(content)
    return content


def test_the_text_says_what_is_where_it_goes_and_what_to_do(write):
    result = invoke("tune", write(four_ranks()), "--fix", "schedule=1f1b,zb_h1,zb_h2")
    assert result.exit_code == 0
    assert result.stderr == ""
    text = result.stdout
    assert text.startswith("Now: 1f1b, 8 x 1: 33 us a step, bubble 27.3%, ")
    assert "Rank 3 is critical: " in text
    assert re.search(r"^1 +27 us +18\.2% ", text, re.MULTILINE)
    assert "Row 1 against the plan: bubble -6 us." in text
    assert text.index("Every row has passed") < text.index("Row 1 is this change of the plan:\n  schedule:\n    kind: ")


def test_what_the_text_says_to_change_can_be_laid_over_the_file(write):
    path = write(four_ranks(num_layers=8, kind="gpipe"))
    change = yaml.safe_load(invoke("tune", path).stdout.split("Row 1 is this change of the plan:\n")[1])
    plan = yaml.safe_load(path.read_text())
    for section, values in change.items():
        plan[section] |= values
    better = load_plan(write(plan))
    makespan = json.loads(invoke("simulate", write(plan), "--format", "json").stdout)["makespan"]
    assert better.spec.schedule.kind != "gpipe"
    assert makespan < 33
    assert invoke("check", write(plan)).exit_code == 0


@pytest.mark.parametrize(
    "data",
    [
        four_ranks(num_layers=8, micro_batch_size=2, memory_limit=5),
        four_ranks(num_layers=8, cost={"forward_us": "1/3", "p2p_latency_us": "1/7"}),
        four_ranks(cost={"p2p_latency_us": 1, "p2p": "rendezvous"}),
        {**four_ranks(num_layers=8), "cost": {"analytic": "h100"}},
        plan_dict(topology={"tp": 2, "sequence_parallel": True}, transport="partial"),
        plan_dict(
            schedule={
                "kind": "custom",
                "num_micro_batches": 2,
                "programs": [["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]],
            }
        ),
        plan_dict(topology={"pp": 1}),
    ],
    ids=["limited", "fractions", "rendezvous", "computed", "refused", "never_ends", "one_rank"],
)
def test_the_json_fits_its_schema(write, data):
    content = as_json(write(data), "--top", "3")
    assert (content["device"] == "h100") == ("analytic" in data.get("cost", {}))
    assert content["num_gpus"] == len(range(data["topology"]["pp"] * data["topology"].get("tp", 1)))


def test_the_json_has_exact_numbers(write):
    present = as_json(write(four_ranks(cost={"forward_us": "1/3"})), "--fix", "schedule=1f1b")["present"]
    assert present["step_s_exact"] == "77/3000000"


def test_plans_of_rows_are_written(write, tmp_path):
    result = invoke("tune", write(four_ranks()), "--top", "1", "-o", tmp_path / "tuned")
    assert result.exit_code == 0, result.stderr
    assert sorted(file.name for file in (tmp_path / "tuned").iterdir()) == ["01.yaml"]
    assert invoke("check", tmp_path / "tuned" / "01.yaml").exit_code == 0


def test_a_device_computes_the_times(write):
    data = four_ranks()
    del data["cost"]
    content = as_json(write(data), "--device", "h100", "--top", "1")
    assert (content["device"], content["cost_source"]) == ("h100", "analytic")


def test_a_plan_that_fails_every_check_is_to_be_mended_first(write):
    result = invoke("tune", write(plan_dict(topology={"tp": 2, "sequence_parallel": True}, transport="partial")))
    assert result.exit_code == 0
    assert "The plan does not pass check (PP201): fix that too." in result.stdout
    assert "Fix the plan first." in result.stdout


def test_where_nothing_is_better_that_is_said(write):
    result = invoke("tune", write(plan_dict(topology={"pp": 1}, schedule={"micro_batch_size": 1})))
    assert (result.exit_code, "Nothing that was tried is better." in result.stdout) == (0, True)
