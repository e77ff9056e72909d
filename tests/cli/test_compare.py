"""``pipeproof compare``: plans, traces and reports; refusals without a traceback; its JSON fits its schema."""

import json

import pytest
from jsonschema import Draft202012Validator

from pipeproof.cli import file_kinds
from tests.cli.commands import REPOSITORY, invoke
from tests.plans import plan_file

SCHEMA = Draft202012Validator(json.loads((REPOSITORY / "docs" / "schemas" / "compare.schema.json").read_text()))
SLOW = {"ranks_per_node": 4, "node": {"bandwidth": 100, "latency_us": 50}}


@pytest.fixture
def plan(tmp_path):
    def write(name, **sections):
        return plan_file(tmp_path / f"{name}.json", **sections)

    return write


def test_two_plans_as_text(plan):
    result = invoke("compare", plan("one"), plan("two", schedule={"kind": "gpipe"}), "--worst", "3")
    assert result.exit_code == 0
    assert "one.json: plan, simulated" in result.stdout
    assert "clocks are set equal at the first start of all" in result.stdout
    assert "the first divergence is on rank 1, queue compute, position 1" in result.stdout
    assert "A has 1B0, B has 1F1" in result.stdout
    assert "farthest apart" not in result.stdout.partition("the first divergence")[2]  # all last as long


def test_the_text_begins_with_the_verdict(plan):
    one, two = plan("one", cost={"forward_us": 100}), plan("two", cost={"forward_us": 150})
    first = invoke("compare", one, two).stdout.splitlines()[0]
    assert first.startswith("B takes ")
    assert "longer than A: A " in first
    assert "; bubble A " in first
    assert "; activations held at most A " in first
    assert invoke("compare", two, one).stdout.splitlines()[0].split(" than A")[0].endswith("less time")
    assert invoke("compare", one, one).stdout.startswith("A and B take equally long: A ")


def test_a_plan_and_its_trace(plan, tmp_path):
    one, trace = plan("one"), tmp_path / "trace.json"
    assert invoke("simulate", one, "-o", trace).exit_code == 0
    result = invoke("compare", one, trace)
    assert "the order of computations and transfers is the same on every queue" in result.stdout
    assert "only in A: " in result.stdout
    assert "trace, simulated" in result.stdout


def test_json_fits_its_schema(plan, tmp_path):
    slow, report = plan("slow", cost={"forward_us": 300}), tmp_path / "run.json"
    entry = {"step": 2, "rank": 0, "queue": "compute", "op": "0F0", "start_us": 5.5, "end_us": 60.25}
    report.write_text(json.dumps({"timeline": [entry, {**entry, "op": "0STEP", "start_us": 60.25}]}))
    for other in (plan("two", schedule={"kind": "zb_h1"}), report, slow):
        content = json.loads(invoke("compare", slow, other, "--format", "json", "--worst", "2").stdout)
        SCHEMA.validate(content)
        assert len(content["worst"]) == (1 if other == report else 2 if other != slow else 0)
    measured = json.loads(invoke("compare", slow, report, "--format", "json").stdout)
    assert (measured["clocks"], measured["b"]["measured"]) == ("per_rank", True)
    assert measured["steps"][0]["step_b"] == 2
    assert measured["worst"][0]["error"] == 54.75 - 300
    for broken in ({**measured, "unit": "ms"}, {**measured, "steps": []}, {**measured, "more": 1}):
        assert not SCHEMA.is_valid(broken)


def test_what_cannot_be_compared(plan, tmp_path):
    good, other = plan("one"), tmp_path / "other.json"
    other.write_text("{}")
    bad = plan("bad", topology={"pp": 0})
    for arguments, words in (
        ((good, other), "Invalid value for B"),
        ((other, good), "it has no timeline"),
        ((good, bad), "PP106"),
        ((bad, good), "bad.json:1:"),
        ((good, tmp_path / "none.yaml"), "PP100"),
        ((good, plan("slow", topology={"tp": 2}, cost={"forward_us": 1, "network": SLOW})), "PP154"),
        ((good, plan("unfit", schedule={"kind": "interleaved", "num_chunks": 2, "num_micro_batches": 3})), "PP140"),
    ):
        result = invoke("compare", *arguments)
        assert result.exit_code == 2
        assert words in result.stderr
        assert result.stdout == ""


def test_files_of_other_tools_are_recognised_and_loaded_once(monkeypatch):
    recognised = []
    original = file_kinds.kind_of
    monkeypatch.setattr(file_kinds, "kind_of", lambda path: recognised.append(path) or original(path))
    path = REPOSITORY / "examples" / "schedules" / "zbv_pp2.csv"
    for other in (path, "1f1b"):
        recognised.clear()
        answer = invoke("compare", path, other)
        assert answer.exit_code == 0
        files = 2 if other is path else 1
        assert (len(recognised), answer.stderr.count("is read as")) == (files, files)
