"""Packed messages: one for all tensors of a boundary, whose ends must agree in order, sizes, types and layouts."""

import dataclasses

import pytest

from pipeproof.diagnostics.source import PlanFileError
from pipeproof.schedule.formats.text_form import format_program, parse_program
from pipeproof.schedule.op_parts import PART_ALIGNMENT, part_starts
from pipeproof.schedule.op_table import build_graph
from pipeproof.schedule.ops import SEND_KINDS, TRANSFER_KINDS
from pipeproof.sim.simulate import simulate
from tests.plans import subject
from tests.verify.programs import codes

MEMBERS = [
    {"name": "hidden", "dims": "sbh", "tp": "sharded(s)"},
    {"name": "skip", "dims": "sbh", "dtype": "float64", "tp": "sharded(s)"},
    {"name": "mask", "dims": "bs", "dtype": "bool"},
]
PLAN = {"topology": {"pp": 2, "tp": 2, "sequence_parallel": True}, "boundaries": MEMBERS}


def packed(**sections):
    return subject(**{**PLAN, "transport": {"messages": "packed"}, **sections})


def mutant(change):
    """The plan whose receiver expects a message with other parts."""
    one = packed()
    tensors = list(one.graph.tensors)
    number = next(n for n, tensor in enumerate(tensors) if tensor.name == "input of stage 1")
    parts = tuple(change(list(tensors[number].parts)))
    num_bytes = part_starts(part.num_bytes for part in parts)[-1]
    tensors[number] = dataclasses.replace(tensors[number], parts=parts, shape=(num_bytes,))
    rows = [
        [dataclasses.replace(row, stop=num_bytes) if row.op.kind in TRANSFER_KINDS and row.tensor == number else row
         for row in rank]
        for rank in one.graph.rows()
    ]  # fmt: skip
    return one.with_graph(build_graph(rows, tensors, one.graph.groups))


def changed(number, **fields):
    def change(parts):
        parts[number] = dataclasses.replace(parts[number], **fields)
        return parts

    return change


def test_a_packed_message_has_the_bytes_of_all_members_at_aligned_places():
    one = packed()
    assert codes(one) == set()
    sent = next(tensor for tensor in one.graph.tensors if tensor.name == "output of stage 0")
    assert [(part.member, part.num_bytes) for part in sent.parts] == [("hidden", 512), ("skip", 1024), ("mask", 16)]
    assert part_starts([1, 16, 17]) == [0, PART_ALIGNMENT, 2 * PART_ALIGNMENT, 4 * PART_ALIGNMENT]
    assert (sent.shape, sent.dtype) == ((512 + 1024 + 16,), "uint8")
    back = next(tensor for tensor in one.graph.tensors if tensor.name == "output grad of stage 0")
    assert [part.member for part in back.parts] == ["hidden", "skip"]  # the mask has no gradient


def test_a_packed_boundary_has_one_message_in_each_direction():
    numbers = [int(one.graph.is_kind(SEND_KINDS).sum()) for one in (packed(), subject(**PLAN))]
    assert numbers == [2 * 4 * 2, 2 * 4 * (3 + 2)]  # TP ranks, micro-batches, and messages in both directions
    alone = [{"name": "hidden", "dims": "sbh", "tp": "sharded(s)"}]
    same = [packed(boundaries=alone).graph, subject(**{**PLAN, "boundaries": alone}).graph]
    assert same[0].tensors == same[1].tensors


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda parts: [parts[1], parts[0], parts[2]], "PP302"),
        (changed(0, shape=(2, 2, 16)), "PP303"),
        (changed(0, shape=(2, 4, 16)), "PP303"),  # as many bytes
        (changed(1, dtype="int64"), "PP304"),
        (changed(0, placement="invariant"), "PP305"),
    ],
    ids=["order", "size", "shape", "dtype", "layout"],
)
def test_exactly_one_rule_refuses_ends_that_disagree(change, code):
    assert codes(mutant(change)) == {code}


def test_a_message_between_other_ranks_of_the_group_loses_what_they_do_not_share():
    one = packed().unfolded()
    rows = one.graph.rows()
    for rank in rows:
        for place, row in enumerate(rank):
            if str(row.op) in ("0SEND_F0", "1RECV_F0"):
                rank[place] = dataclasses.replace(row, peer=row.peer ^ 1)
    assert "PP201" in codes(one.with_graph(build_graph(rows, one.graph.tensors, one.graph.groups)))


def test_a_packed_message_has_one_latency():
    """In order, three tensors forward and two gradients back take five latencies, packed two."""
    sections = {
        "schedule": {"kind": "gpipe", "num_micro_batches": 1},
        "cost": {"p2p": "rendezvous", "p2p_latency_us": 10},
    }
    spans = [simulate(one.plan).timeline.makespan_us for one in (packed(**sections), subject(**PLAN, **sections))]
    assert spans == [600 + 2 * 10, 600 + 5 * 10]


def test_the_text_form_has_the_parts():
    graph = packed().graph
    assert parse_program(format_program(graph)).tensors == graph.tensors


@pytest.mark.parametrize(
    ("sections", "fact"),
    [
        ({"transport": {"messages": "packed", "backward": "partial"}}, "has no slices"),
        ({"transport": {"messages": "packed", "shape_exchange": "per_message"}}, "has fixed shapes"),
        ({"boundaries": [{**MEMBERS[0], "receiver_tp": "sharded(h)"}, MEMBERS[2]]}, "has one layout"),
    ],
    ids=["slices", "shapes", "layouts"],
)
def test_messages_that_cannot_be_packed_are_refused(sections, fact):
    with pytest.raises(PlanFileError) as refused:
        packed(**sections)
    assert {finding.code for finding in refused.value.findings} == {"PP106"}
    assert any(fact in finding.message for finding in refused.value.findings)
