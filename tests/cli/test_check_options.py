"""Rule selection of ``check``, suppressions of a plan, and output formats."""

import json
import re
from dataclasses import replace

import pytest

from pipeproof.cli.code_registry import all_docs
from pipeproof.diagnostics.finding import Finding, Severity
from pipeproof.exec.launch.run_plan import NotVerifiedError, RunOptions, require_runnable
from pipeproof.specs.load_plan import load_plan
from pipeproof.verify.check_plan import CHECK_CODES, check
from pipeproof.verify.registry import Selection
from tests.cli.commands import invoke

pytestmark = pytest.mark.usefixtures("known_notes")

KNOWN = {"code": "PP202", "reason": "the same file serves larger topologies"}


@pytest.fixture
def quiet(write):
    """Write a plan of the given sections about which ``check`` has nothing to say; its path."""

    def write_quiet(**sections):
        return write(**{"schedule": {"kind": "gpipe"}, **sections})

    return write_quiet


@pytest.fixture
def refused(quiet):
    return quiet(topology={"tp": 2, "sequence_parallel": True}, transport="partial")


def check_json(plan, *options):
    result = invoke("check", plan, "--format", "json", *options)
    return result.exit_code, json.loads(result.stdout)


def codes(content):
    return {finding["code"] for finding in content["findings"]}


# --- which rules run ---


def test_a_rule_that_is_left_out_does_not_run_and_nothing_is_certified(refused):
    status, content = check_json(refused, "--ignore", "PP2")
    assert (status, codes(content), content["certified"]) == (0, set(), False)
    assert content["not_run"] == [code for code in CHECK_CODES if code.startswith("PP2")]
    text = invoke("check", refused, "--ignore", "PP2").stdout
    assert "incomplete: no finding in " in text
    assert "proved" not in text
    one = invoke("check", refused, "--ignore", "PP201").stdout
    assert f"but 1 of {len(CHECK_CODES)} rules did not run (PP201): no certificate" in one
    most = invoke("check", refused, "--select", "PP401").stdout
    assert f"{len(CHECK_CODES) - 1} of {len(CHECK_CODES)} rules did not run" in most
    assert f" and {len(CHECK_CODES) - 9} more): no certificate" in most


@pytest.mark.parametrize("options", [("--select", "3xx,PP401"), ("--select", "PP3", "--select", "PP401")])
def test_only_what_is_selected_runs(refused, options):
    _, content = check_json(refused, *options)
    assert codes(content) == set()
    assert {code for code in CHECK_CODES if code not in content["not_run"]} == {
        "PP401",
        *(code for code in CHECK_CODES if code.startswith("PP3")),
    }


def test_what_is_ignored_is_taken_from_what_is_selected(refused):
    _, content = check_json(refused, "--select", "PP2", "--ignore", "pp201")
    assert "PP201" in content["not_run"]
    assert "PP202" not in content["not_run"]


@pytest.mark.parametrize("transport", ["full", "partial"])
def test_the_executor_refuses_a_plan_that_some_rules_did_not_judge(quiet, transport):
    loaded = load_plan(quiet(topology={"tp": 2, "sequence_parallel": True}, transport=transport))
    report = check(loaded, Selection(ignore=("PP201",)))
    assert not report.errors
    with pytest.raises(NotVerifiedError):
        require_runnable(report, RunOptions())
    assert (check(loaded).certificate is not None) == (transport == "full")


# --- suppressions in the plan ---


@pytest.mark.parametrize(
    ("entry", "code", "severity", "words"),
    [
        ({**KNOWN, "code": "PP201"}, "PP150", "error", "PP201 (a transport loses"),
        ({**KNOWN, "code": "PP999"}, "PP150", "error", "no rule of `check` has the code PP999"),
        ({**KNOWN, "code": "PP905"}, "PP150", "error", "no rule of `check` has the code PP905"),
        (KNOWN, "PP151", "note", "nothing with this code was found"),
    ],
)
def test_suppressions_that_cannot_be_or_do_nothing(quiet, entry, code, severity, words):
    plan = quiet(suppress=[entry])
    status, content = check_json(plan)
    (finding,) = content["findings"]
    assert (finding["code"], finding["severity"]) == (code, severity)
    assert words in finding["message"]
    assert finding["location"]["column"] == plan.read_text().index(f'"{entry["code"]}"') + 1
    assert status == (1 if severity == "error" else 0)
    assert content["certified"] == (severity != "error")


