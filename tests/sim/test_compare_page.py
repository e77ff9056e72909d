"""Two timeline files on one page: which step, on whose graph, and what `compare -o` takes."""

import json
import re

import pytest

from pipeproof.analysis.compare.compare_page import comparison_html
from pipeproof.analysis.compare.timeline_files import read_timeline
from pipeproof.comm.lower import lower_loaded
from pipeproof.specs.load_plan import load_plan
from tests.cli.commands import invoke
from tests.plans import plan_file
from tests.profiles import COST


@pytest.fixture
def plan(tmp_path):
    return plan_file(tmp_path / "plan.json", cost=COST)


@pytest.fixture
def report(tmp_path, plan):
    """A run of the plan with two steps, of which the second takes twice as long."""
    path = tmp_path / "run.json"
    entries = [
        {
            "step": step, "rank": op.rank, "queue": op.queue, "op": str(op.op),
            "start_us": float(10**6 * step + op.start * (step + 1)),
            "end_us": float(10**6 * step + op.end * (step + 1)),
        }
        for step in (0, 1)
        for op in read_timeline(plan).ops
    ]  # fmt: skip
    path.write_text(json.dumps({"timeline": entries}))
    return path


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])[
        "timelines"
    ]


def test_a_prediction_above_the_last_step_of_a_run(plan, report):
    predicted, measured = data_of(comparison_html(read_timeline(plan), read_timeline(report)))
    assert (predicted["title"], measured["title"]) == (str(plan), f"{report}, step 1")
    assert (predicted["clock"], measured["clock"]) == ("simulated", "measured")
    assert measured["makespan"] == 2 * predicted["makespan"]
    assert [rank["name"] for rank in measured["ranks"]] == ["rank 0", "rank 1"]
    assert measured["arrows"] == predicted["arrows"]  # messages of the plan's graph
    assert measured["bytes"] == predicted["bytes"]
    assert measured["step"] == predicted["step"]


def test_the_step_can_be_chosen_and_either_side_may_be_the_run(plan, report):
    a, b = read_timeline(report), read_timeline(plan)
    measured, predicted = data_of(comparison_html(a, b, 0))
    assert measured["title"] == f"{report}, step 0"
    assert measured["makespan"] == predicted["makespan"]
    assert data_of(comparison_html(a, a))[1]["makespan"] == 2 * measured["makespan"]
    with pytest.raises(ValueError, match="there is no step 7"):
        comparison_html(a, b, 7)


def test_other_operations_than_the_plans_have_no_graph(plan, report, tmp_path):
    other = plan_file(tmp_path / "other.json", schedule={"num_micro_batches": 2})
    predicted, measured = data_of(comparison_html(read_timeline(other), read_timeline(report)))
    assert predicted["arrows"]["from"] != measured["arrows"]["from"]
    assert len(lower_loaded(load_plan(other)).graph.ops) < len(read_timeline(plan).ops)
    assert "NaN" not in json.dumps(measured)


def test_the_command_writes_it(plan, report, tmp_path):
    page = tmp_path / "page.html"
    result = invoke("compare", plan, report, "-o", page, "--step", "1")
    assert result.exit_code == 0
    assert f"timelines written to {page}" in result.stdout
    assert len(data_of(page.read_text())) == 2
    quiet = invoke("compare", plan, report, "-o", page, "--format", "json")
    json.loads(quiet.stdout)
