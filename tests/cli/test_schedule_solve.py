"""``schedule solve``: a file that its plan takes back, how good it is, and refusals before any search."""

import json
import sys

import pytest
import yaml

from pipeproof.diagnostics.install_command import install_extra
from tests.cli.commands import invoke
from tests.plans import plan_dict

pytestmark = pytest.mark.needs("ortools")

COST = {"forward_us": 1, "backward_input_us": 1, "backward_weight_us": 1}


@pytest.fixture
def solve(tmp_path):
    """Write a plan of these sections and solve it; the result and the plan's path."""

    def run(*options, output="best.csv", **sections):
        plan = tmp_path / "plan.yaml"
        base = {"model": {"num_layers": 8}, "topology": {"pp": 4}, "cost": COST}
        plan.write_text(yaml.safe_dump(plan_dict(**{**base, **sections})))
        return invoke("schedule", "solve", plan, "-o", tmp_path / output, *options), plan

    return run


def with_solved_section(result, plan):
    """The plan with the section that the command printed."""
    section = yaml.safe_load(result.stdout.split("in the plan:")[1])
    content = yaml.safe_load(plan.read_text()) | section
    plan.write_text(yaml.safe_dump(content))
    return section["schedule"]


def makespan_of(plan):
    return json.loads(invoke("simulate", "--format", "json", plan).stdout)["makespan"]


def test_the_plan_takes_the_file_back_verified_and_as_fast_as_promised(solve):
    result, plan = solve("--memory-limit", "3", schedule={"kind": "1f1b", "num_micro_batches": 8})
    assert result.exit_code == 0
    assert "makespan 31 us: proved, no schedule is shorter" in result.stdout
    assert "(1f1b): 33 us, for which a rank holds up to 4 activations" in result.stdout
    assert with_solved_section(result, plan) == {
        "kind": "file",
        "path": "best.csv",
        "num_micro_batches": 8,
        "micro_batch_size": 2,
    }
    assert invoke("check", plan).exit_code == 0
    assert makespan_of(plan) == 31


def test_the_limit_of_the_plan_counts_where_none_is_given(solve):
    result, plan = solve(schedule={"kind": "optimal", "num_micro_batches": 8, "memory_limit": 3})
    assert "makespan 31 us: proved" in result.stdout
    assert "(optimal): 32 us\n" in result.stdout
    with_solved_section(result, plan)
    assert makespan_of(plan) == 31


def lines_of_stages(plan):
    """Stage, ranks and layers, as ``show`` prints them."""
    lines = [line for line in invoke("show", plan).stdout.splitlines() if "layer." in line]
    assert len(lines) == 8
    return lines


@pytest.mark.parametrize(
    "schedule",
    [
        {"kind": "zb_v", "num_chunks": 2},
        {"kind": "interleaved", "num_chunks": 2, "variant": "megatron", "micro_batch_group_size": 4},
        {"kind": "looped_bfs", "placement": [[0, 1, 6], [3], [2, 7], [4, 5]]},
    ],
)
def test_stages_stay_where_the_plan_has_them(solve, schedule):
    result, plan = solve("--time-limit", "1", schedule={"num_micro_batches": 4, **schedule})
    before = lines_of_stages(plan)
    with_solved_section(result, plan)
    assert lines_of_stages(plan) == before
    report = json.loads(invoke("check", "--format", "json", plan).stdout)
    assert not [finding for finding in report["findings"] if finding["severity"] == "error"]


def test_a_solved_file_is_where_the_next_search_begins(solve, tmp_path):
    schedule = {"kind": "optimal", "num_micro_batches": 8, "memory_limit": 3}
    result, plan = solve(schedule=schedule)
    with_solved_section(result, plan)
    again = invoke("schedule", "solve", plan, "-o", tmp_path / "again.csv", "--memory-limit", "3")
    assert "makespan 31 us: proved" in again.stdout
    assert "(file): 31 us" in again.stdout


def test_a_file_beside_another_plan_is_named_from_the_plan(solve, tmp_path):
    (tmp_path / "orders").mkdir()
    result, plan = solve(output="orders/best.csv", schedule={"num_micro_batches": 4})
    assert with_solved_section(result, plan)["path"] == "orders/best.csv"
    assert invoke("check", plan).exit_code == 0


def test_what_is_not_proved_has_its_gap(solve):
    cost = {
        "forward_us": [7, 9, 8, 6, 9, 7], "backward_input_us": [9, 6, 7, 8, 8, 7],
        "backward_weight_us": [6, 5, 7, 8, 5, 6], "p2p_latency_us": 2,
    }  # fmt: skip
    schedule = {"kind": "interleaved", "num_chunks": 2, "num_micro_batches": 18, "memory_limit": 4}
    result, plan = solve("--time-limit", "1", model={"num_layers": 6}, topology={"pp": 3}, schedule=schedule, cost=cost)
    assert result.exit_code == 0
    assert "not proved to be the shortest; none is below " in result.stdout
    assert "% after " in result.stdout
    with_solved_section(result, plan)
    assert f"makespan {makespan_of(plan)} us" in result.stdout


