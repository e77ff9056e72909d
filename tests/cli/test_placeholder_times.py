"""Every output about times that no plan gave says so once; JSON has the origin of the times."""

import json

import pytest
from click.testing import CliRunner

import pipeproof as pp
from pipeproof.cli.main import main
from pipeproof.specs.load_plan import plan_from_dict
from tests.plans import plan_dict

NOTE = "imes are placeholders (100 us forward, 200 us backward per stage): proportions only"


PREDICTING = {"compare", "schedule show", "simulate", "sweep", "tune"}
"""Commands that print times that nobody measured; tests below call each of them, in each of its forms."""
PLAY = {"play"}
"""Its page shows the times in fields, and whether they are of a stage or of a rank."""
COMPUTED = {"show"}
"""Their times are computed for devices; `show --costs` refuses a plan that names none."""
WITHOUT_PREDICTED_TIMES = {
    *(f"state {part}" for part in ("align", "aoa", "diff", "reshard", "show")),
    "check", "doctor", "import plan", "import profile", "init", "job hang", "rehearse", "run",
    "schedule convert", "schedule list",
}  # fmt: skip


def test_each_command_is_in_one_of_the_lists(validation_script):
    commands = {words for words, _ in validation_script("make_options").commands()}
    assert commands == PREDICTING | PLAY | COMPUTED | WITHOUT_PREDICTED_TIMES


def invoke(*arguments):
    done = CliRunner().invoke(main, [*map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def plan(tmp_path):
    """Writes a plan without cost, with changes of its sections."""

    def write(name="plan.json", **sections):
        data = {key: value for key, value in plan_dict(**sections).items() if key != "cost" or "cost" in sections}
        (tmp_path / name).write_text(json.dumps(data))
        return tmp_path / name

    return write


def sweep(path, *values, form="text"):
    options = [word for text in values for word in ("--set", text)]
    return invoke("sweep", path, *options, "--workers", "1", "--format", form)


@pytest.mark.parametrize("command", [("simulate",), ("tune",)])
@pytest.mark.parametrize(
    ("cost", "source"),
    [
        (None, "placeholder"), ({"p2p_latency_us": 3}, "placeholder"),
        ({"forward_us": 100, "backward_us": 200}, "given"), ({"analytic": "h100"}, "analytic"),
    ],
    ids=["none", "latency", "given", "analytic"],
)  # fmt: skip
def test_an_output_says_once_that_times_are_placeholders(plan, command, cost, source):
    path = plan() if cost is None else plan(cost=cost)
    assert invoke(*command, path).count(NOTE) == (source == "placeholder")
    assert json.loads(invoke(*command, path, "--format", "json"))["cost_source"] == source


def test_a_time_that_is_left_out_is_named_alone():
    def note(**cost):
        return plan_from_dict(plan_dict(cost=cost)).spec.placeholder_note

    assert note(forward_us=7) == "times are placeholders (200 us backward per stage): proportions only"
    halves = note(backward_input_us=1, backward_weight_us=1)
    assert halves == "times are placeholders (100 us forward per stage): proportions only"
    assert note(profile="file.json") == ""


def test_a_trace_has_the_note_and_the_origin_of_the_times_and_compare_reads_them(plan, tmp_path):
    path, trace = plan(), tmp_path / "trace.json"
    invoke("simulate", path, "-o", trace)
    assert json.loads(trace.read_text())["otherData"] == {
        "clock": "simulated", "cost_source": "placeholder", "note": f"t{NOTE}"
    }  # fmt: skip
    assert invoke("compare", trace, trace).count(NOTE) == 1
    assert json.loads(invoke("compare", trace, path, "--format", "json"))["a"]["cost_source"] == "placeholder"
    invoke("simulate", plan(cost={"analytic": "h100"}), "-o", trace)
    assert json.loads(trace.read_text())["otherData"] == {"clock": "simulated", "cost_source": "analytic"}
    assert NOTE not in invoke("compare", trace, trace)


def test_a_sweep_says_how_many_points_have_placeholders(plan):
    kinds = "schedule.kind=[1f1b, gpipe]"
    assert sweep(plan(), kinds).count(NOTE) == 1
    assert json.loads(sweep(plan(), kinds, form="json"))["cost_source"] == "placeholder"
    mixed = (kinds, "cost=[{}, {analytic: h100}]")
    assert f"2 of 4 points: t{NOTE}" in sweep(plan(), *mixed)
    assert json.loads(sweep(plan(), *mixed, form="json"))["cost_source"] == "mixed"


def test_a_sweep_over_stages_says_that_their_work_differs(plan):
    text = sweep(plan(), "schedule=[{kind: 1f1b}, {kind: interleaved, num_chunks: 2}]")
    assert "proportions only; points with more stages have more work, unless `cost` gives" in text


MODEL = plan_dict()["model"] | {"num_layers": 8}


def chunked(plan, **sections):
    schedule = {"kind": "interleaved", "num_chunks": 2, "num_micro_batches": 4, "micro_batch_size": 2}
    return plan("chunked.json", model=MODEL, schedule=schedule, **sections)


def test_placeholders_of_plans_with_other_stages_are_per_layer(plan):
    """1F1B and interleaved 1F1B have the same work; per stage, the second would have twice as much."""
    a, b = plan(model=MODEL), chunked(plan)
    text = invoke("compare", a, b)
    assert text.count(NOTE) == 1
    assert "costs are per layer, as in A: A has 2 stages, B 4" in text
    comparison = json.loads(invoke("compare", a, b, "--format", "json"))
    assert comparison["costs"] == "costs are per layer, as in A: A has 2 stages, B 4"
    assert comparison["costs"] in repr(pp.compare(a, b))
    assert comparison["a"]["cost_source"] == comparison["b"]["cost_source"] == "placeholder"
    forward = next(kind for kind in comparison["kinds"] if kind["kind"] == "F")
    assert forward["median_ratio"] == 0.5
    assert comparison["steps"][0]["makespan_b"] < comparison["steps"][0]["makespan_a"]


def test_given_times_stay_per_stage_and_are_explained(plan):
    cost = {"forward_us": 100, "backward_us": 200}
    a, b = plan(model=MODEL, cost=cost), chunked(plan, cost=cost)
    text = invoke("compare", a, b)
    assert "costs are per stage, and A has 2 stages, B 4: each side has its own" in text
    assert NOTE not in text
    forward = next(k for k in json.loads(invoke("compare", a, b, "--format", "json"))["kinds"] if k["kind"] == "F")
    assert forward["median_ratio"] == 1
