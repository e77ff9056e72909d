from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeproof.comm.lower import lower
from pipeproof.schedule.columns import Row, columns_of
from pipeproof.schedule.formats.op_text import kinds_of, op_texts
from pipeproof.schedule.ops import (
    AXES,
    CHILD_KINDS,
    COMPUTE_KINDS,
    COPY_KINDS,
    GATHER_KINDS,
    PART_KINDS,
    SLICE_KINDS,
    TRANSFER_KINDS,
    Op,
    OpKind,
    child_of,
    free_of,
    parse_op,
    part_of,
    wait_for,
)
from pipeproof.specs.load_plan import plan_from_dict
from tests.plans import plan_dict
from tests.schedule.drawn import generated, plan_of, requests
from tests.verify.test_two_writings import random_graphs

numbers = st.integers(0, 10**6)
maybe = st.none() | numbers
indexed = st.builds(
    lambda kind, stage, batch, split: Op(kind, stage, batch, split=split),
    st.sampled_from(sorted(COMPUTE_KINDS | COPY_KINDS | TRANSFER_KINDS | SLICE_KINDS | GATHER_KINDS)),
    numbers,
    numbers,
    maybe,
)
axes = st.sampled_from(AXES)
updates = st.sampled_from([OpKind.REDUCE_GRAD, OpKind.GATHER_WEIGHT])
reductions = st.builds(lambda kind, s, a: Op(kind, s, axis=a), updates, numbers, st.none() | axes)
collectives = st.builds(
    lambda kind, s, m, a: Op(kind, s, m, axis=a), st.sampled_from(sorted(CHILD_KINDS)), numbers, maybe, axes
)
computes = st.builds(
    lambda kind, stage, batch, split: Op(kind, stage, batch, split=split),
    st.sampled_from(sorted(COMPUTE_KINDS)),
    numbers,
    numbers,
    maybe,
)
parents = st.one_of(computes, reductions)
targets = st.one_of(
    indexed,
    reductions,
    collectives,
    st.builds(lambda kind, s: Op(kind, s), st.sampled_from([OpKind.STEP, OpKind.UNSHARD, OpKind.RESHARD]), numbers),
    st.builds(lambda s, m: Op(OpKind.SCALE_GRAD, s, m), numbers, maybe),
    st.builds(child_of, parents, numbers, st.sampled_from(sorted(CHILD_KINDS)), axes),
    st.builds(part_of, computes, numbers, st.sampled_from(sorted(PART_KINDS))),
)
ops = st.one_of(targets, st.builds(wait_for, targets), st.builds(free_of, targets))


@given(ops)
def test_text_form_round_trips(op):
    assert parse_op(str(op)) == op


@given(ops, st.sampled_from(["x", " ", "0", "\n", "F"]))
def test_only_the_whole_string_is_an_operation(op, extra):
    text = str(op)
    for changed in (text + extra, extra + text):
        try:
            parsed = parse_op(changed)
        except ValueError:
            continue
        assert str(parsed) == changed  # another operation, never a misread one
        assert parsed != op


@pytest.mark.parametrize(
    "text",
    [
        "", "2F", "F0", "2f0", "02F0", "2F00", "2F-1", "2F0x", "2F0 ", "2SENDF1", "2SEND1", "WAIT()",
        "WAIT(2SEND_F0", "WAIT(WAIT(2SEND_F0))", "FREE(WAIT(2SEND_F0))", "2STEP0", "2REDUCE_GRAD:", "2REDUCE_GRAD:xx",
        "2SEND_F0/0.ALL_REDUCE:tp", "2F0/ALL_REDUCE:tp", "2F0/0.GATHER:tp", "2BARRIER", "2META_F0", "²F0", "2F٣",
    ],
)  # fmt: skip
def test_malformed_text_is_refused_with_the_text(text):
    with pytest.raises(ValueError, match=re.escape(repr(text)) + "|not an operation"):
        parse_op(text)


def test_pytorch_forms_are_ours():
    assert parse_op("3SEND_F1") == Op(OpKind.SEND_FORWARD, 3, 1)
    assert parse_op("2I0") == Op(OpKind.BACKWARD_INPUT, 2, 0)


def same(graph):
    texts = op_texts(graph.columns)
    assert texts == [str(op) for op in graph.ops]
    assert kinds_of(texts) == [op.kind for op in graph.ops]


@given(drawn=requests(max_ranks=4, max_chunks=3))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_texts_of_lowered_plans(drawn):
    kind, request = drawn
    generated(kind, request)
    same(lower(plan_from_dict(plan_of(kind, request)).spec).graph)


@given(graph=random_graphs())
@settings(max_examples=40, deadline=None)
def test_texts_of_random_programs(graph):
    same(graph)


def test_collectives_inside_operations_slices_gathers_and_reductions():
    topology = {"pp": 2, "tp": 2, "dp": 2, "sequence_parallel": True}
    for transport, sequence_parallel in (("full", True), ("partial", False)):
        plan = plan_dict(topology=topology | {"sequence_parallel": sequence_parallel}, transport=transport)
        graph = lower(plan_from_dict(plan).spec).graph
        same(graph)
    assert {"0REDUCE_GRAD:dp", "0STEP", "1SLICE_B0", "0F0/0.ALL_REDUCE:tp"} <= set(op_texts(graph.columns))


def test_what_columns_cannot_say_and_no_rows_at_all():
    unusual = wait_for(child_of(parse_op("3F7"), 2, parse_op("0ALL_GATHER:tp").kind, "tp"))
    columns = columns_of([[Row(parse_op("3F7")), Row(unusual), Row(parse_op("3STEP"))]])
    assert len(columns.unusual) == 1
    assert op_texts(columns) == ["3F7", "WAIT(3F7/2.ALL_GATHER:tp)", "3STEP"]
    assert op_texts(columns_of([])) == []


def test_what_is_no_operation_has_no_kind():
    with pytest.raises(ValueError, match="'2X1' is not an operation"):
        kinds_of(["2F0", "2F1", "2X1"])
