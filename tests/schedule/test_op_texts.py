"""Texts made column by column are those of the operations, whatever stands in the columns."""

import pytest
from hypothesis import HealthCheck, given, settings

from pipeproof.comm.lower import lower
from pipeproof.schedule.columns import Row, columns_of
from pipeproof.schedule.formats.op_text import kinds_of, op_texts
from pipeproof.schedule.ops import child_of, parse_op, wait_for
from pipeproof.specs.load_plan import plan_from_dict
from tests.plans import plan_dict
from tests.schedule.drawn import generated, plan_of, requests
from tests.verify.test_two_writings import random_graphs


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
