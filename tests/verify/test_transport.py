"""Transport soundness: goldens of the historic Fleet bug, and provenance against real numbers."""

import dataclasses
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.schedule.op_table import Group, Row, TensorSpec, build_graph
from pipeproof.schedule.ops import GATHER_KINDS, SEND_KINDS, OpKind, parse_op
from pipeproof.specs.axis_layout import INVARIANT
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.stages.describe.boundary import Boundary, effective_transport
from pipeproof.verify import provenance
from pipeproof.verify.boundary_transport import RULES, places_of
from pipeproof.verify.check_plan import check_subject
from pipeproof.verify.provenance import Places, events
from pipeproof.verify.subject import make_subject
from tests.plans import plan_dict, subject
from tests.verify.delivery import deliver


def one_boundary(num_tp, numel, transport):
    """Gradients from ranks n.. (stage 1) to ranks 0.. (stage 0), one micro-batch, as the pull request has it."""
    tensors = [TensorSpec(name, (numel,), "float32", "sharded(0)", "s") for name in ("output grad", "input grad")]
    groups = [Group("tp", tuple(range(num_tp)))]
    rows = [[] for _ in range(2 * num_tp)]
    share = numel // num_tp
    for k in range(num_tp):
        start, stop = (k * share, (k + 1) * share) if transport == "partial" else (0, numel)
        rows[num_tp + k] = [Row(parse_op("1SEND_B0"), k, 1, start, stop), Row(parse_op("WAIT(1SEND_B0)"))]
        rows[k] = [Row(parse_op("0RECV_B0"), num_tp + k, 0, start, stop), Row(parse_op("WAIT(0RECV_B0)"))]
        if transport == "partial":
            rows[num_tp + k].insert(0, Row(parse_op("1SLICE_B0"), tensor=1, start=start, stop=stop))
            rows[k].append(Row(parse_op("0GATHER_B0"), tensor=0, start=start, stop=stop, group=0))
    return build_graph(rows, tensors, groups)


def received(graph, num_tp, values):
    held = {(num_tp + k, parse_op("1SEND_B0")): np.asarray(v, dtype=np.float32) for k, v in enumerate(values)}
    got = deliver(graph, held)
    return [got[k, parse_op("0RECV_B0")].tolist() for k in range(num_tp)]


TP0, TP1 = [10, 20, 30, 40, 50, 60, 70, 80], [90, 100, 110, 120, 130, 140, 150, 160]


@pytest.mark.parametrize("factor", [1, 2])
def test_golden_of_the_pull_request(factor):
    values = [[factor * v for v in TP0], [factor * v for v in TP1]]
    mixed = [factor * v for v in (10, 20, 30, 40, 130, 140, 150, 160)]
    assert received(one_boundary(2, 8, "partial"), 2, values) == [mixed, mixed]
    assert received(one_boundary(2, 8, "full"), 2, values) == values


def losses(graph, num_tp):
    """(lost, foreign) as (receiver, source, start, stop), from the rule on a subject of that TP degree."""
    base = subject(
        topology={"pp": 2, "tp": num_tp, "sequence_parallel": True},
        schedule={"num_micro_batches": 1},
        transport={"backward": "partial"},
    )
    lossy = RULES[0]
    lost, foreign = [], []
    for finding in lossy.check(base.with_graph(graph)):
        lost += [(r.rank, r.source_rank, r.start, r.stop) for r in finding.witness.lost]
        foreign += [(r.rank, r.source_rank, r.start, r.stop) for r in finding.witness.foreign]
    return lost, foreign


def test_four_tensor_parallel_ranks_keep_a_quarter_each():
    lost, foreign = losses(one_boundary(4, 8, "partial"), 4)
    assert lost == [
        (0, 4, 2, 8), (1, 5, 0, 2), (1, 5, 4, 8), (2, 6, 0, 4), (2, 6, 6, 8), (3, 7, 0, 6),
    ]  # fmt: skip
    assert [f for f in foreign if f[0] == 0] == [(0, 5, 2, 4), (0, 6, 4, 6), (0, 7, 6, 8)]


def test_provenance_agrees_with_the_numbers_where_slices_do_not_cut_whole_tokens():
    """Local [s 3, b 1, h 10] over TP 4... a slice of 7.5 tokens does not exist; TP 2 cuts one token in half."""
    base = subject(
        model={"hidden_size": 8, "num_heads": 2, "seq_length": 6},
        topology={"pp": 2, "tp": 2, "sequence_parallel": True},
        schedule={"num_micro_batches": 1, "micro_batch_size": 1},
        transport="partial",
    )
    (forward, backward) = [f for f in check_subject(base).findings if f.code == "PP201"]
    assert forward.witness.lost[0].start == 12  # 24 local elements, tokens of 8: the slice ends inside token 1
    assert forward.witness.lost[0].covers.startswith("s 1 b 0 h 4 .. ")
    assert "boundary 0->1, forward" in forward.message
    assert "boundary 1->0, backward" in backward.message


