"""Schedules from files and from the plan: formats, sizes that fit, places, and the documents of their codes."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.comm.lower import lower_loaded, own_schedule
from pipeproof.diagnostics.finding import Location
from pipeproof.schedule.formats.read_schedule import (
    custom_schedule,
    load_schedule_file,
    read_schedule,
    require_attributes_kept,
)
from pipeproof.schedule.formats.schedule_size_checks import Expected
from pipeproof.schedule.kinds import SCHEDULE_KINDS, Request
from pipeproof.schedule.ops import parse_op
from pipeproof.specs.load_plan import load_plan, plan_from_dict
from pipeproof.specs.schedule import ScheduleFileError
from tests.plans import plan_dict, plan_file

FILES = Path(__file__).parent / "files"
TWO = Expected(2, 1, 2)


def refusal(text, expected=TWO, **keywords):
    """(code, line, column, message, help) of each finding."""
    with pytest.raises(ScheduleFileError) as caught:
        read_schedule(text, "s", expected, **keywords)
    return [(f.code, f.location.line, f.location.column, f.message, f.help or "") for f in caught.value.findings]


@pytest.mark.parametrize(
    ("text", "computes_only"),
    [
        ("0F0,0B0\n1F0,1B0\n", True),
        ("rank 0: 0F0 0B0\nrank 1: 1F0 1B0\n", True),
        ("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", False),
        ("rank 0: 0F0 0SEND_F0 WAIT(0SEND_F0)\nrank 1: 1RECV_F0 WAIT(1RECV_F0) 1F0", False),
    ],
)
def test_the_form_follows_from_the_content(text, computes_only):
    schedule = read_schedule(text, "s", TWO)
    assert schedule.computes_only == computes_only
    assert schedule.placement == ((0,), (1,))
    assert schedule.num_micro_batches == 1
    assert schedule.programs[0][0] == parse_op("0F0")
    assert [end.line for end in schedule.ends] == [1, 2]


def test_text_keeps_what_it_declares():
    text = (
        "tensor t: shape=4 dtype=int8\ngroup tp: 0 1\nrank 0: 0F0 0SEND_F0{tensor=0 reads=x} WAIT(0SEND_F0)\n"
        "rank 1: 1RECV_F0 WAIT(1RECV_F0) 1F0"
    )
    schedule = read_schedule(text, "s", TWO)
    assert [tensor.name for tensor in schedule.tensors] == ["t"]
    assert [group.ranks for group in schedule.groups] == [(0, 1)]
    assert (schedule.rows[0][1].tensor, schedule.rows[0][1].reads) == (0, ("x",))


@pytest.mark.parametrize(
    ("text", "column", "attribute"),
    [
        ("rank 0: 0F0 0B0{scale=1/2}\nrank 1: 1F0 1B0", 13, "scale"),
        ("rank 0: 0F0{queue=side} 0B0\nrank 1: 1F0 1B0", 9, "queue"),
        ("rank 0: 0F0 0SEND_F0{range=0..8} WAIT(0SEND_F0)\nrank 1: 1RECV_F0 WAIT(1RECV_F0) 1F0", 13, "range"),
        ("rank 0: 0F0 0B0 0REDUCE_GRAD{reduction=avg}\nrank 1: 1F0 1B0", 17, "reduction"),
    ],
)
def test_an_attribute_that_lowering_would_lose_is_refused(text, column, attribute):
    with pytest.raises(ScheduleFileError) as caught:
        require_attributes_kept(read_schedule(text, "s", TWO))
    (finding,) = caught.value.findings
    assert (finding.code, finding.location.line, finding.location.column) == ("PP133", 1, column)
    assert f"`{attribute}`" in finding.message
    require_attributes_kept(read_schedule(re.sub(r"\{.*?\}", "", text), "s", TWO))


def test_a_transfer_that_gets_its_tensor_from_the_plan_keeps_its_attributes(tmp_path):
    (tmp_path / "s.txt").write_text(
        "rank 0: 0F0 0SEND_F0{reads=a queue=q} WAIT(0SEND_F0) 0RECV_B0 WAIT(0RECV_B0) 0B0\n"
        "rank 1: 1RECV_F0{batch=3} WAIT(1RECV_F0) 1F0 1B0 1SEND_B0{scale=1/2} WAIT(1SEND_B0)\n"
    )
    schedule = {"kind": "file", "path": str(tmp_path / "s.txt"), "num_micro_batches": 1}
    graph = lower_loaded(plan_from_dict(plan_dict(schedule=schedule))).graph
    rows = {str(row.op): row for program in graph.rows() for row in program}
    assert (rows["0SEND_F0"].reads, rows["0SEND_F0"].queue, rows["0SEND_F0"].tensor) == (("a",), "q", 0)
    assert (rows["1RECV_F0"].batch, rows["1SEND_B0"].scale) == (3, "1/2")


@pytest.mark.parametrize(
    ("text", "form", "code", "column"),
    [
        ("0F0,0SEND_F0\n1RECV_F0,1F0", "csv", "PP137", 5),
        ("schedule: {kind: file}", "auto", "PP137", 1),
        ("[[0F0]]", "auto", "PP137", 1),
        ("0F0,0B0\n1F0,1B0", "text", "PP133", 1),
        ("rank 0: 0F0", "csv", "PP132", 1),
    ],
)
def test_another_format_is_refused(text, form, code, column):
    assert refusal(text, format=form)[0][:3] == (code, 1, column)


def test_the_named_format_is_taken():
    schedule = read_schedule("0F0,0B0", "s", Expected(), format="csv-comms")
    assert not schedule.computes_only


@given(st.sampled_from(["gpipe", "1f1b", "interleaved"]), st.integers(1, 4), st.integers(1, 3), st.integers(2, 3))
def test_all_generated_schedules_read_back_and_fits(kind, num_ranks, rounds, num_chunks):
    num_micro_batches = rounds * num_ranks
    num_chunks = min(num_chunks, SCHEDULE_KINDS[kind].max_chunks or num_chunks)
    programs = SCHEDULE_KINDS[kind].generate(Request(num_ranks, num_micro_batches, num_chunks)).programs
    expected = Expected(num_ranks, num_micro_batches, num_ranks * num_chunks)
    csv = "\n".join(",".join(map(str, program)) for program in programs)
    text = "\n".join(f"rank {rank}: {' '.join(map(str, program))}" for rank, program in enumerate(programs))
    for content in (csv, text):
        assert read_schedule(content, "s", expected).programs == programs
    assert custom_schedule([[*map(str, program)] for program in programs], expected).programs == programs


def test_a_generated_schedule_written_out_is_the_same_plan():
    programs = [[*map(str, program)] for program in SCHEDULE_KINDS["1f1b"].generate(Request(2, 4)).programs]
    generated = lower_loaded(plan_from_dict(plan_dict(topology={"tp": 2}))).graph
    custom = plan_dict(topology={"tp": 2}, schedule={"kind": "custom", "programs": programs})
    written = lower_loaded(plan_from_dict(custom)).graph
    assert written.columns.equals(generated.columns)
    assert (written.tensors, written.groups) == (generated.tensors, generated.groups)


NO_FIT = {
    ("", TWO): ("PP131", 1, 1, "", ""),
    (" \n\t\n", TWO): ("PP131", 1, 1, "", ""),
    ("# nothing\ntensor t: shape=4 dtype=int8", TWO): ("PP131", 1, 1, "ranks", ""),
    ("rank 0: 0F0\nrank 1:", TWO): ("PP131", 2, 8, "rank 1", ""),
    ("rank 0: 0F0 0STEP\nrank 1: 1STEP", TWO): ("PP131", 2, 14, "rank 1", ""),
    ("0F0\n0RECV_B0", TWO): ("PP131", 2, 9, "rank 1", ""),
    ("0F0", TWO): ("PP135", 1, 4, "1 rank, and topology.pp is 2", "set topology.pp to 1"),
    ("0F0\n1F0\n2F0", TWO): ("PP135", 3, 1, "3 ranks, and topology.pp is 2", "set topology.pp to 3"),
    ("0F0,0F1\n1F0", TWO): ("PP136", 1, 5, "0F1", "num_micro_batches to 2"),
    ("0F0\n1F0", Expected(2, 3, 2)): ("PP136", 1, 1, "0..0, and schedule.num_micro_batches is 3", "to 1"),
    ("0F0,1B0\n1F0,1F1", Expected(2, 2, 2)): ("PP134", 1, 5, "1B0 is on rank 0, and rank 1 holds stage 1", ""),
    ("1F0,0B0\n1F0,1F1", Expected(2, 2, 2)): ("PP134", 1, 1, "rank 1 holds stage 1", ""),
    ("0F0,2F0\n1F0,3F0", TWO): ("PP139", 1, 5, "stages 0..3, and the plan 2 stages", "num_chunks to 2"),
    ("0F0,2F0\n1F0", TWO): ("PP139", 1, 5, "stages 0..2, and the plan 2 stages", "schedule.placement"),
    ("0F0\n1F0", Expected(2, 1, 4)): ("PP139", 2, 4, "stages 0..1, and the plan 4 stages", "num_chunks to 1"),
    ("0F0\n11F0", TWO): ("PP139", 2, 1, "11F0 is of stage 11, and there are stages 0..1", ""),
    ("0F0\n2F0", Expected(2, 1, 3)): ("PP139", 2, 4, "no rank computes stage 1 of 3", ""),
    ("1F0\n0F0", Expected(2, 1, 2, ((0,), (1,)))): ("PP134", 1, 1, "rank 1 holds stage 1", ""),
    ("0F0\n1F0", Expected(2, 1, 3, ((0, 2), (1,)))): ("PP139", 1, 4, "puts stage 2 on rank 0", ""),
    ("rank 0: 0F0\nrank 1: 1F0 5STEP", TWO): ("PP139", 2, 13, "5STEP is of stage 5", ""),
    ("rank 0: 0F0\nrank 1: 0STEP 1F0", TWO): ("PP134", 2, 9, "0STEP is on rank 1, and rank 0 holds stage 0", ""),
    ("rank 0: 0F0 1STEP\nrank 1: 2F0", Expected(2, 1, 3)): ("PP134", 1, 13, "which no rank computes", ""),
}


@pytest.mark.parametrize("case", NO_FIT, ids=lambda case: case[0].replace("\n", "|") or "empty")
def test_what_does_not_fit_and_where(case):
    code, line, column, fragment, fix = NO_FIT[case]
    found = refusal(*case)[0]
    assert found[:3] == (code, line, column)
    assert fragment in found[3]
    assert fix in found[4]


@pytest.mark.parametrize("text", ["0F0,3F0\n1F0,2F0", "rank 0: 0F0 3F0\nrank 1: 1F0 2F0"])
def test_whatever_placement_the_schedule_has_is_taken_or_held_to_the_one_that_is_listed(text):
    assert read_schedule(text, "s", Expected(2, 1, 4)).placement == ((0, 3), (1, 2))
    assert read_schedule(text, "s", Expected(2, 1, 4, ((0, 3), (1, 2)))).placement == ((0, 3), (1, 2))
    assert {finding[0] for finding in refusal(text, Expected(2, 1, 4, ((0, 2), (1, 3))))} == {"PP134"}


def test_a_rank_may_hold_more_stages_than_another():
    schedule = read_schedule("0F0,2F0\n1F0", "s", Expected(2, 1, 3, ((0, 2), (1,))))
    assert schedule.placement == ((0, 2), (1,))


@pytest.mark.parametrize("kind", ["missing", "directory", "binary", "huge"])
def test_files_that_cannot_be_read(kind, tmp_path, monkeypatch):
    path = tmp_path / "s.csv"
    if kind == "directory":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes(b"0F0,0B0\n1F0,\xff1B0")
    if kind == "huge":
        monkeypatch.setattr("pipeproof.specs.schedule.MAX_BYTES", 10)
    with pytest.raises(ScheduleFileError) as caught:
        load_schedule_file(path, TWO)
    (finding,) = caught.value.findings
    assert finding.code == "PP130"
    expected = {
        "missing": "no such file",
        "directory": "is a directory",
        "binary": "0xff",
        "huge": "more than 10 bytes",
    }
    assert expected[kind] in finding.message
    assert finding.location == (Location(str(path), 2, 5) if kind == "binary" else None)


def test_a_byte_order_mark_does_no_harm(tmp_path):
    path = tmp_path / "s.csv"
    path.write_bytes(b"\xef\xbb\xbf0F0,0B0\r\n1F0,1B0\r\n")
    assert load_schedule_file(path, TWO).computes_only


def test_a_path_counts_from_the_plan(tmp_path):
    (tmp_path / "plans").mkdir()
    (tmp_path / "schedules").mkdir()
    (tmp_path / "schedules" / "zb.csv").write_text((FILES / "zbv_2x2.csv").read_text())
    sections = {"kind": "file", "path": "../schedules/zb.csv", "num_chunks": 2}
    plan = plan_file(tmp_path / "plans" / "plan.json", schedule=sections)
    loaded = load_plan(plan)
    schedule = own_schedule(loaded)
    assert schedule.placement == ((0, 3), (1, 2))
    assert Path(schedule.origins[0].file).resolve() == tmp_path / "schedules" / "zb.csv"


def test_without_a_plan_file_a_path_counts_from_the_working_directory(monkeypatch):
    monkeypatch.chdir(FILES)
    plan = plan_from_dict(plan_dict(schedule={"kind": "file", "path": "zbv_2x2.csv", "num_chunks": 2}))
    assert own_schedule(plan).num_micro_batches == 4


PLAN = """\
pipeproof: 1
model: {kind: gpt, num_layers: 4, hidden_size: 16, num_heads: 4, ffn_size: 32, vocab_size: 32, seq_length: 8}
topology: {pp: 2}
schedule:
  kind: custom
  num_micro_batches: 1
  micro_batch_size: 2
  programs:
    - [0F0, 0SEND_F0, WAIT(0SEND_F0)]
    - [1RECV_F0, WAIT(1RECV_F0), 1F0]
