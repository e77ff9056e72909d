"""Findings as text and as JSON."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from pipeproof.diagnostics.finding import (
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
from pipeproof.diagnostics.source import SourceMap
from pipeproof.diagnostics.text_output import BRIEF_WITNESSES, Brevity, finding_to_json, render_text
from pipeproof.specs.load_plan import load_plan

RANGES = RangesWitness((ElementRange(2, 4, 8, 0, "s 1"),), (ElementRange(2, 4, 8, 1),))
CYCLE = CycleWitness((WitnessOp(0, "0SEND_F0", 3), WitnessOp(1, "1SEND_B0", 9)))
OPS = OpsWitness((WitnessOp(0, "0F0", 0), WitnessOp(1, "1RECV_F0")))


def text_of(findings, source=None, brevity=BRIEF_WITNESSES, **console):
    stream = io.StringIO()
    render_text(findings, source, console=Console(file=stream, width=40, **console), brevity=brevity)
    return stream.getvalue()


def finding(**fields):
    return Finding(**{"code": "PP201", "severity": Severity.ERROR, "message": "wrong", **fields})


def source_of(*lines, file="p"):
    return SourceMap(file, lines)


def test_golden_of_broken_files(check_golden, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent / "broken")
    pages = []
    for name in (
        "unknown_key",
        "missing_keys",
        "tp_does_not_divide",
        "paddle_in_16_bits",
        "unclosed_brace",
        "second_document",
    ):
        with pytest.raises(BadPlanError) as caught:
            load_plan(f"{name}.yaml")
        pages.append(text_of(caught.value.findings, caught.value.source))
    check_golden("plan_errors.txt", "".join(pages))


def test_copies_of_a_fault_are_named_below_the_first():
    here, there = Location("p", 3, 1), Location("p", 4, 1)
    bad = [finding(message=f"boundary {n}->{n + 1}: {64 * n} of 4096 elements", location=here) for n in range(6)]
    other = [
        finding(message="boundary 0->1: 64 of 4096 elements", location=there),
        finding(message="boundary 0->1: no elements", location=here),
        finding(message="boundary 0->1: 64 of 4096 elements"),  # no place
    ]
    brief = Brevity(10, 10, "--all", details=False)
    text = " ".join(text_of([*bad, *other], brevity=brief).split())
    assert text.count("error[PP201]") == 1 + len(other)
    assert "the same 5 more times: boundary 1->2; boundary 2->3; boundary 3->4; --all" in text
    assert text_of(bad).count("error[PP201]") == 6
    twice = " ".join(text_of(bad[:2], brevity=brief).split())
    assert "the same 1 more time: boundary 1->2" in twice
    assert "--all" not in twice


def test_a_place_without_its_text_and_a_finding_without_a_place():
    assert text_of([finding(location=Location("p", 1, 2))]) == "error[PP201]: wrong\n --> p:1:2\n\n"
    assert text_of([finding(severity=Severity.NOTE, help="h")]) == "note[PP201]: wrong\n  = help: h\n\n"
    assert "-->" in text_of([finding(location=Location("p", 7, 2))], source_of("one line"))


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
        source_of("\x1b[2J", file="p\x07"),
    )
    assert not {"\x1b", "\x07", "\u202e"} & set(shown)


def test_markup_and_long_lines_stay_as_they_are():
    line = "key:" + " [bold] :smile:" * 10  # without a blank at its end, which rich before 14.3 removes
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


# --- which lines are shown ---


def shown_lines(text):
    return [line.split("| ", 1)[1] for line in text.splitlines() if "| " in line]


def test_a_place_in_another_file_shows_that_files_lines(tmp_path):
    schedule = tmp_path / "schedule.csv"
    schedule.write_text("0F0,0F1\r\n1F0,1F1\r\n")
    shown = text_of([finding(location=Location(str(schedule), 2, 5, 7))], source_of("of the plan", "of the plan"))
    assert f"--> {schedule}:2:5" in shown
    assert shown_lines(shown) == ["0F0,0F1", "1F0,1F1", "    ^^^"]


@pytest.mark.parametrize("content", [None, b"\xff\xfe0F0", b"one line"])
def test_a_file_that_cannot_be_shown_is_named_all_the_same(tmp_path, content):
    file = tmp_path / "schedule.csv"
    if content is not None:
        file.write_bytes(content)
    shown = text_of([finding(location=Location(str(file), 3, 1))])
    assert shown.splitlines()[1:] == [f" --> {file}:3:1", ""]


def test_a_directory_and_a_huge_file_are_not_opened(tmp_path, monkeypatch):
    huge = tmp_path / "huge.csv"
    huge.write_text("0F0\n" * 100)
    monkeypatch.setattr("pipeproof.diagnostics.source._MAX_EXCERPT_BYTES", 99)
    for file in (tmp_path, huge):
        assert shown_lines(text_of([finding(location=Location(str(file), 1, 1))])) == []


CELLS = [f"{stage}F{micro_batch}" for stage in range(10) for micro_batch in range(10)]
LONG = ",".join(CELLS)
"""A line of 399 characters, each cell in it once."""


@pytest.mark.parametrize("cell", ["0F0", "0F9", "5F5", "9F8", "9F9"])
def test_of_a_long_line_the_part_around_the_place_is_shown(cell):
    column = LONG.index(cell) + 1
    shown = text_of([finding(location=Location("p", 2, column, column + 2))], source_of("before", LONG))
    text, carets = shown_lines(shown)
    assert len(text) <= 160 + 2 * len("...")
    assert text.startswith("...") == (cell not in ("0F0", "0F9"))
    assert text.endswith("...") == (cell not in ("9F8", "9F9"))
    assert text.removeprefix("...").removesuffix("...") in LONG
    assert text[carets.index("^") : len(carets)] == cell


# --- how much is shown ---


def test_findings_of_one_code_beyond_the_most_are_counted_where_they_stop():
    findings = [finding(message=f"m{index}") for index in range(4)]
    other = finding(code="PP301", message="other")
    brief = Brevity(findings_of_a_code=2, witness_lines=1, rest="elsewhere")
    shown = text_of([*findings, other], brevity=brief)
    assert [line for line in shown.splitlines() if line] == [
        "error[PP201]: m0",
        "error[PP201]: m1",
        "error[PP201]: and 2 more; elsewhere",
        "error[PP301]: other",
    ]
    assert "more" not in text_of(findings[:2], brevity=brief)
    assert "and 1 more; elsewhere" in text_of([finding(witness=CYCLE)], brevity=brief)
    assert text_of(findings, brevity=Brevity(None, None, "")).count("error[PP201]") == 4