def held_values(base, equal):
    """Rank-distinct values (or equal ones over TP) for every send of a subject's graph."""
    graph, held = base.graph, {}
    for op_id, op in enumerate(graph.ops):
        if op.kind in SEND_KINDS:
            rank = int(graph.rank[op_id])
            owner = base.plan.mesh.rank({**base.plan.mesh.coords(rank), "tp": 0}) if equal else rank
            tensor = graph.tensors[int(graph.tensor[op_id])]
            direction = 0 if op.is_forward else 1
            first = ((owner * 2 + direction) * 100 + op.micro_batch) * 10_000
            held[rank, op] = (first + np.arange(tensor.numel)).reshape(tensor.shape)
    return held


@settings(max_examples=40, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.integers(2, 3),
    dp=st.integers(1, 2),
    sp=st.booleans(),
    transport=st.sampled_from(["full", "partial"]),
    order=st.sampled_from(["sbh", "bsh"]),
    swap=st.booleans(),
)
def test_the_verdict_is_that_of_the_numbers(tp, pp, dp, sp, transport, order, swap):
    """Carry rank-distinct numbers through the same graph: damage there if and only if the rule finds it."""
    base = subject(
        model={"activation_order": order},
        topology={"pp": pp, "tp": tp, "dp": dp, "sequence_parallel": sp},
        schedule={"num_micro_batches": 2},
        transport=transport,
    )
    if swap and transport == "partial" and tp > 1:  # a bug in the slices themselves
        base = base.with_graph(with_swapped_slices(base.graph))
    held = held_values(base, equal=not (sp and tp > 1))
    graph, damaged = base.graph, set()
    arrived = deliver(graph, held)
    for (rank, receive), values in arrived.items():
        op_id = next(i for i in graph.rank_ops(rank) if graph.ops[i] == receive)
        sender = graph.match_of[op_id]
        if not np.array_equal(values, held[int(graph.rank[sender]), graph.ops[sender]]):
            damaged.add(rank)
    found = {r.rank for f in RULES[0].check(base) for r in f.witness.lost}
    assert found == damaged
    num_ranks = graph.num_ranks
    zeros, ones = np.zeros(num_ranks, dtype=np.int64), np.ones(num_ranks, dtype=np.int64)
    events_found = events(graph, Places(zeros, ones, np.arange(num_ranks), zeros, ones))
    for delivery in chain.from_iterable(map(events_found.deliveries, range(len(events_found.classes)))):
        values = arrived[int(graph.rank[delivery.receive]), graph.ops[delivery.receive]].reshape(-1)
        source = {rank: array.reshape(-1) for (rank, op), array in held.items()
                  if op == graph.ops[graph.match_of[delivery.receive]]}  # fmt: skip
        for s in delivery.segments:
            length = s.stop - s.start
            wanted = source[s.source_rank][s.source_start : s.source_start + length]
            assert np.array_equal(values[s.start : s.stop], wanted)


def with_swapped_slices(graph):
    """TP rank 0 and 1 of stage 0 send each other's slice of the first forward message."""
    rows = graph.rows()
    places = []
    for rank in (0, 1):
        place = next(i for i, row in enumerate(rows[rank]) if str(row.op) == "0SEND_F0")
        places.append((rank, place, rows[rank][place]))
    (r0, p0, a), (r1, p1, b) = places
    rows[r0][p0] = dataclasses.replace(a, start=b.start, stop=b.stop)
    rows[r1][p1] = dataclasses.replace(b, start=a.start, stop=a.stop)
    return build_graph(rows, graph.tensors, graph.groups)


@pytest.mark.parametrize(("numel", "happens"), [(15, "full"), (16, "partial")])
def test_partial_of_elements_that_do_not_divide_is_a_full_send_and_is_reported(numel, happens):
    loaded = plan_from_dict(plan_dict(topology={"pp": 2, "tp": 2}, transport="partial"))
    boundary = Boundary("sbh", (numel, 1, 1), INVARIANT, "float32", 2)
    one = make_subject(loaded, boundary=boundary)
    sent = {int(one.graph.stop[i] - one.graph.start[i]) for i, op in enumerate(one.graph.ops) if op.kind in SEND_KINDS}
    notes = [f for f in check_subject(one).findings if f.code == "PP202"]
    assert check_subject(one).errors == ()
    assert effective_transport("partial", numel, 2) == happens
    if happens == "full":
        assert sent == {15}
        assert {str(f.severity) for f in notes} == {"note"}
        assert "15 local elements of a boundary tensor do not divide by topology.tp 2" in notes[0].message
    else:
        assert sent == {8}
        assert notes == []


def test_partial_without_tensor_parallelism_is_reported_too():
    notes = check_subject(subject(schedule={"kind": "gpipe"}, transport="partial")).findings
    assert {(f.code, str(f.severity)) for f in notes} == {("PP202", "note")}
    assert "topology.tp is 1" in notes[0].message


