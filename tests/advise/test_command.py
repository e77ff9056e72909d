"""``pipeproof advise`` as a person or a script meets it."""

import json
import re
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from pipeproof.specs.load_plan import load_plan
from tests.advise.plans import four_ranks
from tests.cli.commands import EXAMPLES, REPOSITORY, invoke
from tests.plans import plan_dict

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "advise.schema.json").read_text())


@pytest.fixture
def write(tmp_path):
    def write_plan(data):
        path = tmp_path / "plan.yaml"
        path.write_text(yaml.safe_dump(data, sort_keys=False))
        return path

    return write_plan


def as_json(path, *options):
    result = invoke("advise", path, "--format", "json", *options)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    content = json.loads(result.stdout)
    Draft202012Validator(SCHEMA).validate(content)
    return content


def test_the_text_says_what_is_where_it_goes_and_what_to_do(write):
    result = invoke("advise", write(four_ranks()))
    assert result.exit_code == 0
    assert result.stderr == ""
    text = result.stdout
    assert text.startswith("Now: 1f1b, 8 x 1: 33 us a step, 27.3 % of it idle, peak 4. Rank 3 is critical: ")
    assert re.search(r"^zb_h1 +8 x 1 +27 +18\.2 % +11\.1 % +4 +(robust|conditional)", text, re.MULTILINE)
    assert "All that are listed passed their check." in text
    assert text.index("Change the plan as follows:") < text.index("  schedule:\n    kind: ")


def test_the_page_begins_as_the_command_does():
    page = (REPOSITORY / "docs" / "advise.md").read_text()
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert invoke("advise", EXAMPLES / "gpt_pp4.yaml").stdout.startswith(shown)


def test_what_the_text_says_to_change_can_be_laid_over_the_file(write):
    path = write(four_ranks(num_layers=8, kind="gpipe"))
    text = invoke("advise", path).stdout
    change = yaml.safe_load(text.split("Change the plan as follows:\n")[1])
    plan = yaml.safe_load(path.read_text())
    for section, values in change.items():
        plan[section] |= values
    better = load_plan(write(plan))
    makespan = json.loads(invoke("simulate", write(plan), "--format", "json").stdout)["makespan"]
    assert better.spec.schedule.kind in text.split("Change the plan as follows:")[0]
    assert makespan < 33
    assert invoke("check", write(plan)).exit_code == 0


