"""Findings on suppressions themselves, and none if the rules on suppressions do not run."""

import pytest

from pipeproof.verify.check_plan import check_subject
from pipeproof.verify.registry import RULES, Selection, suppress
from tests.plans import subject


def reported(code, *select):
    one = subject(suppress=[{"code": code, "reason": "known"}])
    return [f for f in check_subject(one, selection=Selection(select)).findings if f.code in ("PP150", "PP151")]


@pytest.mark.parametrize(("code", "about"), [("PP401", "PP150"), ("PP999", "PP150"), ("PP202", "PP151")])
def test_a_suppression_that_can_do_nothing_is_reported_of_only_by_a_rule_that_runs(code, about):
    assert [f.code for f in reported(code)] == [about]
    assert [f.code for f in reported(code, about, code)] == [about]
    assert reported(code, "PP4", "PP202") == []


def test_what_could_be_suppressed_are_warnings_and_notes():
    (found,) = reported("PP999")
    assert "PP202" in found.help
    assert "PP401" not in found.help


def test_only_findings_of_the_code_that_are_no_errors_are_set_aside():
    docs = {rule.doc.code: rule.doc for rule in RULES}
    one = subject(suppress=[{"code": "PP202", "reason": "known"}, {"code": "PP401", "reason": "known"}])
    found = [docs[code].finding("text") for code in ("PP516", "PP202", "PP401", "PP202")]
    kept, suppressed = suppress(one, found, docs, {"PP150", *docs})
    assert [finding.code for finding in kept] == ["PP516", "PP401", "PP150"]
    assert [(item.finding.code, item.reason) for item in suppressed] == [("PP202", "known")] * 2
    kept, _ = suppress(one, found, docs, docs.keys() - {"PP150"})
    assert [finding.code for finding in kept] == ["PP516", "PP401"]