"""


def of_plan(text, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    loaded = load_plan(path)
    return own_schedule(loaded)


def test_programs_in_the_plan_have_their_places(tmp_path):
    schedule = of_plan(PLAN, tmp_path)
    assert not schedule.computes_only
    assert [row.peer for row in schedule.rows[0]] == [-1, 1, -1]
    places = [schedule.origins[row.origin] for rows in schedule.rows for row in rows]
    assert [(place.line, place.column) for place in places] == [(9, 8), (9, 13), (9, 23), (10, 8), (10, 18), (10, 34)]
    with pytest.raises(ScheduleFileError) as caught:
        of_plan(PLAN.replace("1F0]", "1F0x]"), tmp_path)
    (finding,) = caught.value.findings
    assert (finding.code, finding.location.line, finding.location.column) == ("PP132", 10, 34)


def test_what_is_missing_has_its_place_at_the_end_of_the_rank():
    schedule = read_schedule("0F0,0SEND_F0,0RECV_B0,0I0,0W0\n1RECV_F0,1F0,1I0,1SEND_B0,1W0", "s", Expected())
    assert [schedule.missing_place(rank) for rank in (0, 1)] == [Location("s", 1, 30), Location("s", 2, 30)]


def test_programs_made_in_python_have_none():
    schedule = custom_schedule([["0F0", "0B0"], ["1F0", "1B0"]], TWO)
    assert schedule.computes_only
    assert schedule.origins == ()
    assert schedule.missing_place(0) is None
    for wrong in ([["0F0", "0B0x"], ["1F0"]], [["0F0"], []], [["0F0"], ["0F0"]]):
        with pytest.raises(ScheduleFileError) as caught:
            custom_schedule(wrong, TWO)
        assert all(finding.location is None for finding in caught.value.findings)