@pytest.mark.parametrize(
    "data",
    [
        four_ranks(num_layers=8, micro_batch_size=2),
        four_ranks(num_layers=8, cost={"forward_us": "1/3", "p2p_latency_us": "1/7"}),
        four_ranks(cost={"p2p_latency_us": 1, "p2p": "rendezvous"}),
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
    ids=["resized", "fractions", "rendezvous", "refused", "never_ends", "one_rank"],
)
def test_the_json_fits_its_schema(write, data):
    content = as_json(write(data), "--all", "--memory-limit", "5", "--top", "3")
    assert content["memory_limit"] == 5
    assert content["over_limit"] is not None


def test_the_json_has_exact_numbers(write):
    content = as_json(write(four_ranks()))
    assert content["over_limit"] is None
    assert content["memory_limit"] is None
    assert (content["plan"]["figures"]["makespan"], content["plan"]["figures"]["idle_ratio_exact"]) == (33, "3/11")
    zb_h1 = next(entry for entry in content["better"] if entry["schedule"] == "zb_h1")
    assert (zb_h1["figures"]["makespan"], zb_h1["saved"], zb_h1["figures"]["peak_activations"]) == (27, 6, 4)
    assert zb_h1["set"] == [{"key": "schedule.kind", "value": "zb_h1"}]
    assert zb_h1["remove"] == []
    assert content["best"] == content["better"][0]["why"]


def test_the_critical_rank_or_edge_is_in_the_json(write):
    slow = as_json(write(four_ranks(cost={"forward_us": [1, 1, 4, 1]})))["plan"]
    assert (slow["figures"]["critical"]["cause"], slow["figures"]["busiest_rank"]) == ("overload", 2)
    late = as_json(write(four_ranks(cost={"p2p_latency_us": 2})))["plan"]["figures"]["critical"]
    assert (late["cause"], late["edge"]) == ("messages", [1, 2])


def test_the_schema_refuses_what_is_not_so(write):
    good = as_json(write(four_ranks()))
    validator = Draft202012Validator(SCHEMA)
    first = good["better"][0]
    for wrong in (
        {**good, "more": 1},
        {**good, "unit": "ms"},
        {key: value for key, value in good.items() if key != "plan"},
        {**good, "better": [{**first, "deadlock": "safe"}]},
        {**good, "better": [{**first, "figures": {**first["figures"], "idle_ratio": 2}}]},
        {**good, "better": [{**first, "set": [{"key": "Schedule", "value": 1}]}]},
        {**good, "memory_limit": 0},
    ):
        assert not validator.is_valid(wrong)


def test_a_memory_limit_lists_what_it_excludes_only_with_all(write):
    path = write(four_ranks())
    brief, whole = (invoke("advise", path, "--memory-limit", 3, *more).stdout for more in ((), ("--all",)))
    assert "the limit is 3" in brief
    assert "Over the memory limit" not in brief
    over = whole.split("Over the memory limit: they need what is their peak:\n")[1]
    assert re.search(r"^zb_h1 +8 x 1 +27 +18\.2 % +11\.1 % +4 ", over, re.MULTILINE)
    assert "not possible (" in whole
    assert "not possible (" not in brief


def test_figures_are_whole_in_a_narrow_terminal(write, monkeypatch):
    path = write(four_ranks(num_layers=8, micro_batch_size=4, cost={"forward_us": "1/3"}))
    wide = invoke("advise", path, "--memory-limit", 3, "--all").stdout
    monkeypatch.setenv("COLUMNS", "40")
    narrow = invoke("advise", path, "--memory-limit", 3, "--all").stdout

    def figures(text):
        return set(re.findall(r"(?<= )\d+\.\d+(?= )", text))

    assert set() < figures(narrow) <= figures(wide)
    assert figures(wide) == figures(narrow) or "left out: idle, saved" in " ".join(narrow.split())


def test_top_bounds_each_list(write):
    path = write(four_ranks(num_layers=8, micro_batch_size=4))
    content = as_json(path, "--top", "1")
    assert all(len(content[group]) <= 1 for group in ("better", "copied", "resized"))
    assert len(as_json(path, "--top", "4")["resized"]) > 1


def test_a_plan_that_fails_every_check_is_to_be_mended_first(write):
    result = invoke("advise", write(plan_dict(topology={"tp": 2, "sequence_parallel": True}, transport="partial")))
    assert result.exit_code == 0
    assert "The plan does not pass check (PP201): fix that too." in result.stdout
    assert result.stdout.endswith("Fix the plan first.\n")
    assert "All that are listed" not in result.stdout


def test_where_nothing_is_better_that_is_said(write):
    result = invoke("advise", write(plan_dict(topology={"pp": 1}, schedule={"micro_batch_size": 1})))
    assert "No rank is ever idle." in result.stdout
    assert result.stdout.endswith("Nothing that was tried is better.\n")


def test_bad_input_is_refused_with_its_findings(write, tmp_path):
    for path in (write(four_ranks(num_layers=3)), write({"pipeproof": 1}), tmp_path / "none.yaml"):
        result = invoke("advise", path)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert "error[PP" in result.stderr
        refusal = invoke("advise", path, "--format", "json")
        assert refusal.exit_code == 2
        assert json.loads(refusal.stdout)["findings"]


def test_a_plan_that_only_runs_forwards_is_refused(write):
    programs = [["0F0"], ["1F0"]]
    data = plan_dict(schedule={"kind": "custom", "programs": programs, "num_micro_batches": 1})
    result = invoke("advise", write(data))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: the plan's schedule has no backward, and advice is about training steps\n"


@pytest.mark.parametrize(
    "options", [["--memory-limit", "0"], ["--top", "0"], ["--format", "sarif"], ["--memory-limit", "x"]]
)
def test_options_that_make_no_sense_are_refused(write, options):
    assert invoke("advise", write(four_ranks()), *options).exit_code == 2
