"""The columns of happens-before and the races found in them, against the definition on networkx."""

import dataclasses

import networkx as nx
import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeproof.comm.backends import backend_table
from pipeproof.schedule.op_table import NONE, Group, Row, build_graph
from pipeproof.schedule.ops import Op, OpKind, parse_op, wait_for
from pipeproof.verify.lifetime.buffer_uses import uses_of
from pipeproof.verify.lifetime.happens_before import order_of
from pipeproof.verify.lifetime.races import find_races
from pipeproof.verify.subject import program_subject
from tests.plans import subject
from tests.verify.lifetime_definition import Use, event_graph, racing_pairs

GLOO = backend_table("paddle", "cpu")
BACKENDS = [
    GLOO,
    dataclasses.replace(GLOO, send_completes="eager"),
    dataclasses.replace(GLOO, send_completes="eager", host_blocks_on_post=True),
]
QUEUES = ["", "", "", "side", "copy", "host"]
NAMES = ["a", "b", "a@0", "a@1"]


@st.composite
def graphs(draw, *, regular=False):
    """Up to three ranks that compute, send, wait and meet in barriers, on several queues and in batches.

    ``regular`` programs wait for each of their operations at most once and for each transfer exactly once.
    """
    num_ranks = draw(st.integers(1, 3))
    rows = [[] for _ in range(num_ranks)]
    messages = 0
    for _ in range(draw(st.integers(1, 9))):
        rank = draw(st.integers(0, num_ranks - 1))
        match draw(st.sampled_from(["compute", "compute", "message", "barrier", "wait"])):
            case "compute":
                op = Op(draw(st.sampled_from([OpKind.FORWARD, OpKind.BACKWARD, OpKind.STEP])), rank, len(rows[rank]))
                op = op._replace(micro_batch=None) if op.kind is OpKind.STEP else op
                put(draw, rows[rank], Row(op, queue=draw(st.sampled_from(QUEUES[:5]))))
            case "message" if num_ranks > 1:
                peer = (rank + draw(st.integers(1, num_ranks - 1))) % num_ranks
                for end, other, kind in ((rank, peer, "SEND_F"), (peer, rank, "RECV_F")):
                    op = parse_op(f"{end}{kind}{messages}")
                    queue = draw(st.sampled_from(["", "", "", "side"]))
                    at = put(draw, rows[end], Row(op, peer=other, queue=queue))
                    if regular or draw(st.integers(0, 3)):
                        wait = Row(wait_for(op), queue=draw(st.sampled_from(QUEUES)))
                        rows[end].insert(draw(st.integers(at + 1, len(rows[end]))), wait)
                messages += 1
            case "barrier":
                for program in rows:
                    op = parse_op("0BARRIER:pp")
                    put(draw, program, Row(op, group=0, queue=draw(st.sampled_from(["", "", "side"]))))
            case "wait" if rows[rank]:
                target = draw(st.sampled_from(rows[rank])).op
                if target.kind in (OpKind.FORWARD, OpKind.BACKWARD) and not any(
                    r.op.target == target for r in rows[rank]
                ):
                    at = next(i for i, row in enumerate(rows[rank]) if row.op == target)
                    wait = Row(wait_for(target), queue=draw(st.sampled_from(QUEUES)))
                    rows[rank].insert(draw(st.integers(at + 1, len(rows[rank]))), wait)
    if draw(st.booleans()):
        for program in rows:
            for text in ("0F9", "0F9/0.PART", "0F9/0.ALL_TO_ALL:ep", "0F9/1.PART"):
                group, queue = (0, draw(st.sampled_from(QUEUES[:5]))) if text.endswith("ep") else (NONE, "")
                program.append(Row(parse_op(text), group=group, queue=queue, reads=(draw(st.sampled_from(NAMES)),)))
    return build_graph(rows, (), [Group("pp", tuple(range(num_ranks)))])


def put(draw, program, row):
    """Insert a row somewhere, with buffers and, now and then, in one batch with its neighbour; return its index."""
    uses = {how: tuple(draw(st.lists(st.sampled_from(NAMES), max_size=1))) for how in ("reads", "writes", "frees")}
    at = draw(st.integers(0, len(program)))
    row = dataclasses.replace(row, **uses)
    if at and program[at - 1].op.kind is not OpKind.WAIT and not draw(st.integers(0, 3)):
        batch = program[at - 1].batch if program[at - 1].batch != NONE else len(program) + 1
        program[at - 1] = dataclasses.replace(program[at - 1], batch=batch)
        row = dataclasses.replace(row, batch=batch)
    program.insert(at, row)
    return at


