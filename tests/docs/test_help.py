"""Every help is right: it is applied as its words say, and the finding is gone."""

import pytest

from pipeproof.diagnostics.finding import ExampleKind
from pipeproof.diagnostics.yaml_tree import parse_text
from tests.docs.help_edits import changed_plans, changed_programs, path_of, plan_findings, still_there
from tests.docs.plan_mutants import SEEDS, mutants
from tests.docs.rule_examples import FILE_CODES, findings_of, overlaid
from tests.docs.test_rule_examples import RUNNABLE
from tests.plans import plan_dict
from tests.specs.plans import example

NO_DATA = ("PP101", "PP103", "PP153", "PP154")
"""Plans that are not YAML, and plans that only a simulation refuses."""

EXAMPLES = [
    doc for doc in RUNNABLE
    if doc.example_kind is ExampleKind.PROGRAM
    or (doc.example_kind is ExampleKind.PLAN and doc.code not in NO_DATA)
]  # fmt: skip
_MOST = 3
"""Alternatives of a help that are tried; the names of all kinds of schedules are eighteen."""

PROSE = {
    *("PP114", "PP115", "PP134", "PP139", "PP143", "PP150", "PP701", "PP702"),  # the reader chooses layer, stage, size
    "PP116",  # a check of five million operations takes a minute
    *("PP130", "PP131", "PP160", "PP161", "PP162"),  # of another file, of a measurement
    *("PP122", "PP138", "PP145", "PP302", "PP303", "PP304", "PP305", "PP306", "PP307", "PP308", "PP309", "PP312"),
    *("PP313", "PP403", "PP411", "PP412", "PP413", "PP506", "PP507", "PP509", "PP510", "PP511", "PP512", "PP513"),
    *("PP514", "PP601", "PP605", "PP606", "PP607", "PP608", "PP609", "PP610", "PP614", "PP615"),
}
"""Codes whose help leaves the change to the reader; the right example, which is tested, is that change."""


def is_applied(doc, folder):
    """True if the help of the wrong example can be applied; it must then remove the finding."""
    if doc.example_kind is ExampleKind.PROGRAM:
        finding = next(found for found in findings_of(doc, doc.wrong, folder) if found.code == doc.code)
        programs = list(changed_programs(finding, doc.wrong))
        assert not programs or not all(still_there(finding, findings_of(doc, text, folder)) for text in programs)
        return bool(programs)
    overlaid("{}", folder)
    fragment = parse_text(doc.wrong, "example").data
    data = example() | fragment if doc.code in FILE_CODES else plan_dict(**fragment)
    found, source = plan_findings(data, folder / "plan.json")
    finding = next(finding for finding in found if finding.code == doc.code)
    plans = list(changed_plans(finding, data, source)) if doc.code != "PP116" else []
    for words, plan in plans:
        after, changed_source = plan_findings(plan, folder / "plan.json")
        assert not still_there(finding, after, changed_source, source), words
    return bool(plans)


@pytest.mark.parametrize("doc", EXAMPLES, ids=lambda doc: doc.code)
def test_the_help_of_a_wrong_example_makes_its_finding_go(doc, tmp_path):
    assert is_applied(doc, tmp_path) == (doc.code not in PROSE)


def test_seeds_are_right():
    assert [finding for plan in SEEDS for finding in plan_findings(plan)[0] if finding.severity == "error"] == []


@pytest.mark.slow(but=["0"])
@pytest.mark.parametrize("seed", range(5))
def test_the_help_of_mutants_makes_their_findings_go(seed):
    """100 mutants with a finding in each part; prose is for names like no other, and for one kind of deadlock."""
    refused, prose = 0, set()
    for plan in mutants(200, seed):
        found, source = plan_findings(plan)
        found = [finding for finding in found if finding.severity != "note"]
        refused += bool(found)
        for finding in found:
            plans = list(changed_plans(finding, plan, source))
            if not plans:
                prose.add((finding.code, finding.help))
            for words, changed in plans[:_MOST]:
                after, changed_source = plan_findings(changed)
                left = still_there(finding, after, changed_source, source)
                assert not left, (finding.message, path_of(finding, source), words, changed)
    assert refused >= 100
    assert {code for code, _ in prose} <= {"PP102", "PP111", "PP401"}, prose
