"""Fleet's static strings: Paddle's output is read and written unchanged, and all else is refused by name."""

import json
from pathlib import Path

import pytest

from pipeproof.comm.lower import lower_loaded
from pipeproof.schedule.formats.read_schedule import convert_schedule, read_schedule, write_schedule
from pipeproof.schedule.formats.schedule_size_checks import Expected
from pipeproof.schedule.generators.gpipe import gpipe
from pipeproof.schedule.programs import Schedule
from pipeproof.specs.load_plan import load_plan, plan_from_dict
from pipeproof.specs.schedule import ScheduleFileError
from tests.plans import plan_dict, plan_file

TRACED = json.loads((Path(__file__).parent / "paddle_schedules.json").read_text())
STRINGS = TRACED["1F1B and VPP of Fleet (get_static_scheduler)"]
"""By name, such as ``VPP pp=4 vpp=2 acc=8``, the strings of all ranks, printed by Paddle itself."""


def read(text, expected=None, **keywords):
    return read_schedule(text, "s", expected or Expected(), **keywords)


def refusal(text, expected=None, **keywords):
    """(code, line, column, message, help) of each finding."""
    with pytest.raises(ScheduleFileError) as caught:
        read(text, expected, **keywords)
    return [(f.code, f.location.line, f.location.column, f.message, f.help or "") for f in caught.value.findings]


@pytest.mark.parametrize("name", STRINGS)
def test_what_paddle_prints_comes_back_character_for_character(name):
    theirs = "".join(f"{line}\n" for line in STRINGS[name])
    for form in ("auto", "fleet"):
        schedule = read(theirs, format=form)
        assert schedule.computes_only
        assert convert_schedule(schedule, "fleet") == theirs
    for form in ("text", "csv"):
        assert convert_schedule(read(convert_schedule(schedule, form)), "fleet") == theirs


def test_chunks_are_assigned_round_robin():
    schedule = read("f0_vp0;f0_vp1;b0_vp1;b0_vp0;\nf0_vp0;f0_vp1;b0_vp1;b0_vp0;\n")
    assert [[str(op) for op in program] for program in schedule.programs] == [
        ["0F0", "2F0", "2B0", "0B0"],
        ["1F0", "3F0", "3B0", "1B0"],
    ]
    assert schedule.placement == ((0, 2), (1, 3))


def test_blanks_a_missing_end_and_windows_lines_do_no_harm():
    plain = read("f0;b0;\nf0;b0;\n")
    assert read(" f0 ;b0; \r\nf0;\tb0\n\n \n").schedule == plain.schedule
    assert [end.column for end in plain.ends] == [7, 7]
    assert [(place.line, place.column, place.end_column) for place in plain.origins][:3] == [
        (1, 1, 2), (1, 4, 5), (2, 1, 2),
    ]  # fmt: skip


BAD = {
    "f0;b0;\nf0;w0;": ("PP132", 2, 4, "`w0`", "f0 and b0"),
    "f0;B0;": ("PP132", 1, 4, "`B0`", "did you mean `b0`?"),
    "f0; b00 ;": ("PP132", 1, 5, "`b00`", "did you mean `b0`?"),
    "f0_vp0;b0_vpp0;": ("PP132", 1, 8, "`b0_vpp0`", "did you mean `b0_vp0`?"),
    "f0_vp0;b0vp0;": ("PP132", 1, 8, "`b0vp0`", "did you mean `b0_vp0`?"),
    "f0;;b0;": ("PP132", 1, 4, "empty", ""),
    "f0_vp0;b0;": ("PP132", 1, 8, "`b0`", "chunk"),
    "f0;b0;\nf0;b0_vp0;": ("PP132", 2, 4, "`b0_vp0`", "chunk"),
    "f0;b0;\n\nf0;b0;": ("PP131", 2, 1, "line 2 is rank 1", ""),
    "f12345678;": ("PP132", 1, 1, "1,000,000", ""),
    "f0;f1000001;": ("PP132", 1, 4, "1,000,000", ""),
    "f0_vp1000001;": ("PP132", 1, 1, "1,000,000", ""),
    "f0;b0xyz;": ("PP132", 1, 4, "`b0xyz`", ""),
}


@pytest.mark.parametrize("text", BAD, ids=lambda text: text.replace("\n", "|"))
def test_what_is_no_step_is_refused_at_its_place(text):
    code, line, column, fragment, fix = BAD[text]
    found = refusal(text)
    assert found[0][:3] == (code, line, column)
    assert fragment in found[0][3]
    assert fix in found[0][4]


def test_the_largest_numbers_are_read():
    assert str(read("f1000000;").programs[0][0]) == "0F1000000"


@pytest.mark.parametrize(
    ("text", "expected", "code"),
    [
        ("f0;b0;", Expected(2), "PP135"),
        ("f0;b0;\nf0;b0;", Expected(2, 2), "PP136"),
        ("f0;b0;\nf0;b0;", Expected(2, 1, 4), "PP139"),
        ("", None, "PP131"),
    ],
)
def test_it_must_fit_its_plan(text, expected, code):
    assert refusal(text, expected, format="fleet")[0][0] == code


def test_another_form_named_fleet_is_refused_and_an_unknown_one_names_it():
    assert refusal("0F0,0B0", format="fleet")[0][0] == "PP132"
    ((code, _, _, message, fix),) = refusal("forward 0")
    assert code == "PP137"
    assert "Fleet" in message
    assert "f0;f1;b0;b1;" in fix


CANNOT = {
    "rank 0: 0F0 0I0 0W0": (1, 13, "0I0"),
    "rank 0: 0F0 0F1{batch=0} 0B0{batch=0}": (1, 13, "0F1"),
    "rank 0: 1F0\nrank 1: 0F0": (1, 9, "stage 1 is on rank 0"),
    "rank 0: 0F0 3F0\nrank 1: 1F0 2F0": (1, 13, "stage 3 is on rank 0"),
    "rank 0: 0F0.s0": (1, 9, "0F0.s0"),
    "rank 0: 0F0{queue=side}": (1, 9, "{queue=side}"),
    "rank 0: 0F0 0STEP": (1, 13, "0STEP"),
}


@pytest.mark.parametrize("text", CANNOT, ids=lambda text: text.replace("\n", "|"))
def test_what_fleets_strings_cannot_express_is_named_with_its_place(text):
    with pytest.raises(ScheduleFileError) as caught:
        convert_schedule(read(text), "fleet")
    (finding,) = caught.value.findings
    line, column, fragment = CANNOT[text]
    assert (finding.code, finding.location.line, finding.location.column) == ("PP141", line, column)
    assert fragment in finding.message


def test_a_plan_takes_it_and_it_is_the_generated_plan(tmp_path):
    (tmp_path / "s.txt").write_text(write_schedule(gpipe(2, 4), "fleet"))
    for form in ({}, {"format": "fleet"}):
        plan = plan_file(tmp_path / "plan.json", schedule={"kind": "file", "path": "s.txt", **form})
        graph = lower_loaded(load_plan(plan)).graph
        generated = lower_loaded(plan_from_dict(plan_dict(schedule={"kind": "gpipe"}))).graph
        assert graph.columns.equals(generated.columns)


def test_an_empty_schedule_is_written_as_lines_without_steps():
    assert write_schedule(Schedule(((), ())), "fleet") == "\n\n"