def test_a_tensor_without_a_gradient_is_a_full_send_on_its_way_forward_only():
    mask = {"name": "mask", "dims": "m", "shape": [15], "dtype": "int64"}
    one = subject(
        topology={"pp": 2, "tp": 2}, boundaries=[{"name": "hidden", "dims": "sbh"}, mask], transport="partial"
    )
    notes = [f for f in check_subject(one).findings if f.code == "PP202"]
    assert [f.message.partition(", so")[0] for f in notes] == [
        "forward: `partial` is declared, but the 15 local elements of `mask` do not divide by topology.tp 2"
    ]
    assert notes[0].help is None  # `partial` applies to the other tensor


def test_partial_needs_a_slice_and_a_gather_per_message():
    graph = subject(topology={"pp": 2, "tp": 2}, transport={"forward": "partial"}).graph
    kinds = [op.kind for op in graph.ops]
    assert kinds.count(OpKind.SLICE_FORWARD) == kinds.count(OpKind.GATHER_FORWARD) == 8  # 4 micro-batches, 2 ranks
    assert not {OpKind.SLICE_BACKWARD, OpKind.GATHER_BACKWARD} & set(kinds)
    assert GATHER_KINDS


def test_one_damaged_micro_batch_among_right_ones_is_found_and_named():
    base = subject(topology={"pp": 2, "tp": 2}, transport={"forward": "partial"})
    rows = base.graph.rows()
    place = next(i for i, row in enumerate(rows[1]) if str(row.op) == "0SEND_F2")
    rows[1][place] = dataclasses.replace(rows[1][place], start=0, stop=128)
    wrong = base.with_graph(build_graph(rows, base.graph.tensors, base.graph.groups))
    (found,) = RULES[0].check(wrong)
    assert "`partial` delivers 256 of 512 elements wrongly in micro-batch 2" in found.message
    assert {(r.rank, r.start, r.stop) for r in found.witness.lost} == {(2, 128, 256), (3, 128, 256)}
    assert {(r.source_rank, r.start, r.stop) for r in found.witness.foreign} == {(1, 0, 128)}


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_verdict_does_not_rest_on_the_hash(monkeypatch, sequence_parallel):
    """Events with one hash are compared column by column: with a hash that is always 0 nothing changes."""
    one = subject(topology={"pp": 3, "tp": 2, "sequence_parallel": sequence_parallel}, transport="partial")
    one = one.with_graph(with_swapped_slices(one.graph))
    expected = list(RULES[0].check(one))
    assert expected
    monkeypatch.setattr(provenance, "_mixed", lambda key, column: np.zeros_like(key))
    assert list(RULES[0].check(one)) == expected


def test_a_message_that_never_comes_is_for_another_rule():
    base = subject(schedule={"num_micro_batches": 1})
    rows = base.graph.rows()
    rows[0] = [row for row in rows[0] if str(row.op) != "0SEND_F0"]
    assert list(RULES[0].check(base.with_graph(build_graph(rows, base.graph.tensors, base.graph.groups)))) == []


def test_a_gather_that_a_member_received_nothing_for_lacks_its_part():
    base = subject(topology={"pp": 2, "tp": 2}, schedule={"num_micro_batches": 1}, transport={"forward": "partial"})
    rows = base.graph.rows()
    for rank, texts in ((1, ("0SEND_F0",)), (3, ("1RECV_F0", "WAIT(1RECV_F0)"))):
        rows[rank] = [row for row in rows[rank] if str(row.op) not in texts]
    one = base.with_graph(build_graph(rows, base.graph.tensors, base.graph.groups))
    found_events = events(one.graph, places_of(one))
    numbers = range(len(found_events.classes))
    deliveries = [d for event in numbers for d in found_events.deliveries(event, places_of(one))]
    assert [one.graph.ops[d.receive].kind for d in deliveries].count(OpKind.RECV_FORWARD) == 1
    assert len(deliveries) == 3
    (found,) = RULES[0].check(one)
    assert found.message.startswith("boundary 0->1, forward: ")
    assert [(r.rank, r.source_rank, r.start, r.stop) for r in found.witness.lost] == [(2, 0, 128, 256)]
    assert found.witness.foreign == ()


def test_one_damaged_receiver_of_a_gather_is_found_next_to_a_right_one():
    """The first slice is all of a tensor and the second one nothing: both receivers get the first one's tensor."""
    graph = one_boundary(2, 8, "partial")
    rows = [
        [dataclasses.replace(row, start=8 * (row.start > 0), stop=8) if row.stop else row for row in program]
        for program in graph.rows()
    ]
    assert losses(build_graph(rows, graph.tensors, graph.groups), 2) == ([(1, 3, 0, 8)], [(1, 2, 0, 8)])
