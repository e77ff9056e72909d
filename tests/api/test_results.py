"""Functions of ``pipeproof``: arguments, and results as numbers, records, files, and in notebooks."""

import json
import sys
from fractions import Fraction
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

import pipeproof as pp
from tests.cli.commands import EXAMPLES, invoke
from tests.plans import plan_dict, plan_file

ONE_THIRD = {"forward_us": "1/3", "backward_us": 1}
FUNCTIONS = {
    "check": pp.check,
    "simulate": pp.simulate,
    "show": pp.show,
    "sweep": lambda plan: pp.sweep(plan, {"schedule.kind": ["1f1b", "gpipe"]}, workers=1),
    "compare": lambda plan: pp.compare(plan, plan_dict(schedule={"kind": "gpipe"})),
    "tune": lambda plan: pp.tune(plan, fix={"schedule": ["1f1b", "zb_h1"]}),
    "tune devices": lambda plan: pp.tune(plan, gpus=4, device="h100", top=2, fix={"tp": [1]}, workers=1),
}


@pytest.fixture(scope="module", params=FUNCTIONS)
def result(request):
    return FUNCTIONS[request.param](plan_dict(cost=ONE_THIRD))


@pytest.fixture
def path(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps(plan_dict()))
    return tmp_path / "plan.json"


def forms(path):
    loaded = pp.load_plan(path)
    return [path, str(path), plan_dict(), loaded.spec, loaded]


@pytest.mark.parametrize("name", ["check", "simulate", "show", "compare", "tune"])
def test_a_plan_is_a_path_a_dict_a_spec_or_loaded(name, path):
    contents = [FUNCTIONS[name](plan).to_dict() for plan in forms(path)]
    for content in contents:
        for key in ("name", "a", "findings"):
            content.pop(key, None)  # a path gives names and places
    assert contents == [contents[0]] * 5


def test_a_sweep_takes_them_too(path):
    points = [FUNCTIONS["sweep"](plan).to_records() for plan in forms(path)]
    assert points == [points[0]] * 5
    with pytest.raises(pp.BadPlanError, match="no key"):
        pp.sweep(plan_dict(), {"schedule.knd": ["1f1b"]})


def test_tune_needs_a_device_and_asks_for_it():
    with pytest.raises(ValueError, match="names no device: give `device`"):
        pp.tune(plan_dict(), gpus=4)


def test_something_else_is_refused():
    with pytest.raises(TypeError, match="a path, a dict, a PlanSpec or a loaded plan, found int"):
        pp.check(3)
    with pytest.raises(pp.BadPlanError):
        pp.check({"pipeproof": 1})


@pytest.mark.parametrize("plan", forms(EXAMPLES / "gpt_pp4.yaml"), ids=lambda plan: type(plan).__name__)
def test_settings_win_over_the_plan(plan):
    shown = pp.show(plan, settings={"schedule.num_micro_batches": 6})
    assert shown.plan.spec.schedule.num_micro_batches == 6
    with pytest.raises(pp.BadPlanError, match="given by `--set schedule"):
        pp.show(plan, settings={"schedule.num_micro_batches": 0})


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen = [], set()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        if tag not in ("img", "meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_notebook_shows_balanced_html(result):
    tags = Tags()
    tags.feed(result._repr_html_())
    assert tags.open == []
    assert tags.seen & {"table", "pre", "p"}


def test_the_repr_is_one_short_line(result):
    assert "\n" not in repr(result)
    assert 10 < len(repr(result)) < 200


def numbers(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [value] if isinstance(value, Fraction | float) else []


def test_numbers_are_floats_and_exact_on_request(result):
    assert all(
        isinstance(number, float) for number in numbers([result.to_dict(), *map(result.to_records, result.tables)])
    )
    json.dumps(result.to_dict())  # plain data
    assert all(isinstance(row, dict) for name in result.tables for row in result.to_records(name, exact=True))


@pytest.mark.parametrize(
    ("name", "table", "column"),
    [
        ("simulate", "ranks", "bubble_ratio"),
        ("sweep", "points", "makespan"),
        ("compare", "steps", "makespan_a"),
        ("tune", "layouts", "step_s"),
    ],
)
def test_exact_times_are_fractions_in_records(name, table, column):
    found = FUNCTIONS[name](plan_dict(cost=ONE_THIRD))
    exact, rounded = found.to_records(table, exact=True)[0][column], found.to_records(table)[0][column]
    assert isinstance(exact, Fraction)
    assert rounded == float(exact) != exact


def test_exact_numbers_are_those_that_were_computed():
    step = pp.simulate(plan_dict(cost=ONE_THIRD))
    assert step.makespan.denominator == 3
    assert step.to_dict(exact=True)["makespan"] == step.makespan
    assert step.to_dict()["makespan"] == step.makespan_us == float(step.makespan)
    assert "makespan_exact" not in step.to_dict()
    first = step.to_records("ops", exact=True)[0]
    assert isinstance(first["end_us"], Fraction)
    assert step.to_records("ops")[0]["end_us"] == float(first["end_us"])


@pytest.mark.parametrize("ending", [".html", ".json"])
def test_files(result, ending, tmp_path):
    text = result.save(tmp_path / f"result{ending}").read_text(encoding="utf-8")
    match ending:
        case ".html":
            assert text.startswith("<!DOCTYPE html>")
        case ".json":
            assert json.loads(text) == json.loads(json.dumps(result.to_dict()))


def test_another_file_or_table_is_refused(result, tmp_path):
    with pytest.raises(ValueError, match=r"another ending than \.html or \.json"):
        result.save(tmp_path / "result.xlsx")
    with pytest.raises(ValueError, match=f"there are {result.tables[0]}"):
        result.to_records("nonsense")


def test_the_figures_are_those_of_the_commands(path):
    assert pp.check(path).to_dict() == json.loads(invoke("check", path, "--format", "json").stdout)
    command = json.loads(invoke("simulate", path, "--format", "json").stdout)
    assert pp.simulate(path).to_dict() == {**command, "ranks": pp.simulate(path).to_dict()["ranks"]}
    assert pp.simulate(path).makespan_us == command["makespan"]


def test_findings_are_records_with_their_place():
    refused = pp.check(EXAMPLES / "gpt_pp2_tp2_sp_partial.yaml")
    assert repr(refused).startswith("<check: refused, 2 errors")
    first = refused.to_records()[0]
    assert (first["code"], first["severity"], first["line"]) == ("PP201", "error", 6)
    assert "error[PP201]" in refused._repr_html_()


def test_names_are_escaped_in_html(tmp_path):
    file = plan_file(tmp_path / "<script>.json")
    for result in (pp.simulate(file), pp.show(file), pp.compare(file, file)):
        assert "<script>.json" not in result._repr_html_()
        assert "<script></" not in result.to_html().replace("<script>\n", "")


def test_a_large_timeline_is_a_sentence_and_the_page_is_a_file(monkeypatch):
    from pipeproof.api import simulate_result

    assert "<img" in pp.simulate(plan_dict())._repr_html_()
    monkeypatch.setattr(simulate_result, "MOST_OPS", 3)
    assert "too large for a picture here" in pp.simulate(plan_dict())._repr_html_()


def test_dir_lists_the_functions():
    assert {name.split()[0] for name in FUNCTIONS} <= set(dir(pp))


def test_a_data_frame_has_the_records(monkeypatch):
    step = pp.simulate(plan_dict())
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=tuple))
    assert step.to_pandas("ops") == tuple(step.to_records("ops"))
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        step.to_pandas()
