"""The columns of happens-before and the races found in them, against the definition on networkx."""

import dataclasses

import networkx as nx
import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeproof.comm.backends import backend_table
from pipeproof.comm.channel_models import calls_of
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


def test_only_transfers_of_one_end_of_a_channel_follow_each_other():
    graph = program_subject(
        "rank 0: 0SEND_F0{peer=1} 0SEND_F0{peer=2} 0SEND_F1{peer=1} 0RECV_B0{peer=1}\n"
        "rank 1: 1RECV_F0{peer=0} 1RECV_F1{peer=0} 1SEND_B0{peer=0}\nrank 2: 1RECV_F0{peer=0}"
    ).graph
    order = order_of(graph, dataclasses.replace(GLOO, host_blocks_on_post=False))
    to_one, to_two, to_one_again, back = range(4)
    pairs = {(to_one, to_one_again): True, (to_one, to_two): False, (to_two, to_one_again): False,
             (to_one, back): False}  # fmt: skip
    for (earlier, later), is_ordered in pairs.items():
        assert order.definitely_before(np.array([earlier]), np.array([later])).tolist() == [is_ordered]
        assert order.before(earlier, later) == is_ordered


def test_a_child_runs_on_the_queue_and_in_the_batch_of_its_parent_unless_its_row_names_one():
    order = order_of(
        program_subject(
            "rank 0: 0F0 0REDUCE_GRAD:dp{queue=side} 0REDUCE_GRAD:dp/0.ALL_REDUCE:dp{group=0} 1REDUCE_GRAD:dp "
            "1REDUCE_GRAD:dp/0.ALL_REDUCE:dp{group=0 queue=side} 2REDUCE_GRAD:dp{queue=side} "
            "2REDUCE_GRAD:dp/0.ALL_REDUCE:dp{group=0 queue=compute}\ngroup dp: 0"
        ).graph,
        GLOO,
    )
    compute, side = order.queue[0], order.queue[1]
    assert order.queue.tolist() == [compute, side, side, compute, side, side, compute]
    assert side not in (compute, NONE)
    assert len(set(order.run.tolist())) == 7

    order = order_of(
        program_subject(
            "rank 0: 0REDUCE_GRAD:dp{batch=0} 0REDUCE_GRAD:dp/0.ALL_REDUCE:dp{group=0} 1REDUCE_GRAD:dp{batch=0} 0STEP\n"
            "rank 1: 0REDUCE_GRAD:dp{batch=0} 0REDUCE_GRAD:dp/0.ALL_REDUCE:dp{group=0}\ngroup dp: 0 1"
        ).graph,
        GLOO,
    )
    first, _, _, step, other, _ = order.run.tolist()
    assert order.run.tolist() == [first, first, first, step, other, other]
    assert len({first, step, other}) == 3


def test_what_holds_the_host_is_no_collective():
    """Both have events of their own, numbered one after the other."""
    order = order_of(
        program_subject(
            "rank 0: 0F0{queue=host} 0F1 0BARRIER:pp{group=0} 0BARRIER:pp{group=0}\n"
            "rank 1: 1F0 0BARRIER:pp{group=0} 1F1 0BARRIER:pp{group=0}\ngroup pp: 0 1"
        ).graph,
        GLOO,
    )
    assert order.before(0, 1)
    assert [order.before(other, 1) for other in (4, 5, 6, 7)] == [False] * 4
    assert [order.before(1, other) for other in (4, 5, 6, 7)] == [False, False, True, True]


def test_batches_are_seen_where_a_program_has_nothing_else():
    run = order_of(program_subject("rank 0: 0F0{batch=0} 0F1{batch=0} 0F2{batch=1} 0F3{batch=1}").graph, GLOO).run
    assert (np.diff(run) != 0).tolist() == [False, True, False]


def test_a_wait_within_a_batch_settles_nothing():
    """Only what comes after the whole batch is ordered, and that is for the walk."""
    for program in (
        "rank 0: 0F0{queue=side} WAIT(0F0){batch=0} 0B0{batch=0} 0F1{batch=1} 0B1{batch=1}",
        "rank 0: 0F0{queue=side} 0B0{batch=0} WAIT(0F0){batch=0} 0F1{batch=1} 0B1{batch=1}",
        "rank 0: 0F0{queue=side} 0B0{batch=0} WAIT(0F0){batch=0} 0F1",
    ):
        graph = program_subject(program).graph
        order = order_of(graph, GLOO)
        op = {str(op): op_id for op_id, op in enumerate(graph.ops)}
        after = np.array([op["0B0"], op["0F1"]])
        assert order.definitely_before(np.array([0, 0]), after).tolist() == [False, False]
        assert [order.before(0, one) for one in after.tolist()] == [False, True]


def test_a_wait_next_to_a_batch_settles_what_comes_after_it():
    graph = program_subject("rank 0: 0F0{queue=side} 0F1{queue=side batch=0} 0F2{batch=0} WAIT(0F0) 0B0 0B1{batch=1} "
                            "0B2{batch=1}").graph  # fmt: skip
    assert order_of(graph, GLOO).definitely_before(np.array([0, 0]), np.array([4, 5])).tolist() == [True, True]


def test_a_post_that_holds_the_host_settles_what_the_host_issues_later():
    graph = program_subject("rank 0: 0RECV_F0{peer=1} 0F0 0F1{queue=side} 0F2\nrank 1: 0SEND_F0{peer=0}").graph
    order = order_of(graph, BACKENDS[2])
    receive, _, aside, last = range(4)
    pairs = {(receive, aside): True, (receive, last): True, (aside, last): False}
    earlier, later = (np.array([pair[i] for pair in pairs]) for i in range(2))
    assert order.definitely_before(earlier, later).tolist() == list(pairs.values())
    assert not order_of(graph, BACKENDS[1]).definitely_before(earlier, later).any()


def _must_not_be_asked(pair):
    raise AssertionError(f"the pair {pair} was left open")


def test_a_batch_is_one_call_unless_it_holds_computations_alone():
    """On each rank: both ranks have a batch 0."""
    calls = calls_of(
        program_subject(
            "rank 0: 0F0{batch=0} 0F1{batch=0} 0SEND_F0{peer=1 batch=1} 0SEND_F1{peer=1} 0B0{batch=1}\n"
            "rank 1: 1RECV_F0{peer=0 batch=0} 1F0{batch=0} 1RECV_F1{peer=0 batch=1} 1F1"
        ).graph
    )
    assert calls.tolist() == [NONE, NONE, 1, NONE, 1, 0, 0, 1, NONE]