@settings(max_examples=150, deadline=None)
@given(graphs(), st.sampled_from(BACKENDS))
def test_the_columns_have_the_order_of_the_definition(graph, backend):
    events, order = event_graph(graph, backend), order_of(graph, backend)
    followers = {a: nx.descendants(events, ("done", a)) for a in range(graph.num_ops)}
    for a in range(graph.num_ops):
        for b in range(graph.num_ops):
            if a != b:
                defined = ("start", b) in followers[a]
                assert order.before(a, b) == defined
                if (
                    a < b
                    and graph.rank[a] == graph.rank[b]
                    and order.definitely_before(np.array([a]), np.array([b]))[0]
                ):
                    assert defined


@settings(max_examples=150, deadline=None)
@given(graphs(), st.sampled_from(BACKENDS))
def test_races_are_those_of_the_definition(graph, backend):
    order, uses = order_of(graph, backend), uses_of(graph)
    races = find_races(order, uses, lambda pair: "race", most=10_000)
    columns = (column.tolist() for column in (uses.buffer, uses.op, uses.end, uses.changes))
    defined = racing_pairs(graph, event_graph(graph, backend), list(map(Use, *columns)))
    found = {(int(uses.buffer[a]), *sorted((int(uses.op[a]), int(uses.op[b])))) for a, b in races.pairs.get("race", [])}
    assert found <= defined
    assert len(found) == sum(map(len, races.pairs.values()))
    assert races.racing == {buffer for buffer, _, _ in defined}


@settings(max_examples=100, deadline=None)
@given(graphs(regular=True))
def test_two_steps_are_the_program_written_twice(graph):
    written = build_graph([[*rows, *rows] for rows in graph.rows()], graph.tensors, graph.groups)
    twice = order_of(graph, GLOO, num_steps=2)
    assume(np.array_equal(written.waits_for, twice.waits_for))  # a wait may name a target of the step before
    batches = np.flatnonzero((written.batch != NONE) & (np.diff(twice.step, prepend=0) > 0))
    assume(not (written.batch[batches] == written.batch[batches - 1]).any())  # a batch that both ends of a step share
    again = order_of(written, GLOO)
    for a in range(written.num_ops):
        for b in range(written.num_ops):
            if a != b:
                assert twice.before(a, b) == again.before(a, b)


def test_enough_races_are_named_and_the_buffers_of_all_are_known():
    graph = program_subject("rank 0: 0F0{writes=a+b+c} 0B0{queue=side writes=a+b+c} 1F0{writes=d}").graph
    uses = uses_of(graph)
    races = find_races(order_of(graph, GLOO), uses, lambda pair: "race", most=1)
    named = {uses.name_of(buffer) for buffer in races.racing if buffer >= uses.first_named}
    assert (len(races.pairs["race"]), named) == (1, {(0, "a"), (0, "b"), (0, "c")})
    assert races.unexamined["race"] == len(races.racing) - 1


def test_program_order_settles_every_pair_of_a_generated_plan():
    """Else the walk of events, which is slow, would run on plans where nothing is wrong."""
    one = subject(
        model={"num_layers": 8},
        topology={"pp": 4, "tp": 2, "sequence_parallel": True},
        schedule={"kind": "interleaved", "num_chunks": 2, "num_micro_batches": 8},
    )
    races = find_races(order_of(one.graph, GLOO), uses_of(one.graph), _must_not_be_asked, most=1)
    assert not races.racing


def test_a_wait_for_a_later_operation_of_the_queue_settles_a_pair():
    graph = program_subject(
        "rank 0: 0F0 0F1 WAIT(0F1){queue=side} 0B0{queue=side} 0F2 0B1{queue=side} "
        "WAIT(0B0){queue=copy} 0B2{queue=copy}"
    ).graph
    order = order_of(graph, GLOO)
    op = {str(op): op_id for op_id, op in enumerate(graph.ops)}
    pairs = {("0F0", "0B0"): True, ("0F1", "0B0"): True, ("0F0", "0B1"): True, ("0F2", "0B1"): False,
             ("0B0", "0B2"): False, ("0F0", "0B2"): False}  # fmt: skip
    earlier, later = (np.array([op[pair[i]] for pair in pairs]) for i in range(2))
    assert order.definitely_before(earlier, later).tolist() == list(pairs.values())
    assert order.before(op["0B0"], op["0B2"])  # true all the same: `definitely_before` leaves rare reasons to the walk


def _must_not_be_asked(pair):
    raise AssertionError(f"the pair {pair} was left open")
