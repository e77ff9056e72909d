"""``schedule show`` of a plan, and of the kind optimal: its bound, and the search of the solver."""

import json
import sys

import pytest
import yaml

from pipeproof.diagnostics.install_command import install_extra
from tests.cli.commands import invoke
from tests.plans import plan_dict

COST = {"forward_us": 1, "backward_input_us": 1, "backward_weight_us": 1}
OPTIMAL = {"kind": "optimal", "num_micro_batches": 8}


@pytest.fixture
def write(tmp_path):
    def write_plan(**sections):
        plan = tmp_path / "plan.yaml"
        base = {"model": {"num_layers": 8}, "topology": {"pp": 4}, "cost": COST, "schedule": OPTIMAL}
        plan.write_text(yaml.safe_dump(plan_dict(**{**base, **sections})))
        return plan

    return write_plan


def test_a_schedule_that_reaches_the_bound_is_proved(write):
    result = invoke("schedule", "show", write())
    assert result.exit_code == 0, result.output
    assert "step time 27 us: proved, no schedule of these stages is shorter\n" in result.stdout
    assert "deadlock: conditional" in result.stdout


def test_one_above_the_bound_is_not(write):
    result = invoke("schedule", "show", write(schedule={**OPTIMAL, "memory_limit": 3}))
    assert "step time 32 us: not proved to be the shortest; none is below 27 us" in result.stdout
    assert "`--time-limit SECONDS` searches" in result.stdout
    content = json.loads(invoke("schedule", "show", write(), "--format", "json").stdout)
    assert (content["makespan"], content["bound"]) == (27, 27)


@pytest.mark.needs("ortools")
def test_the_solver_finds_a_shorter_one_that_the_plan_takes_as_a_file(write, tmp_path):
    plan = write(schedule={**OPTIMAL, "memory_limit": 3})
    result = invoke("schedule", "show", plan, "--time-limit", "60")
    assert "step time 31 us: proved, no schedule of these stages is shorter (" in result.stdout
    (tmp_path / "best.csv").write_text(invoke("schedule", "show", plan, "--time-limit", "60", "--as", "csv").stdout)
    solved = write(schedule={"kind": "file", "path": "best.csv", "num_micro_batches": 8})
    assert invoke("check", solved).exit_code == 0
    assert json.loads(invoke("simulate", "--format", "json", solved).stdout)["makespan"] == 31


@pytest.mark.needs("ortools")
def test_what_is_not_proved_has_its_gap(write):
    cost = {
        "forward_us": [7, 9, 8, 6, 9, 7], "backward_input_us": [9, 6, 7, 8, 8, 7],
        "backward_weight_us": [6, 5, 7, 8, 5, 6], "p2p_latency_us": 2,
    }  # fmt: skip
    schedule = {"kind": "optimal", "num_chunks": 2, "num_micro_batches": 18, "memory_limit": 4}
    plan = write(model={"num_layers": 6}, topology={"pp": 3}, schedule=schedule, cost=cost)
    result = invoke("schedule", "show", plan, "--time-limit", "1")
    assert result.exit_code == 0
    assert "not proved to be the shortest; none is below " in result.stdout
    assert "a longer --time-limit may close it" in result.stdout


def test_without_the_solver_it_says_what_to_install(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    result = invoke("schedule", "show", write(schedule={**OPTIMAL, "memory_limit": 3}), "--time-limit", "1")
    assert result.exit_code == 2
    assert "error[PP142]" in result.stderr
    assert f"help: {install_extra('solve')}" in result.stderr