def test_a_suppression_of_a_rule_that_did_not_run_is_not_called_useless(quiet):
    assert codes(check_json(quiet(suppress=[KNOWN]), "--ignore", "PP202")[1]) == set()


def test_a_warning_of_a_rule_that_is_an_error_elsewhere_can_be_suppressed(quiet, monkeypatch):
    from pipeproof.verify import check_plan as module

    def warn(subject):
        yield Finding("PP401", Severity.WARNING, "not on this backend")

    rules = tuple(replace(r, check=warn) if r.doc.code == "PP401" else r for r in module.RULES)
    monkeypatch.setattr(module, "RULES", rules)
    status, content = check_json(quiet(suppress=[{**KNOWN, "code": "PP401"}]), "--strict")
    assert (status, content["findings"]) == (0, [])
    assert [entry["code"] for entry in content["suppressed"]] == ["PP401"]


def test_errors_stay_errors_where_their_code_is_suppressed(quiet, monkeypatch):
    from pipeproof.verify import check_plan as module

    def fail(subject):
        yield Finding("PP202", Severity.ERROR, "worse here")

    rules = tuple(replace(r, check=fail) if r.doc.code == "PP202" else r for r in module.RULES)
    monkeypatch.setattr(module, "RULES", rules)
    status, content = check_json(quiet(suppress=[KNOWN]))
    assert status == 1
    assert content["suppressed"] == []
    assert [(f["code"], f["severity"]) for f in content["findings"]] == [("PP151", "note"), ("PP202", "error")]
    assert "here it is an error" in content["findings"][0]["message"]


# --- the text form ---


def many(count):
    return tuple(Finding("PP301", Severity.ERROR, f"finding {index}") for index in range(count))


@pytest.fixture
def crowded(good, monkeypatch):
    """A plan with forty findings of one code and one of another."""
    from pipeproof.verify import check_plan as module

    real = module.check

    def crowd(loaded, selection, on_progress):
        last = Finding("PP402", Severity.ERROR, "the last one")
        return replace(real(loaded, selection, on_progress), findings=(*many(40), last))

    monkeypatch.setattr(module, "check", crowd)
    return good


def test_many_findings_of_one_code_are_cut_and_say_so(crowded):
    text = invoke("check", crowded).stdout
    assert [int(number) for number in re.findall(r"finding (\d+)", text)] == list(range(10))
    assert "error[PP301]: and 30 more; `--all` shows all" in text
    assert "the last one" in text
    assert "41 errors" in text


# --- SARIF ---


def sarif(plan, *options):
    result = invoke("check", plan, "--format", "sarif", *options)
    assert result.stderr == ""
    (run,) = json.loads(result.stdout)["runs"]
    return result.exit_code, run


def test_sarif_lists_every_code_and_points_to_it(refused):
    status, run = sarif(refused)
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == [doc.code for doc in all_docs()]
    assert status == run["invocations"][0]["exitCode"] == 1
    assert run["results"]
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"] == "PP201"
        region = result["locations"][0]["physicalLocation"]["region"]
        line = refused.read_text().splitlines()[region["startLine"] - 1]
        assert line[region["startColumn"] - 1 : region["endColumn"] - 1] == '"partial"'
    assert re.fullmatch(r"[0-9a-f]{64}", run["properties"]["digest"])
    assert not run["properties"]["certified"]


def test_sarif_of_suppressions_and_of_rules_that_did_not_run(quiet):
    plan = quiet(transport="partial", suppress=[KNOWN])
    status, run = sarif(plan, "--ignore", "PP401")
    assert status == 0
    assert {result["ruleId"] for result in run["results"]} == {"PP202"}
    for result in run["results"]:
        (suppression,) = result["suppressions"]
        assert suppression["kind"] == "inSource"
        assert suppression["justification"] == KNOWN["reason"]
        start = suppression["location"]["physicalLocation"]["region"]["startColumn"]
        assert plan.read_text()[start - 1 :].startswith('"PP202"')
    (override,) = run["invocations"][0]["ruleConfigurationOverrides"]
    assert override["descriptor"]["id"] == "PP401"
    assert override["configuration"] == {"enabled": False}