@pytest.mark.parametrize(
    ("options", "schedule", "message"),
    [
        (["--memory-limit", "1"], {"kind": "zb_v", "num_chunks": 2}, "rank 0 has 2 stages and may hold 1 chunk"),
        ([], {"kind": "dualpipe"}, "and this schedule has no copies"),
        ([], {"kind": "seq1f1b", "num_sequence_splits": 2}, "solved schedules work on whole sequences"),
    ],
)
def test_what_no_schedule_is_solved_for_is_bad_input(solve, tmp_path, options, schedule, message):
    result, plan = solve(*options, schedule={"num_micro_batches": 8, **schedule})
    assert result.exit_code == 2
    assert "error[PP140]" in result.stderr
    assert message in result.stderr
    assert f"{plan.name}:" in result.stderr
    assert not (tmp_path / "best.csv").exists()


def test_without_the_solver_it_says_what_to_install(solve, monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    result, _ = solve()
    assert result.exit_code == 2
    assert "error[PP142]" in result.stderr
    assert f"help: {install_extra('solve')}" in result.stderr


def test_an_output_that_cannot_be_written_is_refused_before_any_search(solve):
    result, _ = solve(output="no/such/best.csv")
    assert result.exit_code == 2
    assert "there is no directory" in result.stderr


def test_explain_knows_the_missing_solver():
    assert "pip install 'pipeproof[solve]'" in invoke("--explain", "PP142").stdout


EXPERTS = {
    "model": {"num_layers": 4, "moe": {"num_experts": 4, "top_k": 2, "ffn_size": 16}},
    "topology": {"pp": 2, "ep": 2},
    "cost": {
        "forward_us": 900, "backward_input_us": 900, "backward_weight_us": 400, "collective_slowdown": 0.1,
        "network": {"ranks_per_node": 8, "node": {"latency_us": 2, "bandwidth": 0.02}},
    },
}  # fmt: skip
INTERLEAVED = {"kind": "interleaved", "variant": "megatron", "num_chunks": 2, "num_micro_batches": 6}


def step_of(plan, **changes):
    """The simulated step of a plan, in microseconds, with other keys of the schedule."""
    content = yaml.safe_load(plan.read_text())
    schedule = {**content["schedule"], **changes}
    content["schedule"] = {key: value for key, value in schedule.items() if value is not None}
    if schedule.get("overlap") is None:
        content["cost"].pop("collective_slowdown", None)
    other = plan.with_name("other.yaml")
    other.write_text(yaml.safe_dump(content))
    assert invoke("check", other).exit_code == 0
    return makespan_of(other)


def test_pairs_are_chosen_by_simulation_and_nothing_is_claimed_that_is_not_proved(solve):
    result, plan = solve("--time-limit", "1", **EXPERTS, schedule={**INTERLEAVED, "overlap": "pairs"})
    assert result.exit_code == 0, result.stderr
    optimal = {"kind": "optimal", "variant": None}
    others = [step_of(plan), step_of(plan, **optimal), step_of(plan, **optimal, overlap=None)]
    section = with_solved_section(result, plan)
    assert section["overlap"] == "pairs"
    step = makespan_of(plan)
    assert invoke("check", plan).exit_code == 0
    assert step <= min(others)
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"step {step:.3f} us, simulated, with ")
    assert lines[1].startswith("it is the shortest of ")
    assert lines[2].startswith("computations with pairs: makespan ")
    assert lines[3].startswith("computations without pairs: makespan ")
    assert not any("proved" in line for line in (*lines[:2], lines[4]))


def test_where_pairs_need_memory_that_there_is_not_the_file_has_none(solve):
    schedule = {**INTERLEAVED, "kind": "optimal", "variant": None, "overlap": "pairs", "memory_limit": 2}
    schedule = {key: value for key, value in schedule.items() if value is not None}
    result, plan = solve("--time-limit", "1", **EXPERTS, schedule=schedule)
    assert "without pairs: none of those tried is shorter with them" in result.stdout
    section = with_solved_section(result, plan)
    assert "overlap" not in section
    content = yaml.safe_load(plan.read_text())
    del content["cost"]["collective_slowdown"]
    plan.write_text(yaml.safe_dump(content))
    assert f"step {makespan_of(plan):.3f} us, simulated, without pairs" in result.stdout
