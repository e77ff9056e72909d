"""``check --baseline``: known findings do not fail, new ones do; entries without a finding are reported."""

import json
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from pipeproof.cli.code_registry import all_docs
from pipeproof.diagnostics.baseline import (
    BaselineError,
    baseline_json_schema,
    baseline_text,
    load_baseline,
    updated_entries,
)
from pipeproof.diagnostics.finding import Finding, Severity
from pipeproof.diagnostics.fingerprint import FINGERPRINT_NAME
from tests.cli.commands import REPOSITORY, invoke
from tests.plans import plan_dict

pytestmark = pytest.mark.usefixtures("known_notes")

SCHEMA = REPOSITORY / "docs" / "schemas" / "baseline.schema.json"
WRONG = {"topology": {"tp": 2, "sequence_parallel": True}, "transport": "partial", "schedule": {"kind": "gpipe"}}


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Write a plan to a file of the working directory; without sections, a wrong one with two errors alone."""
    monkeypatch.chdir(tmp_path)

    def write_plan(name="plan.json", **sections):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(plan_dict(**(sections or WRONG))))
        return name

    return write_plan


HANGS = next(doc.wrong for doc in all_docs() if doc.code == "PP301")


def right(**sections):
    return {**WRONG, "transport": "full", **sections}


def entries(file="known.yaml"):
    content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    Draft202012Validator(json.loads(SCHEMA.read_text())).validate(content)
    return content["findings"]


def test_known_errors_are_shown_and_do_not_fail(plan):
    name = plan()
    assert invoke("check", name).exit_code == 1
    written = invoke("check", name, "--write-baseline", "known.yaml", "--reason", "training ends on Friday")
    assert written.exit_code == 0
    assert "known.yaml: 2 entries, 2 new, 0 removed" in written.stderr
    result = invoke("check", name, "--baseline", "known.yaml")
    assert result.exit_code == 0
    assert result.stdout.count("known error[PP201] plan.json:1:297: boundary") == 2
    assert result.stdout.count("(training ends on Friday)") == 2
    assert "not proved: nothing new in" in result.stdout
    assert "2 errors known by known.yaml: no certificate" in result.stdout
    assert "error[PP201]:" not in result.stdout.replace("known error[PP201]", "")


def test_a_run_refuses_a_plan_whose_errors_are_known(plan):
    """A baseline is for reports: `run` needs a certificate, and a baseline gives none."""
    name = plan()
    invoke("check", name, "--write-baseline", "known.yaml")
    content = json.loads(invoke("check", name, "--baseline", "known.yaml", "--format", "json").stdout)
    assert content["certified"] is False
    assert invoke("run", name).exit_code == 1


def test_one_more_finding_of_the_kind_is_new(plan):
    """A wrong boundary is not covered by another one."""
    plan(**WRONG)
    invoke("check", "plan.json", "--write-baseline", "known.yaml")
    plan(**{**WRONG, "topology": {**WRONG["topology"], "pp": 4}})
    result = invoke("check", "plan.json", "--baseline", "known.yaml")
    assert result.exit_code == 1
    assert "refused: 4 errors in" in result.stdout
    assert "; 2 errors known by known.yaml" in result.stdout


def test_lines_that_move_and_sizes_that_grow_stay_known(plan, tmp_path):
    plan(**WRONG)
    invoke("check", "plan.json", "--write-baseline", "known.yaml")
    bigger = plan_dict(**{**WRONG, "model": {"hidden_size": 64}})
    (tmp_path / "plan.json").write_text("\n\n\n" + json.dumps(bigger, indent=2))
    result = invoke("check", "plan.json", "--baseline", "known.yaml")
    assert result.exit_code == 0
    assert result.stdout.count("known error") == 2


def test_a_new_warning_counts_for_strict_and_a_known_one_does_not(plan):
    name = "program.txt"
    Path(name).write_text(next(doc.wrong for doc in all_docs() if doc.code == "PP413"))
    invoke("check", "--program", name, "--write-baseline", "known.yaml")
    assert "warning" in {entry["severity"] for entry in entries()}
    assert invoke("check", "--program", name, "--strict").exit_code == 1
    assert invoke("check", "--program", name, "--strict", "--baseline", "known.yaml").exit_code == 0
    plan("empty.yaml", schedule={"kind": "gpipe"})
    invoke("check", "empty.yaml", "--write-baseline", "none.yaml")
    assert entries("none.yaml") == []
    assert invoke("check", "--program", name, "--strict", "--baseline", "none.yaml").exit_code == 1


def test_entries_of_fixed_findings_are_reported_and_removed(plan):
    name = plan()
    invoke("check", name, "--write-baseline", "known.yaml", "--reason", "for now")
    plan(name, **right())
    result = invoke("check", name, "--baseline", "known.yaml", "--strict")
    assert result.exit_code == 0
    assert result.stdout.count(": PP201 is known of plan.json") == 2
    assert "note[PP156] known.yaml:6:11: PP201 is known of plan.json" in result.stdout
    assert "proved:" in result.stdout
    again = invoke("check", name, "--write-baseline", "known.yaml")
    assert "known.yaml: 0 entries, 0 new, 2 removed" in again.stderr
    assert entries() == []


def test_a_missing_plan_is_reported(plan):
    plan("old.json")
    invoke("check", "old.json", "--write-baseline", "known.yaml")
    Path("old.json").unlink()
    result = invoke("check", plan(**right()), "--baseline", "known.yaml")
    assert result.exit_code == 0
    assert result.stdout.count(": PP201 is known of old.json") == 2


def test_entries_of_rules_that_did_not_run_are_neither_reported_nor_removed(plan):
    name = plan()
    invoke("check", name, "--write-baseline", "known.yaml")
    plan(name, **right())
    assert "PP156" not in invoke("check", name, "--baseline", "known.yaml", "--ignore", "PP201").stdout
    invoke("check", name, "--write-baseline", "known.yaml", "--ignore", "PP201")
    assert len(entries()) == 2


def test_a_count_that_has_become_smaller(plan, tmp_path):
    """Two findings of one fingerprint are one entry; if some are fixed, the note gives the remaining count."""
    name = plan()
    invoke("check", name, "--write-baseline", "known.yaml")
    text = (tmp_path / "known.yaml").read_text().replace("count: 1", "count: 3", 1)
    (tmp_path / "known.yaml").write_text(text)
    result = invoke("check", name, "--baseline", "known.yaml")
    assert "1 of 3 known findings" in result.stdout
    assert "help: write `count: 1`" in result.stdout


def test_reasons_and_other_plans_stay_when_the_file_is_written_again(plan):
    one, two = plan("a/plan.json"), plan("b/plan.json")
    invoke("check", one, "--write-baseline", "known.yaml", "--reason", "first")
    invoke("check", two, one, "--write-baseline", "known.yaml", "--reason", "second")
    assert [(entry["files"], entry["reason"]) for entry in entries()] == [
        (["a/plan.json"], "first"),
        (["a/plan.json"], "first"),
        (["b/plan.json"], "second"),
        (["b/plan.json"], "second"),
    ]
    before = Path("known.yaml").read_text()
    invoke("check", one, "--write-baseline", "known.yaml")
    assert Path("known.yaml").read_text() == before


def test_the_baseline_is_found_from_other_directories(plan, tmp_path, monkeypatch):
    name = plan("deep/plan.json")
    invoke("check", name, "--write-baseline", "known.yaml")
    monkeypatch.chdir(tmp_path / "deep")
    assert invoke("check", "plan.json", "--baseline", "../known.yaml").exit_code == 0
    assert invoke("check", tmp_path / "deep" / "plan.json", "--baseline", tmp_path / "known.yaml").exit_code == 0


# --- several plans ---


def test_several_plans_each_have_their_report_and_the_worst_status(plan, tmp_path):
    bad, good = plan("bad.json"), plan("good.json", **right())
    result = invoke("check", good, bad)
    assert result.exit_code == 1
    assert result.stdout.index("== good.json") < result.stdout.index("proved:") < result.stdout.index("== bad.json")
    assert result.stdout.endswith("2 plans: 1 refused, 0 that cannot be checked\n")
    (tmp_path / "none.yaml").write_text("pipeproof: 1\n")
    result = invoke("check", "none.yaml", good, "missing.yaml")
    assert result.exit_code == 2
    assert "error[PP104]: `model` is missing" in result.stderr
    assert "cannot read `missing.yaml`" in result.stderr
    assert "proved:" in result.stdout
    assert result.stdout.endswith("3 plans: 0 refused, 2 that cannot be checked\n")


def test_several_plans_in_json_and_sarif(plan, tmp_path):
    bad, good = plan("bad.json"), plan("good.json", **right())
    (tmp_path / "none.yaml").write_text("pipeproof: 1\n")
    content = json.loads(invoke("check", bad, good, "none.yaml", "--format", "json").stdout)
    schema = json.loads((SCHEMA.parent / "check.schema.json").read_text())
    Draft202012Validator(schema).validate(content)
    assert [item["file"] for item in content["plans"]] == ["bad.json", "good.json", "none.yaml"]
    assert [item["report"].get("certified") for item in content["plans"]] == [False, True, None]
    result = invoke("check", bad, good, "none.yaml", "--format", "sarif")
    (run,) = json.loads(result.stdout)["runs"]
    assert run["invocations"][0]["exitCode"] == result.exit_code == 2
    assert [plan["certified"] for plan in run["properties"]["plans"]] == [False, True, False]
    places = {
        (result["ruleId"], result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"])
        for result in run["results"]
    }
    assert places == {("PP201", "bad.json"), ("PP104", "none.yaml")}


# --- forms ---


def test_json_and_sarif_tell_known_from_new(plan):
    plan(**WRONG)
    invoke("check", "plan.json", "--write-baseline", "known.yaml", "--reason", "for now")
    plan(**{**WRONG, "topology": {**WRONG["topology"], "pp": 3}, "model": {"num_layers": 6}})
    arguments = ("check", "plan.json", "--baseline", "known.yaml", "--format")
    content = json.loads(invoke(*arguments, "json").stdout)
    Draft202012Validator(json.loads((SCHEMA.parent / "check.schema.json").read_text())).validate(content)
    assert (len(content["findings"]), len(content["known"])) == (2, 2)
    assert {known["reason"] for known in content["known"]} == {"for now"}
    marks = {entry["fingerprint"] for entry in entries()}
    assert {known["fingerprint"] for known in content["known"]} == marks
    (run,) = json.loads(invoke(*arguments, "sarif").stdout)["runs"]
    states = {result["partialFingerprints"][FINGERPRINT_NAME]: result for result in run["results"]}
    assert {mark for mark, result in states.items() if result["baselineState"] == "unchanged"} == marks
    assert [result["baselineState"] for result in run["results"]].count("new") == 2
    for mark, result in states.items():
        accepted = [{"kind": "external", "status": "accepted", "justification": "for now"}]
        assert result.get("suppressions") == (accepted if mark in marks else None)


@pytest.mark.parametrize("form", ["json", "sarif"])
def test_what_the_plan_suppresses_has_a_state_too(plan, form):
    known = [{"code": "PP202", "reason": "the same file serves larger topologies"}]
    name = plan(transport="partial", schedule={"kind": "gpipe"}, suppress=known)
    result = invoke("check", name, "--write-baseline", "known.yaml", "--format", form)
    content = json.loads(result.stdout)
    if form == "sarif":
        assert {result["baselineState"] for result in content["runs"][0]["results"]} == {"unchanged"}
        assert {len(result["suppressions"]) for result in content["runs"][0]["results"]} == {1}
    else:
        assert content["known"] == []
        assert len(content["suppressed"]) == 2


def test_files_of_other_tools_and_programs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "strategy.prototxt").write_bytes((REPOSITORY / "examples/importing/strategy.prototxt").read_bytes())
    arguments = ("check", "--from", "fleet", "strategy.prototxt", "--strict")
    first = invoke(*arguments)
    written = invoke(*arguments, "--write-baseline", "known.yaml")
    assert (first.exit_code, written.exit_code) == (1, 0)
    assert {tuple(entry["files"]) for entry in entries()} == {("strategy.prototxt",)}
    assert invoke(*arguments, "--baseline", "known.yaml").exit_code == 0
    assert "PP156" not in invoke(*arguments, "--baseline", "known.yaml", "--ignore", "17x").stdout
    (tmp_path / "hangs.txt").write_text(HANGS)
    assert invoke("check", "--program", "hangs.txt").exit_code == 1
    assert invoke("check", "--program", "hangs.txt", "--write-baseline", "p.yaml").exit_code == 0
    assert invoke("check", "--program", "hangs.txt", "--baseline", "p.yaml").exit_code == 0


# --- refused files and options ---

ENTRY = {
    "files": ["plan.json"],
    "code": "PP201",
    "severity": "error",
    "fingerprint": "0" * 32,
    "count": 1,
    "message": "m",
}


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        ("", "found nothing"),
        ("[]", "found a list of 0"),
        ("{pipeproof_baseline: 1", "--> known.yaml:1"),
        ("pipeproof_baseline: 2\nfindings: []", "`pipeproof_baseline`: input should be 1"),
        ("pipeproof_baseline: 1", "`findings`: field required"),
        ({**ENTRY, "codes": 1}, "`findings[0].codes`: extra inputs are not permitted"),
        ({**ENTRY, "count": 0}, "`findings[0].count`"),
        ({**ENTRY, "count": True}, "`findings[0].count`"),
        ({**ENTRY, "fingerprint": "abc"}, "`findings[0].fingerprint`"),
        ({**ENTRY, "reason": " "}, "`findings[0].reason`"),
        ({**ENTRY, "files": []}, "`findings[0].files`"),
    ],
)
def test_files_that_are_not_baselines(plan, tmp_path, content, fragment):
    text = content if isinstance(content, str) else json.dumps({"pipeproof_baseline": 1, "findings": [content]})
    (tmp_path / "known.yaml").write_text(text)
    for option in ("--baseline", "--write-baseline"):
        result = invoke("check", plan(), option, "known.yaml")
        assert result.exit_code == 2
        assert "error[PP155]" in result.stderr
        assert fragment in result.stderr
        assert (tmp_path / "known.yaml").read_text() == text


def test_an_entry_twice_is_refused(tmp_path):
    path = tmp_path / "known.json"
    path.write_text(json.dumps({"pipeproof_baseline": 1, "findings": [ENTRY, ENTRY]}))
    with pytest.raises(BaselineError, match=r"findings\[1\]` has the files and the fingerprint of one before it"):
        load_baseline(path)


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        (("--baseline", "none.yaml"), "cannot read `none.yaml`"),
        (("--baseline", "a", "--write-baseline", "b"), "one of --baseline and --write-baseline"),
        (("--reason", "so"), "--reason is for --write-baseline"),
        (("--write-baseline", "b", "--reason", " "), "--reason is for --write-baseline"),
        (("--write-baseline", "no/where.yaml"), "there is no directory 'no'"),
    ],
)
def test_options_that_make_no_sense(plan, options, fragment):
    result = invoke("check", plan(), *options)
    assert result.exit_code == 2
    assert fragment in result.stderr


def test_a_plan_that_cannot_be_checked_leaves_the_baseline_unchanged(plan, tmp_path):
    name = plan()
    invoke("check", name, "--write-baseline", "known.yaml")
    before = (tmp_path / "known.yaml").read_text()
    (tmp_path / name).write_text("pipeproof: 1\n")
    for arguments in ((name,), (name, plan("good.json", **right()))):
        assert invoke("check", *arguments, "--write-baseline", "known.yaml").exit_code == 2
        assert (tmp_path / "known.yaml").read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good.json", "known.yaml", name]


def test_messages_of_any_characters_come_back(tmp_path):
    texts = ['a "quoted" \\ path: {x}', "two\nlines", "模型 \u2028 # no comment", "1e5", "\t\x07"]
    findings = [Finding("PP201", Severity.NOTE, text) for text in texts]
    made = updated_entries({("1e5.yaml",): findings}, [], lambda code: True, "1.0")
    path = tmp_path / "known.yaml"
    path.write_text(baseline_text(made), encoding="utf-8")
    assert {entry.message for entry in load_baseline(path).entries} == set(texts)
    assert {entry.reason for entry in load_baseline(path).entries} == {"1.0"}
    assert load_baseline(path).entries == tuple(sorted(made, key=lambda entry: entry.fingerprint))


def test_the_schema_is_the_models():
    assert json.loads(SCHEMA.read_text()) == json.loads(json.dumps(baseline_json_schema()))
