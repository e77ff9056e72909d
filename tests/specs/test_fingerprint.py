"""What a finding is known by: neither where it stands nor how much of something there is, but what it is about."""

import pytest

from pipeproof.diagnostics.finding import Finding, Location, Severity
from pipeproof.diagnostics.fingerprint import fingerprint
from pipeproof.verify.check_plan import check_subject
from tests.plans import subject


def of(message, code="PP201", severity=Severity.ERROR, **fields):
    return fingerprint(Finding(code, severity, message, **fields))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("`partial` delivers 2048 of 4096 elements wrongly", "`partial` delivers 4,096 of 8,192 elements wrongly"),
        ("needs 3 slots", "needs 12 slots"),
        ("rank 0 and 3 more", "rank 0 and 7 more"),
        ("holds 1.5 GiB at 300 us", "holds 2.25 GiB at 7 us"),
        ("two values: 1 in line 12, 2 in line 20", "two values: 1 in line 9, 2 in line 18"),
        ("one sentence", "one   sentence"),
        ("has 2 sends and 1 receive", "has 3 sends and 2 receives".replace("receives", "receive")),
    ],
)
def test_amounts_lines_and_spaces_do_not_count(one, other):
    assert of(one) == of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("boundary 0->1, forward: 2 of 4 elements", "boundary 1->2, forward: 2 of 4 elements"),
        ("boundary 0->1, forward: 2 of 4 elements", "boundary 1->0, backward: 2 of 4 elements"),
        ("rank 3 of 8 waits", "rank 2 of 8 waits"),
        ("collective 2 of the backward", "collective 3 of the backward"),
        ("rank 1 sends 0SEND_F0", "rank 1 sends 0SEND_F1"),
        ("rank 1 sends bfloat16", "rank 2 sends bfloat16"),
        ("topology.tp is 2", "topology.tp is 4"),
        ("stage 1 holds layer 10", "stage 1 holds layer 11"),
    ],
)
def test_what_it_is_about_counts(one, other):
    assert of(one) != of(other)


def test_neither_place_nor_help_nor_witness_counts_but_code_and_severity_do():
    here = of("lost", location=Location("plan.yaml", 6, 2), help="mend it")
    assert here == of("lost", location=Location("other.yaml", 60, 7)) == of("lost")
    assert len({here, of("lost", code="PP202"), of("lost", severity=Severity.WARNING)}) == 3


def test_a_larger_model_has_the_same_findings_and_other_boundaries_have_not():
    """Of real findings: each boundary and direction is one, whatever the sizes."""
    wrong = {"topology": {"tp": 2, "sequence_parallel": True}, "transport": "partial"}

    def marks(**sections):
        findings = check_subject(subject(**{**wrong, **sections})).findings
        return {fingerprint(finding) for finding in findings if finding.code == "PP201"}

    small = marks()
    large = marks(model={"hidden_size": 64, "seq_length": 32}, schedule={"num_micro_batches": 8})
    longer = marks(topology={**wrong["topology"], "pp": 4})
    assert len(small) == 2
    assert large == small
    assert small < longer
    assert len(longer) == 6
