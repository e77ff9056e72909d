"""PyTorch's CSV: its own files, the work of its runtime on them, and refusals with their positions."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.schedule.formats.read_schedule import read_schedule
from pipeproof.schedule.formats.schedule_size_checks import Expected
from pipeproof.schedule.op_table import NONE, build_graph
from pipeproof.schedule.ops import COMPUTE_KINDS, RECV_KINDS, SEND_KINDS, TRANSFER_KINDS, OpKind, parse_op, wait_for
from pipeproof.specs.schedule import ScheduleFileError
from pipeproof.verify.check_plan import check_graph

FILES = Path(__file__).parent / "files"
NAMES = sorted(path.stem for path in FILES.glob("*.csv") if not path.stem.endswith("_comms"))
TEXT = {path.stem: path.read_text() for path in FILES.glob("*.csv")}


ANY = Expected()


def read(text, expected=ANY, **keywords):
    return read_schedule(text, "s.csv", expected, **keywords)


def errors(text, expected=ANY):
    """(code, (line, column)) of the errors of a file, from the reader or from the rules that need no plan."""
    try:
        schedule = read(text, expected)
    except ScheduleFileError as error:
        findings = error.findings
    else:
        report = check_graph(build_graph(schedule.rows, (), ()), origins=schedule.origins)
        findings = report.errors
    return [(f.code, f.location and (f.location.line, f.location.column)) for f in findings]


def test_there_are_the_files_that_matter():
    assert NAMES == ["dualpipe_v_4x2", "interleaved_4x2", "zbv_2x2", "zero_bubble_2x2"]
    assert len(TEXT) == 2 * len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_both_formats_compute_the_same(name):
    plain, full = read(TEXT[name]), read(TEXT[f"{name}_comms"])
    assert plain.computes_only
    assert not full.computes_only
    assert plain.programs == full.programs
    assert plain.placement == full.placement
    assert plain.num_micro_batches == full.num_micro_batches == int({"d": 10, "i": 8, "z": 4}[name[0]])
    ranks, chunks = map(int, name.rpartition("_")[2].split("x"))
    assert [len(stages) for stages in plain.placement] == [chunks] * ranks
    pairs = [[row.batch for row in rows if row.batch != NONE] for rows in plain.rows]
    assert pairs == [[row.batch for row in rows if row.batch != NONE] for rows in full.rows]
    assert any(pairs) == (name == "dualpipe_v_4x2")


@pytest.mark.parametrize("name", TEXT)
def test_every_operation_has_its_place(name):
    schedule, lines = read(TEXT[name]), TEXT[name].splitlines()
    seen = set()
    for rank, rows in enumerate(schedule.rows):
        for row in rows:
            place = schedule.origins[row.origin]
            assert place.line == rank + 1
            if row.op.kind is not OpKind.WAIT:
                assert lines[rank][place.column - 1 : place.end_column] == str(row.op)
                seen.add((place.line, place.column))
    assert len(seen) == len(re.findall(r"\d[A-Z]", TEXT[name]))
    assert [end.column for end in schedule.ends] == [len(line) + 1 for line in lines]
    assert schedule.missing_place(1).line == 2


@pytest.mark.parametrize("name", NAMES)
def test_files_with_communication_pass(name):
    schedule = read(TEXT[f"{name}_comms"])
    assert check_graph(build_graph(schedule.rows, (), ())).findings == ()


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_what_the_runtime_does(name):
    for rank, rows in enumerate(read(TEXT[f"{name}_comms"]).rows):
        ops = [row.op for row in rows]
        waited = {op.target: i for i, op in enumerate(ops) if op.kind is OpKind.WAIT and rows[i].queue != "unshard"}
        sends = [op for op in ops if op.kind in SEND_KINDS]
        at_end = [row.op for row in rows if row.queue != "unshard"][-len(sends) :]
        assert at_end == [wait_for(op) for op in reversed(sends)]
        for i, row in enumerate(rows):
            if row.op.kind in RECV_KINDS:  # waited for before its consumer, and nothing computes between
                users = {"F": ("F",), "B": ("B", "I")}[row.op.kind[-1]]
                own = [
                    j
                    for j, op in enumerate(ops)
                    if str(op) in {f"{row.op.stage}{u}{row.op.micro_batch}" for u in users}
                ]
                wait = waited[row.op]
                assert i < wait < own[0]
                between = [op for op in ops[wait : own[0]] if op.kind is not OpKind.WAIT]
                assert all(rows[ops.index(op)].batch == rows[own[0]].batch != NONE for op in between)
            if row.op.kind in TRANSFER_KINDS:
                assert row.communicator == "pp"
                assert row.batch == NONE
                assert row.peer != rank
        first = {op.stage: i for i, op in reversed([*enumerate(ops)]) if op.kind in COMPUTE_KINDS}
        for stage, i in first.items():
            assert ops.index(parse_op(f"{stage}UNSHARD")) < waited[parse_op(f"{stage}UNSHARD")] < i


def test_weights_that_were_given_up_are_gathered_after_that():
    (rows,) = read("0UNSHARD,0F0,0RESHARD,0UNSHARD,0B0,0REDUCE_GRAD,0RESHARD").rows
    assert [(str(row.op), row.queue) for row in rows] == [
        ("0UNSHARD", "unshard"), ("WAIT(0UNSHARD)", ""), ("0F0", ""), ("0RESHARD", ""),
        ("WAIT(0RESHARD)", "unshard"), ("0UNSHARD", "unshard"), ("WAIT(0UNSHARD)", ""), ("0B0", ""),
        ("0REDUCE_GRAD", ""), ("0RESHARD", ""), ("WAIT(0RESHARD)", "unshard"),
    ]  # fmt: skip


def test_an_overlapped_pair_waits_for_both_inputs_first():
    first = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1"
    text = f"{first}\n1RECV_F0,1F0,1RECV_F1,(1F1;1B0)OVERLAP_F_B,1SEND_B0,1B1,1SEND_B1"
    rows = read(text).rows[1]
    texts = [str(row.op) for row in rows]
    assert texts[3:8] == ["1RECV_F1", "WAIT(1RECV_F1)", "1F1", "1B0", "1SEND_B0"]
    assert [row.batch for row in rows[5:8]] == [0, 0, NONE]
    assert errors(text) == []


def cells(name):
    return [line.split(",") for line in TEXT[name].splitlines()]


def joined(lines):
    return "\n".join(map(",".join, lines))


def column(lines, rank, index):
    return 1 + sum(len(cell) + 1 for cell in lines[rank][:index])


def sizes(name):
    schedule = read(TEXT[name])
    placement = schedule.placement
    return Expected(len(placement), schedule.num_micro_batches, sum(map(len, placement)))


SLIPS = {
    "letter": lambda cell: re.sub(r"(?<=\d)[A-Z]", lambda m: m[0].lower(), cell, count=1),
    "tail": lambda cell: cell + "x",
    "gap": lambda cell: cell.replace("_", "", 1) if "_" in cell else cell[0] + "_" + cell[1:],
    "zero": lambda cell: re.sub(r"\d", r"0\g<0>", cell, count=1),
}


@pytest.mark.slow(
    only=[
        "interleaved_4x2_comms-letter",
        "interleaved_4x2_comms-zero",
        "interleaved_4x2_comms-gap",
        "dualpipe_v_4x2_comms-zero",
        "dualpipe_v_4x2_comms-letter",
        "dualpipe_v_4x2_comms-gap",
    ]
)
@pytest.mark.parametrize("slip", SLIPS)
@pytest.mark.parametrize("name", TEXT)
def test_a_misspelt_operation_is_an_error_at_its_place(name, slip):
    for rank, line in enumerate(cells(name)):
        for index, cell in enumerate(line):
            if cell and index % 4 == rank % 4:  # every fourth is enough to tell
                lines = cells(name)
                lines[rank][index] = SLIPS[slip](cell)
                (finding, *_) = errors(joined(lines))
                start = column(lines, rank, index)
                assert finding[0] == "PP132"
                assert finding[1] in ((rank + 1, start), (rank + 1, start + 1))  # behind the bracket of a pair


@pytest.mark.parametrize("name", NAMES)
def test_an_operation_of_another_stage_or_micro_batch_is_an_error_at_its_place(name):
    for rank, other in ((0, 1), (1, 0)):
        lines = cells(name)
        index = next(i for i, cell in enumerate(lines[rank]) if re.fullmatch(r"\dF[1-9]", cell))
        stage, micro_batch = lines[rank][index].split("F")
        wrong_stage = next(cell for cell in lines[other] if cell)[0]
        for changed, code in (
            (f"{wrong_stage}F{micro_batch}", "PP134"),
            (f"{stage}F{micro_batch}7", "PP136"),
            (f"9{stage}F{micro_batch}", "PP139"),
        ):
            lines[rank][index] = changed
            assert errors(joined(lines), sizes(name)) == [(code, (rank + 1, column(lines, rank, index)))]


@pytest.mark.parametrize("name", NAMES)
def test_a_doubled_operation_is_an_error_at_its_place(name):
    name = f"{name}_comms"
    for rank, kind in ((0, "SEND_F"), (1, "RECV_F"), (1, "F"), (0, "RECV_B")):
        lines = cells(name)
        index = next(i for i, cell in enumerate(lines[rank]) if re.fullmatch(rf"\d{kind}\d", cell))
        lines[rank].insert(index, lines[rank][index])
        places = {place for _, place in errors(joined(lines), sizes(name))}
        assert places & {(rank + 1, column(lines, rank, index)), (rank + 1, column(lines, rank, index + 1))}


@pytest.mark.parametrize("name", NAMES)
def test_a_deleted_transfer_is_an_error_on_its_channel(name):
    name = f"{name}_comms"
    for rank, kind in ((0, "SEND_F"), (1, "RECV_F"), (1, "SEND_B"), (0, "RECV_B")):
        lines = cells(name)
        index = next(i for i, cell in enumerate(lines[rank]) if re.fullmatch(rf"\d{kind}\d", cell))
        del lines[rank][index]
        found = errors(joined(lines), sizes(name))
        assert "PP301" in {code for code, _ in found}
        assert all(place is not None for _, place in found)


@pytest.mark.parametrize("name", NAMES)
def test_two_swapped_receives_are_an_error_that_shows_them(name):
    lines = cells(f"{name}_comms")
    first, second = [i for i, cell in enumerate(lines[1]) if re.fullmatch(r"1RECV_F\d", cell)][:2]
    lines[1][first], lines[1][second] = lines[1][second], lines[1][first]
    schedule = read(joined(lines))
    graph = build_graph(schedule.rows, (), ())
    findings = [f for f in check_graph(graph, origins=schedule.origins).findings if f.code == "PP302"]
    shown = {schedule.origins[graph.origin[op.op_id]] for f in findings for op in f.witness.ops if op.op_id is not None}
    places = {(place.line, place.column) for place in shown}
    assert {(2, column(lines, 1, first)), (2, column(lines, 1, second))} <= places


@pytest.mark.parametrize("name", NAMES)
def test_a_forward_before_its_receive_is_an_error_at_its_place(name):
    name = f"{name}_comms"
    lines = cells(name)
    index = lines[1].index("1RECV_F0")
    user = lines[1].index("1F0")
    lines[1][index], lines[1][user] = lines[1][user], lines[1][index]
    places = {place for _, place in errors(joined(lines), sizes(name))}
    assert places & {(2, column(lines, 1, index)), (2, column(lines, 1, user))}


BAD = {
    "0F0,0F": ("PP132", 1, 5, "operations look like"),
    "0F0,0B0x": ("PP132", 1, 5, "did you mean `0B0`?"),
    "0F0,0STEP": ("PP132", 1, 5, "text form"),
    "0F0,WAIT(0F0)": ("PP132", 1, 5, "text form"),
    "0F0,0REDUCE_GRAD:dp": ("PP132", 1, 5, "text form"),
    "0F0,0SEND_META_F0": ("PP132", 1, 5, "text form"),
    "0F0,0UNSHARD3": ("PP132", 1, 5, "did you mean `0UNSHARD`?"),
    "0F0,(0F1;0B0)OVERLAP": ("PP132", 1, 5, "(0F7;7B3)OVERLAP_F_B"),
    "0F0,(0F1)OVERLAP_F_B": ("PP132", 1, 5, "(0F7;7B3)OVERLAP_F_B"),
    "0F0,(0F1;0B0;0F2)OVERLAP_F_B": ("PP132", 1, 5, "(0F7;7B3)OVERLAP_F_B"),
    "0F0,0F1;0B0)OVERLAP_F_B": ("PP132", 1, 5, "(0F7;7B3)OVERLAP_F_B"),
    "0F0,(0F1; 0b0)OVERLAP_F_B": ("PP132", 1, 11, "did you mean `0B0`?"),
    "0F0,(0F1;0F2)OVERLAP_F_B": ("PP132", 1, 5, "only such pairs"),
    "0F0,(0B0;0F1)OVERLAP_F_B": ("PP132", 1, 5, "only such pairs"),
    "0F0,(0F1;0W0)OVERLAP_F_B": ("PP132", 1, 5, "only such pairs"),
    '0F0,"0B0': ("PP132", 1, 5, None),
    "0F0,  0b0  ,0F1": ("PP132", 1, 7, "did you mean `0B0`?"),
    "0F0\n\n1F0": ("PP131", 2, 1, None),
    "0F0\n,,,\n1F0": ("PP131", 2, 1, None),
    "0F0,0SEND_F0,\n1RECV_F0,1F0": ("PP132", 1, 14, "order of issue"),
    "0F0,,0SEND_F0\n1RECV_F0,1F0": ("PP132", 1, 5, "order of issue"),
    "0F0,0SEND_B0\n1F0": ("PP138", 1, 5, None),
    "0F0,0SEND_F0,1F0": ("PP138", 1, 5, "remove it"),
    "0F0,1SEND_F0\n1RECV_F0,1F0": ("PP134", 1, 5, None),
    "0F0,2UNSHARD\n1F0": ("PP139", 1, 5, None),
}


@pytest.mark.parametrize("text", BAD, ids=lambda text: text.replace("\n", "|"))
def test_what_is_refused_and_where(text):
    code, line, at, fix = BAD[text]
    with pytest.raises(ScheduleFileError) as caught:
        read(text)
    found = caught.value.findings[0]
    assert (found.code, found.location.line, found.location.column) == (code, line, at)
    assert fix is None or fix in found.help


@pytest.mark.parametrize("text", ["0F0, 0B0 \n", "0F0,0B0\r\n\r\n", '"0F0",0B0', ",0F0,,0B0,", "0F0,0B0\n \t\n"])
def test_what_pytorch_reads_as_well(text):
    assert [str(op) for op in read(text).programs[0]] == ["0F0", "0B0"]


CELLS = ["0F0", "1B2", "", "(0F1;1B0)OVERLAP_F_B", "3SEND_F1", "x", '"', " ", ";"]


def test_blanks_in_a_pair_are_pytorchs_too():
    (rows,) = read("0F0,( 0F1 ; 0B0 )OVERLAP_F_B,0B1").rows
    assert [(str(row.op), row.batch) for row in rows] == [("0F0", NONE), ("0F1", 0), ("0B0", 0), ("0B1", NONE)]


@given(st.lists(st.lists(st.sampled_from(CELLS), max_size=6), max_size=3), st.sampled_from(["csv-comms", "csv"]))
def test_any_text_is_read_or_refused_with_places_in_it(lines, form):
    text = joined(lines)
    try:
        read(text, format=form)
    except ScheduleFileError as error:
        lengths = [len(line) for line in text.split("\n")]
        places = [finding.location for finding in error.findings]
        assert all(1 <= place.column <= lengths[place.line - 1] + 1 for place in places)
