"""PP144: which attributes a row may have, wherever the row comes from."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.schedule.columns import REDUCTIONS, Row
from pipeproof.schedule.formats.text_form import format_program, parse_program
from pipeproof.schedule.formats.text_tokens import ROW_KEYS
from pipeproof.schedule.op_table import Group, TensorSpec, build_graph
from pipeproof.schedule.ops import (
    CHILD_KINDS,
    KINDS,
    PART_KINDS,
    TARGET_KINDS,
    TRANSFER_KINDS,
    UPDATE_KINDS,
    Op,
    OpKind,
    child_of,
    parse_op,
    part_of,
)
from pipeproof.specs.load_plan import load_plan
from pipeproof.verify.attribute_rule import ATTRIBUTES, RULES, TABLE
from pipeproof.verify.check_plan import check_graph, check_subject
from pipeproof.verify.subject import graph_subject, make_subject, program_subject
from tests.plans import plan_dict, subject

STAGE_OPS = frozenset({OpKind.STEP, OpKind.UNSHARD, OpKind.RESHARD, OpKind.SCALE_GRAD})
(RULE,) = RULES


def refused(text):
    """(operation, message) of each finding of the rule."""
    return findings(program_subject(text))


def findings(subject):
    return [(str(f.witness.ops[0].op), f.message) for f in RULE.check(subject)]


@pytest.mark.parametrize(
    ("wrong", "op", "attribute"),
    [
        ("rank 0: 0F0{reduction=overwrite} 0B0", "0F0", "reduction=overwrite"),
        ("rank 0: 0F0 0B0{reduction=max}", "0B0", "reduction=max"),
        ("rank 0: 0F0 0B0{reduction=sum}", "0B0", "reduction=sum"),
        ("rank 0: 0F0 0I0{reduction=overwrite} 0W0", "0I0", "reduction=overwrite"),
        ("rank 0: 0F0 0B0 0STEP{scale=1/2}", "0STEP", "scale=1/2"),
        ("rank 0: 0F0 0B0 WAIT(0B0){scale=2}", "WAIT(0B0)", "scale=2"),
        ("rank 0: 0F0 0B0 WAIT(0B0){batch=1}", "WAIT(0B0)", "batch=1"),
        ("rank 0: 0F0 0B0 WAIT(0B0){reads=x}", "WAIT(0B0)", "reads=x"),
        ("rank 0: 0F0 0B0 FREE(0F0){writes=x}", "FREE(0F0)", "writes=x"),
        ("rank 0: 0F0{communicator=pp} 0B0", "0F0", "communicator=pp"),
        ("group dp: 0\nrank 0: 0F0 0B0{group=0}", "0B0", "group=0"),
        ("group dp: 0\nrank 0: 0F0 0F0/0.ALL_REDUCE:dp{group=0 reduction=sum scale=2} 0B0",
         "0F0/0.ALL_REDUCE:dp", "scale=2"),
        ("group dp: 0\nrank 0: 0F0 0B0 0ALL_REDUCE:dp{group=0 scale=2}", "0ALL_REDUCE:dp", "scale=2"),
        ("group dp: 0\nrank 0: 0F0 0F0/0.ALL_GATHER:dp{group=0 reduction=max} 0B0",
         "0F0/0.ALL_GATHER:dp", "reduction=max"),
        ("group dp: 0\nrank 0: 0F0 0B0 0ALL_GATHER:dp{group=0 shift=8}", "0ALL_GATHER:dp", "shift=8"),
        ("group dp: 0\nrank 0: 0F0 0B0 0REDUCE_GRAD:dp{reduction=avg} 0REDUCE_GRAD:dp/0.ALL_REDUCE:dp{group=0} 0STEP",
         "0REDUCE_GRAD:dp", "reduction=avg"),
        ("group dp: 0\nrank 0: 0F0 0B0 0STEP 0GATHER_WEIGHT:dp{group=0}", "0GATHER_WEIGHT:dp", "group=0"),
    ],
)  # fmt: skip
def test_an_attribute_without_a_meaning_is_refused_at_its_row(wrong, op, attribute):
    ((at, message),) = refused(wrong)
    assert at == op
    assert f"`{attribute}`" in message


@pytest.mark.parametrize(
    ("attribute", "op"),
    [("reduction=max", "0SEND_F0"), ("scale=2", "0SEND_F0"), ("scale=2", "1RECV_F0"), ("group=0", "1RECV_F0")],
)
def test_an_attribute_of_a_transfer(attribute, op):
    text = "group pp: 0 1\nrank 0: 0F0 0SEND_F0 WAIT(0SEND_F0)\nrank 1: 1RECV_F0 WAIT(1RECV_F0) 1F0"
    assert refused(text) == []
    ((at, message),) = refused(text.replace(f" {op} ", f" {op}{{{attribute}}} "))
    assert at == op
    assert f"`{attribute}`" in message


@pytest.mark.parametrize(
    "right",
    [
        "rank 0: 0F0{scale=1/2 writes=x} 0B0{reduction=overwrite scale=2 reads=x frees=x} 0STEP",
        "rank 0: 0F0 0I0{scale=2} 0W0{reduction=overwrite scale=1/2} 0SCALE_GRAD{scale=2} 0STEP{reads=g}",
        (
            "group dp: 0\nrank 0: 0F0 0B0 0REDUCE_GRAD:dp{scale=1/2} "
            "0REDUCE_GRAD:dp/0.ALL_REDUCE:dp{group=0 reduction=avg scale=2} 0STEP"
        ),
        "group dp: 0\nrank 0: 0F0 0B0 0REDUCE_GRAD:dp{group=0 reduction=avg scale=1/2} 0STEP",
        (
            "rank 0: 0F0{batch=0} 0SEND_F0{batch=1 reads=x queue=a communicator=pp} WAIT(0SEND_F0){queue=host}\n"
            "rank 1: 1RECV_F0{writes=x communicator=pp queue=a} WAIT(1RECV_F0) 1F0"
        ),
    ],
)
def test_what_has_a_meaning_is_accepted(right):
    assert refused(right) == []


def test_rows_made_in_python():
    rows = [[Row(parse_op("0F0"), peer=0), Row(parse_op("0B0"), tensor=0, start=0, stop=4, shift=2)]]
    graph = build_graph(rows, [TensorSpec("t", (4,), "float32", "invariant", "s")], [])
    report = check_graph(graph)
    assert [(f.code, str(f.witness.ops[0].op)) for f in report.errors] == [
        ("PP144", "0F0"), ("PP144", "0B0"), ("PP144", "0B0"), ("PP144", "0B0"),
    ]  # fmt: skip


CSV = "0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD"
TEXT = """
rank 0: 0F0 0SEND_F0 WAIT(0SEND_F0) 0RECV_B0 WAIT(0RECV_B0) 0B0
rank 1: 1RECV_F0 WAIT(1RECV_F0) 1F0 1B0 1SEND_B0 WAIT(1SEND_B0)
"""


def of_file(tmp_path, text):
    """A plan whose schedule is read from a file."""
    (tmp_path / "s").write_text(text)
    return subject(schedule={"kind": "file", "path": str(tmp_path / "s"), "num_micro_batches": 1})


def edited(one, name, **attributes):
    """The same subject with attributes on the rows of one operation."""
    rows = one.graph.rows()
    for program in rows:
        program[:] = [dataclasses.replace(row, **attributes) if str(row.op) == name else row for row in program]
    return one.with_graph(build_graph(rows, one.graph.tensors, one.graph.groups))


@pytest.mark.parametrize(
    "make",
    [
        lambda path: of_file(path, CSV),
        lambda path: of_file(path, TEXT),
        lambda path: subject(schedule={"kind": "custom", "programs": [["0F0", "0B0"], ["1F0", "1B0"]],
                                       "num_micro_batches": 1}),
        lambda path: load_plan_of_json(path),
        lambda path: subject(topology={"tp": 2, "dp": 2, "sequence_parallel": True}, run={"clip_norm": 1.0}),
        lambda path: subject(topology={"tp": 2}, transport={"forward": "partial", "backward": "partial"}),
        lambda path: subject(topology={"dp": 2}, memory={"shard_optimizer": "dp"}),
        lambda path: subject(topology={"dp": 2}, schedule={"reduce_gradients": "when_ready"}),
    ],
    ids=["csv", "text", "custom", "json", "sequence parallel", "partial", "sharded", "when ready"],
)  # fmt: skip
def test_rows_of_plans_from_every_source(make, tmp_path):
    one = make(tmp_path)
    assert findings(one) == []
    assert [op for op, _ in findings(edited(one, "1F0", reduction="sum"))] == ["1F0"]


def test_a_finding_in_a_schedule_file_is_at_its_row(tmp_path):
    report = check_subject(of_file(tmp_path, TEXT.replace("0SEND_F0 ", "0SEND_F0{scale=2} ", 1)))
    (found,) = report.errors
    assert (found.code, found.location.line, found.location.column) == ("PP144", 2, 13)


def load_plan_of_json(path):
    """A plan that is read from a JSON file."""
    (path / "plan.json").write_text(json.dumps(plan_dict()))
    return make_subject(load_plan(path / "plan.json"))


PARENTS = {
    OpKind.FORWARD: "0F0", OpKind.BACKWARD: "0B0", OpKind.BACKWARD_INPUT: "0I0", OpKind.BACKWARD_WEIGHT: "0W0",
    OpKind.REDUCE_GRAD: "0REDUCE_GRAD:dp", OpKind.GATHER_WEIGHT: "0GATHER_WEIGHT:dp",
}  # fmt: skip
VALUES = {
    "peer": {"peer": 1}, "tensor": {"tensor": 0}, "range": {"start": 1, "stop": 3}, "shift": {"shift": 2},
    "group": {"group": 0}, "batch": {"batch": 0}, "queue": {"queue": "q"}, "communicator": {"communicator": "c"},
    "scale": {"scale": "1/2"}, "reads": {"reads": ("a",)}, "writes": {"writes": ("a",)}, "frees": {"frees": ("a",)},
}  # fmt: skip


def an_op(kind, below):
    """An operation of a kind, below another where that is named."""
    if kind in TARGET_KINDS:
        return Op(kind, 0, 0, target=parse_op("0F0"))
    if below:
        return child_of(parse_op(PARENTS[OpKind(below)]), 0, kind, "dp")
    if kind in PART_KINDS:
        return part_of(parse_op("0F0"), 0, kind)
    if kind in CHILD_KINDS | UPDATE_KINDS:
        return Op(kind, 1, axis="dp")  # the parents of drawn collectives are of stage 0
    return parse_op(f"0{kind}0") if kind not in STAGE_OPS else Op(kind, 0)


@st.composite
def rows_with_attributes(draw):
    """(row, its entry of the table, the keys of its attributes, the value of its reduction)."""
    entry = draw(st.sampled_from([one for one in TABLE if not (one.has_children or one.with_direct)]))
    kind = OpKind(draw(st.sampled_from(entry.kinds.split())))
    keys = draw(st.sets(st.sampled_from(sorted(VALUES)), max_size=4))
    op = an_op(kind, draw(st.sampled_from(entry.below.split() or [""])))
    if kind in TRANSFER_KINDS:
        keys.add("peer")
    reduction = draw(st.sampled_from(REDUCTIONS))
    fields = {name: value for key in keys for name, value in VALUES[key].items()}
    return Row(op, reduction=reduction, **fields), entry, keys, reduction


@settings(deadline=None)
@given(st.lists(rows_with_attributes(), max_size=6))
def test_attributes_are_legal_exactly_as_the_table_says(drawn):
    rows = [Row(parse_op(text)) for text in PARENTS.values() if ":" not in text]
    programs = [[*rows, *(row for row, *_ in drawn)], []]
    graph = build_graph(programs, [TensorSpec("t", (4,), "float32", "invariant", "s")], [Group("dp", (0, 1))])
    again = parse_program(format_program(graph)).graph() if can_be_text(drawn) else graph
    expected = set()
    for row, entry, keys, reduction in drawn:
        expected |= {(str(row.op), key) for key in keys - set(entry.attributes.split())}
        expected |= {(str(row.op), "reduction")} if reduction not in ("", *entry.reductions.split()) else set()
    for one in (graph, again):
        found = {(op, message.split("`")[1].split("=")[0]) for op, message in findings(graph_subject(one))}
        kinds = {(of_kind(op), key) for op, key in expected}
        assert {(of_kind(op), key) for op, key in found} == kinds


def of_kind(text):
    """The kind of an operation, and the kind of the operation above it."""
    op = parse_op(text)
    return op.kind, op.target.kind if op.kind in CHILD_KINDS and op.target else None


def can_be_text(drawn):
    """The text form has no peer on other rows than transfers and broadcasts: PP133."""
    return all("peer" not in keys or row.op.kind in TRANSFER_KINDS | {OpKind.BROADCAST} for row, _, keys, _ in drawn)


def test_every_attribute_and_kind_is_in_the_table():
    assert set(ATTRIBUTES) == set(ROW_KEYS)
    assert {kind for one in TABLE for kind in one.kinds.split()} == set(map(str, KINDS))
    assert {key for one in TABLE for key in one.attributes.split()} == set(ATTRIBUTES)
