"""The columns of uses against their definition, on programs with everything that a buffer has to do with."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.schedule.op_table import NONE, Group, Row, TensorSpec, build_graph
from pipeproof.schedule.ops import AXES, parse_op
from pipeproof.verify.lifetime.buffer_uses import uses_of
from pipeproof.verify.subject import program_subject
from tests.plans import subject
from tests.verify.uses_definition import defined_uses

TENSORS = tuple(TensorSpec(name, (8,), "float32", "invariant", "s") for name in ("whole", "sliced", "joined"))
COMPUTES = ("F", "B", "I", "W")
MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "SLICE_F", "SLICE_B", "GATHER_F", "GATHER_B")
LASTING = ("STEP", "UNSHARD", "RESHARD", "SCALE_GRAD", "REDUCE_GRAD:dp", "GATHER_WEIGHT:dp")
BELOW = ("0REDUCE_GRAD:dp/0.ALL_REDUCE:dp", "1GATHER_WEIGHT:dp/0.ALL_GATHER:dp", "0F0/0.ALL_REDUCE:tp")
MICRO_BATCHES = (0, 0, 0, 1, 3_000_000)
"""The last one is too large for a table by number."""
SPECIAL = ("0OFFLOAD0", "0RELOAD0", "0OFFLOAD1", "FREE(0F0)", "FREE(0OFFLOAD0)", "FREE(0RECV_F0)", "FREE(0STEP)",
           "FREE(1F0)", "FREE(0REDUCE_GRAD:dp)")  # fmt: skip


@st.composite
def rows_of(draw, special, queues):
    """A row; without ``special`` one of a program that copies and frees nothing."""
    stage, micro_batch = draw(st.integers(0, 1)), draw(st.sampled_from(MICRO_BATCHES))
    kind = draw(
        st.sampled_from(["compute", "compute", "compute", "message", "message", "persistent", "below", "special"])
    )
    match kind:
        case "compute":
            row = Row(parse_op(f"{stage}{draw(st.sampled_from(COMPUTES))}{micro_batch}"))
        case "message":
            start = draw(st.sampled_from([0, 4]))
            text = f"{stage}{draw(st.sampled_from(MESSAGES))}{micro_batch}"
            peer = draw(st.integers(0, 1)) if "GATHER" not in text and "SLICE" not in text else NONE
            group = 0 if "GATHER" in text else NONE
            row = Row(parse_op(text), peer, draw(st.integers(0, 2)), start, start + 4, group)
        case "persistent":
            names = LASTING if special else [name for name in LASTING if "SHARD" not in name]
            row = Row(parse_op(f"{stage}{draw(st.sampled_from(names))}"))
        case "below":
            text = draw(st.sampled_from(BELOW))
            row = Row(parse_op(text), group=0)
        case "special":
            return Row(parse_op(draw(st.sampled_from(SPECIAL)) if special else f"{stage}F{micro_batch}"))
    names = {how: draw(st.sampled_from([(), (), ("a",), ("a@1",), ("a@2",)])) for how in ("reads", "writes", "frees")}
    return dataclasses.replace(row, queue=draw(st.sampled_from(["", "", "", *queues])), **names)


@st.composite
def programs(draw):
    """Two ranks. Only some programs depend on the reads of backwards; each reason for that comes alone, too."""
    reason = draw(st.sampled_from(["", "", "batch", "special", "side", "host", "all", "all"]))
    queues = [queue for queue in ("side", "host") if reason in (queue, "all")]
    special = reason in ("special", "all")
    ranks = [draw(st.lists(rows_of(special, queues), min_size=6, max_size=26)) for _ in range(2)]
    if reason in ("batch", "all"):
        ranks[0][0] = dataclasses.replace(ranks[0][0], batch=0)
    return build_graph(ranks, TENSORS, [Group(draw(st.sampled_from(AXES)), (0, 1))])


def found_uses(graph):
    """The columns, each buffer as the set of (op, bits, end) that use it; in order of their uses."""
    uses = uses_of(graph)
    buffers = {}
    for buffer, *use in zip(*(c.tolist() for c in (uses.buffer, uses.op, uses.mode, uses.end)), strict=True):
        buffers.setdefault(buffer, []).append(tuple(use))
    return sorted(buffers.values())


def as_lists(uses):
    return sorted(sorted((op, *use) for op, use in by_op.items()) for by_op in uses.values())


@settings(max_examples=150, deadline=None)
@given(programs())
def test_the_columns_have_the_uses_of_the_definition(graph):
    assert found_uses(graph) == as_lists(defined_uses(graph))


ONE_TENSOR = "tensor whole: shape=8 dtype=float32 placement=invariant dims=s\ngroup tp: 0\n"
PROGRAMS = {
    "neighbouring stages": "rank 0: 0F0 1F0 2F0 2B0 1B0 0B0",
    "neighbours of another micro-batch": "rank 0: 0F0 1B1000000 2F0",
    "parts of a tensor": "rank 0: 0RECV_F0{peer=1 tensor=0 range=0..4} 0RECV_F0{peer=1 tensor=0 range=4..8} 0F0"
    "\nrank 1: ",
    "parts of several micro-batches": "rank 0: 0RECV_F0{peer=1 tensor=0 range=4..8} "
    + " ".join(f"0RECV_F{i}{{peer=1 tensor=0 range=0..4}}" for i in range(9))
    + "\nrank 1: ",
    "what is received is read again": "rank 0: 0RECV_F0{peer=1} 0F0{queue=side} 0RECV_B0{peer=1} 0I0 0W0\nrank 1: ",
    "and by a whole backward": "rank 0: 0RECV_F0{peer=1} 0F0 0RECV_B0{peer=1} 0B0 FREE(0F0)\nrank 1: ",
    "copies": "rank 0: 0F0 0OFFLOAD0 0B0",
    "whole weights": "rank 0: 0UNSHARD 0F0 0B0",
    "sharded weights": "rank 0: 0F0 0RESHARD 0B0",
    "a queue": "rank 0: 0F0 0B0{queue=side}",
    "the host's queue": "rank 0: 0F0 0B0{queue=host}",
    "a batch": "rank 0: 0F0 0B0{batch=0}",
    "a collective of its own and one of a computation": "rank 0: 0F0 0F0/0.ALL_REDUCE:tp{group=0 writes=x} "
    "0ALL_REDUCE0:tp{group=0 writes=y} FREE(0ALL_REDUCE0:tp)",
    "a collective that is none": "rank 0: 0F0 0F0/0.ALL_REDUCE:tp{group=0 writes=x} FREE(0ALL_REDUCE0:tp)",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_small_programs_have_the_uses_of_the_definition(name):
    graph = program_subject(ONE_TENSOR + PROGRAMS[name]).graph
    assert found_uses(graph) == as_lists(defined_uses(graph))


def test_plans_have_the_uses_of_the_definition():
    """Slices, joined tensors, several stages on a rank, sharded optimizers, all from the lowering."""
    for one in (
        subject(topology={"pp": 2, "tp": 2, "sequence_parallel": True}, transport="partial"),
        subject(model={"num_layers": 8}, schedule={"kind": "interleaved", "num_chunks": 2, "num_micro_batches": 2}),
        subject(schedule={"kind": "zb_h1", "num_micro_batches": 3}),
    ):
        assert found_uses(one.graph) == as_lists(defined_uses(one.graph))
