"""Findings as text and as JSON."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from pipeproof.specs.finding import (
    BadPlanError,
    CycleWitness,
    ElementRange,
    Finding,
    Location,
    OpsWitness,
    RangesWitness,
    Severity,
    WitnessOp,
)
from pipeproof.specs.load import load_plan
from pipeproof.specs.render import finding_to_json, render_text
from pipeproof.specs.source import SourceMap

RANGES = RangesWitness((ElementRange(2, 4, 8, 0, "s 1"),), (ElementRange(2, 4, 8, 1),))
CYCLE = CycleWitness((WitnessOp(0, "0SEND_F0", 3), WitnessOp(1, "1SEND_B0", 9)))
OPS = OpsWitness((WitnessOp(0, "0F0", 0), WitnessOp(1, "1RECV_F0")))


def text_of(findings, source=None, **console):
    stream = io.StringIO()
    render_text(findings, source, console=Console(file=stream, width=40, **console))
    return stream.getvalue()


def finding(**fields):
    return Finding(**{"code": "PP201", "severity": Severity.ERROR, "message": "wrong", **fields})


def source_of(*lines):
    return SourceMap("plan.yaml", lines)


def test_golden_of_broken_files(check_golden, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent / "broken")
    pages = []
    for name in (
        "unknown_key",
        "missing_keys",
        "tp_does_not_divide",
        "later_values",
        "unclosed_brace",
        "second_document",
    ):
        with pytest.raises(BadPlanError) as caught:
            load_plan(f"{name}.yaml")
        pages.append(text_of(caught.value.findings, caught.value.source))
    check_golden("plan_errors.txt", "".join(pages))


def test_form_and_order_of_parts():
    shown = text_of(
        [finding(location=Location("plan.yaml", 10, 6, 8), help="mend it", witness=RANGES)],
        source_of(*[""] * 8, "before", "key: abc # c"),
    )
    assert shown.splitlines() == [
        "error[PP201]: wrong",
        "  --> plan.yaml:10:6",
        "   |",
        " 9 | before",
        "10 | key: abc # c",
        "   |      ^^^",
        "   = rank 2 loses elements 4..8 of rank 0 (s 1)",
        "   = rank 2 gets  elements 4..8 of rank 1",
        "   = help: mend it",
        "",
    ]


def test_a_place_without_its_text_and_a_finding_without_a_place():
    assert text_of([finding(location=Location("p", 1, 2))]) == "error[PP201]: wrong\n --> p:1:2\n\n"
    assert text_of([finding(severity=Severity.NOTE, help="h")]) == "note[PP201]: wrong\n  = help: h\n\n"
    assert "-->" in text_of([finding(location=Location("p", 7, 2))], source_of("one line"))


def test_first_line_and_one_caret_without_an_end():
    shown = text_of([finding(location=Location("p", 1, 3))], source_of("a: [", "]"))
    assert shown.splitlines()[2:5] == ["  |", "1 | a: [", "  |   ^"]


def test_a_place_behind_the_last_character():
    shown = text_of([finding(location=Location("p", 1, 5))], source_of("ab"))
    assert shown.splitlines()[4] == "  |     ^"


@pytest.mark.parametrize(
    ("line", "column", "end", "carets"),
    [
        ("世界: x", 5, 5, "      ^"),
        ("a: 世界", 4, 5, "   ^^^^"),
        ("e\u0301: x", 5, 5, "   ^"),
        ("\ta: x", 5, 5, "    ^"),
    ],
)
def test_carets_stand_below_wide_and_combining_characters_and_tabs(line, column, end, carets):
    shown = text_of([finding(location=Location("p", 1, column, end))], source_of(line))
    assert shown.splitlines()[4] == f"  | {carets}"


def test_nothing_that_a_terminal_obeys_gets_through():
    shown = text_of(
        [finding(message="a\x1b[31mb\u202ec", help="x\ny", location=Location("p\x07", 1, 1))],
        source_of("\x1b[2J"),
    )
    assert not {"\x1b", "\x07", "\u202e"} & set(shown)


def test_messages_and_mends_of_several_lines():
    assert text_of([finding(message="a\nb", help="c\nd")]).splitlines()[:4] == [
        "error[PP201]: a",
        "  b",
        "  = help: c",
        "          d",
    ]


def test_markup_and_long_lines_stay_as_they_are():
    line = "key: " + "[bold] :smile: " * 10
    shown = text_of([finding(message=line, location=Location("p", 1, 1, 3))], source_of(line))
    assert f"error[PP201]: {line}\n" in shown
    assert f"1 | {line}\n" in shown


def test_colours_on_a_terminal_only():
    assert "\x1b" not in text_of([finding()])
    assert "\x1b[1;31merror" in text_of([finding()], force_terminal=True, color_system="standard")


def test_cycles_and_operations():
    assert text_of([finding(witness=CYCLE)]).splitlines()[1:3] == [
        "  = rank 0 0SEND_F0 waits for rank 1 1SEND_B0",
        "  = rank 1 1SEND_B0 waits for rank 0 0SEND_F0",
    ]
    assert text_of([finding(witness=OPS)]).splitlines()[1:3] == ["  = rank 0: 0F0", "  = rank 1: 1RECV_F0"]


def test_long_witnesses_are_cut_and_say_so():
    many = OpsWitness(tuple(WitnessOp(rank, "0F0") for rank in range(20)))
    shown = text_of([finding(witness=many)])
    assert "rank 11: 0F0" in shown
    assert "rank 12: 0F0" not in shown
    assert "and 8 more" in shown


def test_json():
    assert finding_to_json(finding()) == {
        "code": "PP201",
        "severity": "error",
        "message": "wrong",
        "location": None,
        "help": None,
        "witness": None,
    }
    full = finding(severity=Severity.WARNING, location=Location("f", 1, 2, 3), help="h", witness=RANGES)
    assert finding_to_json(full) == {
        "code": "PP201",
        "severity": "warning",
        "message": "wrong",
        "location": {"file": "f", "line": 1, "column": 2},
        "help": "h",
        "witness": {
            "kind": "ranges",
            "lost": [{"rank": 2, "start": 4, "stop": 8, "source_rank": 0, "covers": "s 1"}],
            "foreign": [{"rank": 2, "start": 4, "stop": 8, "source_rank": 1, "covers": ""}],
        },
    }
    assert type(finding_to_json(full)["severity"]) is str
    assert finding_to_json(finding(witness=CYCLE))["witness"] == {
        "kind": "cycle",
        "ops": [{"rank": 0, "op": "0SEND_F0", "op_id": 3}, {"rank": 1, "op": "1SEND_B0", "op_id": 9}],
    }
    assert finding_to_json(finding(witness=OPS))["witness"] == {
        "kind": "ops",
        "ops": [{"rank": 0, "op": "0F0", "op_id": 0}, {"rank": 1, "op": "1RECV_F0", "op_id": None}],
    }
