"""Findings as SARIF: the standard's names and types, places as it counts them, nothing lost."""

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from pipeproof.diagnostics.finding import (
    CycleWitness,
    ElementRange,
    Finding,
    Location,
    OpsWitness,
    RangesWitness,
    RuleDoc,
    Severity,
    WitnessOp,
)
from pipeproof.diagnostics.sarif_output import SarifResult, sarif_log

ESSENTIALS = json.loads((Path(__file__).parent / "sarif_essentials.schema.json").read_text())
DOCS = (
    RuleDoc("PP201", "elements are lost", "Why.", wrong="transport: partial", right="transport: full"),
    RuleDoc("PP401", "a cycle", "Why not.", wrong="rank 0: 0F0", right="rank 0: 0F0 0B0", severity="warning"),
)
RANGES = RangesWitness((ElementRange(2, 4, 8, 0, "s 1"),), (ElementRange(2, 4, 8, 1),))
CYCLE = CycleWitness((WitnessOp(0, "0SEND_F0", 3), WitnessOp(1, "1SEND_B0", 9)))
OPS = OpsWitness((WitnessOp(0, "0F0", 0), WitnessOp(1, "1RECV_F0")))


def finding(code="PP201", severity=Severity.ERROR, message="wrong", **fields):
    return Finding(code, severity, message, **fields)


def log_of(*results, **about):
    """The only run of a log that is as the standard has it."""
    log = sarif_log(results, DOCS, **{"version": "0.1.0", "file": "plan.yaml", "exit_status": 1, **about})
    log = json.loads(json.dumps(log))
    Draft202012Validator(ESSENTIALS).validate(log)
    (run,) = log["runs"]
    return run


def result_of(found, *because):
    (result,) = log_of(SarifResult(found, *because))["results"]
    return result


def place(file, **region):
    return {"artifactLocation": {"uri": file, "uriBaseId": "%SRCROOT%"}, **({"region": region} if region else {})}


def test_rules_carry_their_documents():
    rules = log_of()["tool"]["driver"]["rules"]
    assert [(rule["id"], rule["defaultConfiguration"]["level"]) for rule in rules] == [
        ("PP201", "error"),
        ("PP401", "warning"),
    ]
    assert rules[0]["shortDescription"]["text"] == "elements are lost"
    for text in rules[0]["help"].values():
        assert all(part in text for part in ("Why.", "transport: partial", "transport: full"))
    assert rules[1]["properties"]["page"] == "docs/codes.md#pp401"


@pytest.mark.parametrize("severity", list(Severity))
def test_a_result_has_the_severity_of_its_finding_and_not_of_its_rule(severity):
    result = result_of(finding("PP401", severity, help="mend it"))
    assert (result["ruleId"], result["ruleIndex"], result["level"]) == ("PP401", 1, str(severity))
    assert result["message"]["text"] == "wrong\nhelp: mend it"
    assert "suppressions" not in result
    assert "relatedLocations" not in result


def test_paths_are_given_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = result_of(finding(location=Location(str(tmp_path / "plan.yaml"), 1, 1)))
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "plan.yaml"
    result = result_of(finding(location=Location("/elsewhere/plan.yaml", 1, 1)))
    assert result["locations"][0]["physicalLocation"]["artifactLocation"] == {"uri": "file:///elsewhere/plan.yaml"}


def test_a_suppressed_result_says_why_and_where():
    result = result_of(finding(severity=Severity.NOTE), "known", Location("plan.yaml", 9, 3, 7))
    assert result["suppressions"] == [
        {
            "kind": "inSource",
            "justification": "known",
            "location": {"physicalLocation": place("plan.yaml", startLine=9, startColumn=3, endColumn=8)},
        }
    ]


def test_witnesses_are_sentences_and_data():
    result = result_of(finding(witness=CYCLE))
    assert [(part["message"]["text"], part["logicalLocations"]) for part in result["relatedLocations"]] == [
        ("rank 0 0SEND_F0 waits for rank 1 1SEND_B0", [{"fullyQualifiedName": "rank 0: 0SEND_F0"}]),
        ("rank 1 1SEND_B0 waits for rank 0 0SEND_F0", [{"fullyQualifiedName": "rank 1: 1SEND_B0"}]),
    ]
    assert result["properties"]["witness"]["kind"] == "cycle"
    result = result_of(finding(witness=OPS))
    assert [part["message"]["text"] for part in result["relatedLocations"]] == ["rank 0: 0F0", "rank 1: 1RECV_F0"]
    result = result_of(finding(witness=RANGES))
    assert [part["message"]["text"] for part in result["relatedLocations"]] == [
        "rank 2 loses elements 4..8 of rank 0 (s 1)",
        "rank 2 gets elements 4..8 of rank 1",
    ]
    assert all("logicalLocations" not in part for part in result["relatedLocations"])


def test_what_the_run_was():
    run = log_of(digest="ab", certified=True, exit_status=0, not_run=("PP401",))
    assert run["properties"] == {"digest": "ab", "certified": True}
    assert run["invocations"] == [
        {
            "executionSuccessful": True,
            "exitCode": 0,
            "ruleConfigurationOverrides": [
                {"descriptor": {"id": "PP401", "index": 1}, "configuration": {"enabled": False}}
            ],
        }
    ]
    assert "ruleConfigurationOverrides" not in log_of()["invocations"][0]
