"""The text form of whole programs: its meaning, reading back its output, and its refusals with their positions."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.comm.lower import lower
from pipeproof.diagnostics.finding import Location
from pipeproof.schedule.columns import NONE, Row
from pipeproof.schedule.formats.op_text import near_op
from pipeproof.schedule.formats.text_form import format_program, looks_like_program, parse_program
from pipeproof.schedule.op_table import Group, TensorSpec, build_graph
from pipeproof.schedule.ops import (
    AXES,
    COMPUTE_KINDS,
    TRANSFER_KINDS,
    Op,
    OpKind,
    child_of,
    free_of,
    parse_op,
    wait_for,
)
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.specs.schedule import ScheduleFileError
from pipeproof.verify.check_plan import check_graph
from tests.plans import plan_dict

EXAMPLE = """\
# two ranks, one message
tensor hidden: shape=4x8 dtype=float32
tensor "a: b": shape=() dtype=int64 placement=replicated dims="" member=mask
group tp: 0 1 copies=2

rank 0: 0F0{writes=out+"x y"} 0SEND_F0{tensor=0 range=0..16 shift=4 reads=out}
        WAIT(0SEND_F0){queue=side}
   # and so on
        0REDUCE_GRAD:tp 0REDUCE_GRAD:tp/0.ALL_REDUCE:tp{group=0 reduction=avg scale=1/2}
rank 1: 1RECV_F0{tensor=0 communicator=pp batch=3} WAIT(1RECV_F0) 1F0{frees=a}
"""


def test_the_example_means_what_it_says():
    program = parse_program(EXAMPLE, "p.txt")
    assert program.tensors == (
        TensorSpec("hidden", (4, 8), "float32", "invariant", "sb"),
        TensorSpec("a: b", (), "int64", "replicated", "", "mask"),
    )
    assert program.groups == (Group("tp", (0, 1), 2),)
    first, second = program.rows_by_rank
    reduce = parse_op("0REDUCE_GRAD:tp")
    assert [row for row in first if row.op.kind is not OpKind.WAIT] == [
        Row(parse_op("0F0"), writes=("out", "x y"), origin=0),
        Row(parse_op("0SEND_F0"), peer=1, tensor=0, stop=16, shift=4, reads=("out",), origin=1),
        Row(reduce, origin=3),
        Row(child_of(reduce, 0, OpKind.ALL_REDUCE, "tp"), group=0, reduction="avg", scale="1/2", origin=4),
    ]
    assert first[2] == Row(parse_op("WAIT(0SEND_F0)"), queue="side", origin=2)
    assert second[0] == Row(parse_op("1RECV_F0"), peer=0, tensor=0, stop=32, communicator="pp", batch=3, origin=5)
    assert second[2].frees == ("a",)
    assert program.origins[2] == Location("p.txt", 7, 9, 22)
    assert program.ends == (Location("p.txt", 9, 89), Location("p.txt", 10, 79))
    assert program.graph().num_ops == 8


def test_the_example_of_the_page_is_read_and_right():
    page = (Path(__file__).parents[2] / "docs" / "schedules-from-files.md").read_text()
    (block,) = (text for text in re.findall(r"```text\n(.*?)```", page, re.DOTALL) if "rank 0:" in text)
    assert check_graph(parse_program(block).graph()).findings == ()


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)
numbers = st.integers(0, 40)
computes = st.builds(lambda kind, s, m: Op(kind, s, m), st.sampled_from(sorted(COMPUTE_KINDS)), numbers, numbers)
collectives = st.builds(lambda s, a: Op(OpKind.ALL_REDUCE, s, axis=a), numbers, st.sampled_from(AXES))
children = st.builds(
    lambda parent, i, a: child_of(parent, i, OpKind.ALL_GATHER, a), computes, numbers, st.sampled_from(AXES)
)
transfers = st.builds(lambda kind, s, m: Op(kind, s, m), st.sampled_from(sorted(TRANSFER_KINDS)), numbers, numbers)
plain = st.one_of(computes, collectives, children, st.builds(lambda s: Op(OpKind.STEP, s), numbers))
name_lists = st.lists(names, max_size=2).map(tuple)


def cut(op):
    """The operation, of one split of its sequences."""
    target = None if op.target is None else cut(op.target)
    return op._replace(split=None if op.micro_batch is None else op.micro_batch % 3, target=target)


@st.composite
def graphs(draw):
    """Graphs of any rows: nothing in them has to be right."""
    are_cut = draw(st.booleans())
    num_ranks = draw(st.integers(1, 3))
    tensors = []
    for _ in range(draw(st.integers(0, 2))):
        shape = draw(st.lists(st.integers(0, 99), max_size=3).map(tuple))
        strides = draw(st.none() | st.tuples(*[st.integers(0, 99)] * len(shape)))
        dims = draw(st.sampled_from(["", "sbh"[: len(shape)]]))
        placement = draw(st.sampled_from(["invariant", "sharded(1)", "partial"]))
        tensors.append(TensorSpec(draw(names), shape, draw(names), placement, dims, draw(st.just("") | names), strides))
    ranks = st.lists(st.integers(0, num_ranks - 1), min_size=1, unique=True).map(tuple)
    groups = draw(st.lists(st.builds(Group, st.sampled_from(AXES), ranks, st.integers(1, 3)), max_size=2))
    rows = st.builds(
        Row,
        st.one_of(plain, plain.map(wait_for), plain.map(free_of), transfers).map(cut if are_cut else lambda op: op),
        tensor=st.integers(NONE, len(tensors) - 1),
        start=numbers,
        stop=numbers.map(lambda n: n + 40),
        group=st.integers(NONE, len(groups) - 1),
        reduction=st.sampled_from(["", "sum", "max", "avg", "overwrite"]),
        shift=numbers,
        communicator=st.just("") | names,
        queue=st.sampled_from(["", "compute", "host"]) | names,
        batch=st.integers(NONE, 3),
        reads=name_lists,
        writes=name_lists,
        frees=name_lists,
        scale=st.just("") | names,
    )
    with_peer = st.tuples(rows, st.integers(0, num_ranks - 1)).map(
        lambda pair: (
            Row(**{f: getattr(pair[0], f) for f in Row.__slots__} | {"peer": pair[1]})
            if pair[0].op.kind in TRANSFER_KINDS
            else pair[0]
        )
    )
    return build_graph([draw(st.lists(with_peer, max_size=4)) for _ in range(num_ranks)], tensors, groups)


@given(graphs())
def test_any_graph_reads_back_the_same(graph):
    text = format_program(graph)
    program = parse_program(text)
    again = program.graph()
    assert (again.tensors, again.groups) == (graph.tensors, graph.groups)
    assert again.columns.equals(graph.columns)
    assert format_program(again) == text


def test_a_lowered_plan_reads_back_the_same():
    sections = {"topology": {"pp": 2, "tp": 2, "sequence_parallel": True}, "transport": "full"}
    graph = lower(plan_from_dict(plan_dict(**sections)).spec).graph
    again = parse_program(format_program(graph)).graph()
    assert again.columns.equals(graph.columns)
    assert (again.tensors, again.groups) == (graph.tensors, graph.groups)


def test_ranks_that_stand_for_others_are_not_written():
    plan = plan_dict(topology={"pp": 2, "dp": 64}, schedule={"num_micro_batches": 128})
    lowered = lower(plan_from_dict(plan).spec)
    assert lowered.folded
    with pytest.raises(ValueError, match="unfolded"):
        format_program(lowered.graph)


BAD = {
    # operations
    "rank 0: 0F0xyz 0B0": ("PP132", 1, 9, "did you mean `0F0`?"),
    "rank 0: 0F0 0f1": ("PP132", 1, 13, "did you mean `0F1`?"),
    "rank 0:\t0SENDF1": ("PP132", 1, 9, "did you mean `0SEND_F1`?"),
    "rank 0: 0F0, 0F1": ("PP132", 1, 9, "did you mean `0F0`?"),
    "rank 0: wait(0F0)": ("PP132", 1, 9, "did you mean `WAIT(0F0)`?"),
    "rank 0: hello": ("PP132", 1, 9, "operations look like"),
    "rank 0: 0F1000001": ("PP132", 1, 9, None),
    "rank 0: WAIT(9000000F0)": ("PP132", 1, 9, None),
    "rank 0: 0F0\n   0G0": ("PP132", 2, 4, "operations look like"),
    # lines
    "rank 1: 0F0": ("PP133", 1, 6, "in order from 0"),
    "rank 0: 0F0\nrank 0: 0F1": ("PP133", 2, 6, "in order from 0"),
    "rnak 0: 0F0": ("PP133", 1, 1, "did you mean `rank ...:`?"),
    "rank 0 0F0": ("PP133", 1, 1, "did you mean `rank ...:`?"),
    "  0F0": ("PP133", 1, 3, "lines begin with"),
    "rank 0: 0F0\n0F1": ("PP133", 2, 1, "lines begin with"),
    # attributes
    "rank 0: 0F0{que=side}": ("PP133", 1, 13, "did you mean `queue`?"),
    "rank 0: 0F0{zzz=1}": ("PP133", 1, 13, "keys here: peer, tensor"),
    "rank 0: 0F0{batch=1 batch=1}": ("PP133", 1, 21, None),
    "rank 0: 0F0{batch=-1}": ("PP133", 1, 13, "`batch=0`"),
    "rank 0: 0F0{batch=01}": ("PP133", 1, 13, "`batch=0`"),
    f"rank 0: 0F0{{batch={2**63}}}": ("PP133", 1, 13, "`batch=0`"),
    "rank 0: 0F0{range=8..0}": ("PP133", 1, 13, "`range=0..8`"),
    "rank 0: 0F0{range=8}": ("PP133", 1, 13, "`range=0..8`"),
    "rank 0: 0F0{reads=a+}": ("PP133", 1, 13, "`reads=a+b`"),
    'rank 0: 0F0{reads="a"b}': ("PP133", 1, 13, "`reads=a+b`"),
    "rank 0: 0F0{reduction=mean}": ("PP133", 1, 13, "`reduction=avg`"),
    "rank 0: 0F0{batch}": ("PP133", 1, 13, "keys here"),
    "rank 0: 0F0 {batch=1}": ("PP133", 1, 13, None),
    "rank 0: 0F0{batch=1": ("PP133", 1, 9, None),
    "rank 0: 0F0{batch=1}0F1": ("PP133", 1, 9, None),
    "rank 0: 0F0{peer=0}": ("PP133", 1, 9, "remove `peer`"),
    "rank 0: 0F0{tensor=0}": ("PP133", 1, 13, None),
    "rank 0: 0F0{group=0}": ("PP133", 1, 13, None),
    "rank 0: 0SEND_F0{peer=1}": ("PP133", 1, 18, None),
    # declarations
    "tensor a: shape=4 dtype=int8 shape=4": ("PP133", 1, 30, None),
    "tensor a: shape=4": ("PP133", 1, 8, "dtype=float32"),
    "tensor a: shape=4x dtype=int8": ("PP133", 1, 11, "`shape=4x8`"),
    "tensor a: shape=4 dtype=int8 dims=sb": ("PP133", 1, 8, None),
    "tensor a: shape=4 dtype=int8 strides=4x1": ("PP133", 1, 8, None),
    "tensor a: shape=4 dtype=int8 placement=sharded": ("PP133", 1, 30, "`placement=sharded(0)`"),
    "tensor a: shape=4 dtyp=int8": ("PP133", 1, 19, "did you mean `dtype`?"),
    'tensor "a\\x": shape=4 dtype=int8': ("PP133", 1, 8, None),
    "group xp: 0": ("PP133", 1, 7, "axes are"),
    "group TP: 0": ("PP133", 1, 7, "did you mean `tp`?"),
    "group tp: 0 one": ("PP133", 1, 10, "`group tp: 0 1`"),
    "group tp: 0 copies=0\nrank 0: 0F0": ("PP133", 1, 13, "`copies=4`"),
    "group tp: 0 0\nrank 0: 0F0": ("PP133", 1, 7, None),
    "group tp:\nrank 0: 0F0": ("PP133", 1, 7, None),
    "group tp: 0 1\nrank 0: 0F0": ("PP133", 1, 7, None),
    "": ("PP131", 1, 1, "rank 0:"),
    "\n# nothing\ntensor a: shape=4 dtype=int8": ("PP131", 1, 1, "rank 0:"),
    # other ends
    "rank 0: 0F0 0SEND_F0": ("PP138", 1, 13, "{peer=1}"),
    "rank 0: 0F0 0SEND_F0 1F0": ("PP138", 1, 13, "remove it"),
    "rank 0: 0F0 0SEND_F0\nrank 1: 1F0\nrank 2: 1F0": ("PP138", 1, 13, "{peer=1}"),
}


@pytest.mark.parametrize("text", BAD, ids=lambda text: text.replace("\n", "|"))
def test_what_is_refused_and_where(text):
    code, line, column, fix = BAD[text]
    with pytest.raises(ScheduleFileError) as caught:
        parse_program(text, "p.txt")
    found = caught.value.findings[0]
    assert (found.code, found.location.file, found.location.line, found.location.column) == (
        code,
        "p.txt",
        line,
        column,
    )
    assert fix is None or fix in found.help


def test_all_findings_come_at_once_in_the_order_of_the_file():
    with pytest.raises(ScheduleFileError) as caught:
        parse_program("rank 0: 0F0{que=1} 0X0 0F1{tensor=7}\nrank 2: 0Y0")
    places = [(f.code, f.location.line, f.location.column) for f in caught.value.findings]
    assert places == [("PP133", 1, 13), ("PP132", 1, 20), ("PP133", 1, 28), ("PP133", 2, 6), ("PP132", 2, 9)]


def test_what_names_a_tensor_that_could_not_be_read_is_not_blamed():
    with pytest.raises(ScheduleFileError) as caught:
        parse_program("tensor a: shape=4\nrank 0: 0F0{tensor=0}")
    assert [f.location.line for f in caught.value.findings] == [1]


def test_a_file_of_nonsense_is_not_read_to_its_end():
    with pytest.raises(ScheduleFileError) as caught:
        parse_program("rank 0: " + "x " * 1000)
    assert len(caught.value.findings) == 50


@pytest.mark.parametrize(
    ("program", "peers"),
    [
        ("rank 0: 0F0 0SEND_F0 0RECV_B0\nrank 1: 1RECV_F0 1F0 1SEND_B0", [[1, 1], [0, 0]]),
        ("rank 0: 0SEND_META_F0 0SEND_F0\nrank 1: 1RECV_META_F0 1RECV_F0", [[1, 1], [0, 0]]),  # transfers alone
        ("rank 0: 1F0 1SEND_B0 1RECV_F0\nrank 1: 0F0 0RECV_B0 0SEND_F0", [[1, 1], [0, 0]]),
        ("rank 0: 0F0 0SEND_F0{peer=2}\nrank 1: 1F0\nrank 2: 1RECV_F0{peer=0}", [[2], [], [0]]),
    ],
)
def test_peers_follow_from_the_stages(program, peers):
    rows = parse_program(program).rows_by_rank
    assert [[row.peer for row in mine if row.op.kind in TRANSFER_KINDS] for mine in rows] == peers


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("2f0", "2F0"), ("02F0", "2F0"), ("2F00", "2F0"), ("2F0;", "2F0"), ("2 F 0", "2F0"), ("2F0F1", "2F0"),
        ("2FORWARD0", "2F0"), ("3RecvB1", "3RECV_B1"), ("3send_f_1", "3SEND_F1"), ("2STEP0", "2STEP"),
        ("WAIT(2f0)", "WAIT(2F0)"), ("WAIT(2F0", "WAIT(2F0)"), ("free(2sendf0)", "FREE(2SEND_F0)"),
        ("2reduce_grad:dp", "2REDUCE_GRAD:dp"), ("F0", None), ("", None), ("2Q0", None), ("WAIT()", None),
    ],
)  # fmt: skip
def test_what_was_probably_meant(text, meant):
    assert near_op(text) == meant


def test_a_program_is_known_by_its_first_word():
    assert looks_like_program("\n# a\n  rank 0: 0F0")
    assert looks_like_program("tensor x: shape=4 dtype=int8")
    assert not looks_like_program("0F0,0F1\nrank 0: 0F0")
    assert not looks_like_program("\n\n")


@given(
    st.text(max_size=80) | st.lists(st.sampled_from([*'{}=+":0 \n#', "rank", "0F0", "tensor", "a", ".."])).map("".join)
)
def test_any_text_is_read_or_refused_with_places(text):
    try:
        parse_program(text)
    except ScheduleFileError as error:
        lines = re.split("\r\n|[\n\r\x85\u2028\u2029]", text)
        for finding in error.findings:
            assert 1 <= finding.location.column <= len(lines[finding.location.line - 1]) + 1
