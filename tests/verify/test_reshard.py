"""Boundaries with several tensors, other layouts on the two sides, other TP degrees: identities against numbers."""

import dataclasses
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.schedule.op_table import Group, Row, TensorSpec, build_graph
from pipeproof.schedule.ops import SEND_KINDS, parse_op
from pipeproof.specs.axis_layout import INVARIANT, REPLICATED, sharded
from pipeproof.stages.describe.boundary import Boundary, effective_transport, reshard_messages, slice_range
from pipeproof.stages.describe.index_map import layout_map
from pipeproof.verify.boundary_transport import RULES
from pipeproof.verify.check_plan import check_subject
from pipeproof.verify.subject import graph_subject
from tests.plans import subject
from tests.verify.delivery import deliver_rows

LOSSY = RULES[0]


def spec(name, tensor, num_tp, *, at_sender=True):
    placement = tensor.placement(at_sender=at_sender, gradient=False)
    shape = placement.local_shape(tensor.shape, num_tp)
    return TensorSpec(name, shape, tensor.dtype, str(placement), tensor.dims, tensor.member)


def resharding(tensor, num_senders, num_receivers, num_micro_batches=1):
    """Stage 0 on ranks 0 .. num_senders - 1, stage 1 on those after: the messages of one boundary, forward."""
    messages = reshard_messages(
        tensor.shape,
        tensor.tp,
        num_senders,
        tensor.placement(at_sender=False, gradient=False),
        num_receivers,
    )
    tensors = [
        spec("output of stage 0", tensor, num_senders),
        spec("input of stage 1", tensor, num_receivers, at_sender=False),
    ]
    rows = [[] for _ in range(num_senders + num_receivers)]
    for micro_batch in range(num_micro_batches):
        send, receive = parse_op(f"0SEND_F{micro_batch}"), parse_op(f"1RECV_F{micro_batch}")
        for k in range(num_senders):
            rows[k].append(Row(parse_op(f"0F{micro_batch}")))
        for m in messages:
            here, there = m.sender, num_senders + m.receiver
            rows[here].append(Row(send, there, 0, m.send_start, m.send_start + m.length))
            rows[there].append(Row(receive, here, 1, m.recv_start, m.recv_start + m.length))
            rows[there].append(Row(parse_op(f"WAIT({receive})")))
        for k in range(num_receivers):
            rows[num_senders + k].append(Row(parse_op(f"1F{micro_batch}")))
    for k in range(num_senders):
        sends = [row for row in rows[k] if row.op.kind in SEND_KINDS]
        rows[k] += [Row(parse_op(f"WAIT({row.op})")) for row in sends]
    sides = (range(num_senders), range(num_senders, num_senders + num_receivers))
    groups = [Group("tp", tuple(side)) for side in sides]
    return build_graph(rows, tensors, groups)


def is_delivered(graph, tensor, num_senders, num_receivers):
    """Carry numbers: does each receiver hold its part of the whole tensor?"""
    whole = np.arange(prod(tensor.shape), dtype=np.float64) + 1

    def part(placement, size, k):
        pieces = layout_map(tensor.shape, placement, size, k).ranges
        return np.concatenate([whole[start : start + length] for _, start, length in pieces])

    held = {}
    for i, op in enumerate(graph.ops):
        if op.kind in SEND_KINDS:
            held[i] = part(tensor.tp, num_senders, int(graph.rank[i])).reshape(graph.tensors[0].shape)
    wanted = tensor.placement(at_sender=False, gradient=False)
    return all(
        np.array_equal(got.reshape(-1), part(wanted, num_receivers, int(graph.rank[receive]) - num_senders))
        for receive, got in deliver_rows(graph, held).items()
    )


placements = st.sampled_from([INVARIANT, REPLICATED, sharded(0), sharded(1)])


@settings(max_examples=80, deadline=None)
@given(
    sender=placements,
    receiver=placements,
    num_senders=st.sampled_from([1, 2, 4]),
    num_receivers=st.sampled_from([1, 2, 4]),
    mutation=st.none() | st.tuples(st.sampled_from(["send", "receive"]), st.integers(0, 9), st.integers(-3, 3)),
)
def test_the_verdict_on_messages_between_layouts_is_that_of_the_numbers(
    sender, receiver, num_senders, num_receivers, mutation
):
    tensor = Boundary("sh", (4, 8), sender, "float32", num_senders, receiver_tp=receiver)
    graph = resharding(tensor, num_senders, num_receivers)
    if mutation is not None:
        side, which, by = mutation
        rows = graph.rows()
        places = [
            (rank, i)
            for rank, mine in enumerate(rows)
            for i, row in enumerate(mine)
            if row.op.kind.value == ("SEND_F" if side == "send" else "RECV_F")
        ]
        rank, i = places[which % len(places)]
        row = rows[rank][i]
        by = max(-row.start, min(by, graph.tensors[row.tensor].numel - row.stop))
        rows[rank][i] = dataclasses.replace(row, start=row.start + by, stop=row.stop + by)
        graph = build_graph(rows, graph.tensors, graph.groups)
    found = list(LOSSY.check(graph_subject(graph)))
    assert bool(found) != is_delivered(graph, tensor, num_senders, num_receivers)


def test_a_right_reshard_brings_no_finding_at_all():
    """Two senders with halves of the sequence, four receivers with quarters of the hidden dim."""
    tensor = Boundary("sh", (4, 8), sharded(0), "float32", 2, receiver_tp=sharded(1))
    report = check_subject(graph_subject(resharding(tensor, 2, 4, num_micro_batches=2)))
    assert report.errors == ()


def test_the_witness_of_a_wrong_reshard_is_in_the_coordinates_of_both_sides():
    tensor = Boundary("sh", (4, 8), sharded(0), "float32", 2, receiver_tp=INVARIANT)
    graph = resharding(tensor, 2, 2)
    rows = graph.rows()
    place = next(i for i, row in enumerate(rows[3]) if row.peer == 0)
    other = next(i for i, row in enumerate(rows[3]) if row.peer == 1)
    a, b = rows[3][place], rows[3][other]  # rank 3 puts the two halves into each other's place
    rows[3][place] = dataclasses.replace(a, start=b.start, stop=b.stop)
    rows[3][other] = dataclasses.replace(b, start=a.start, stop=a.stop)
    graph = build_graph(rows, graph.tensors, graph.groups)
    (found,) = LOSSY.check(graph_subject(graph))
    assert found.message == ("boundary 0->1, forward: the messages deliver 32 of 32 elements wrongly in micro-batch 0")
    lost, foreign = (
        [(r.rank, r.source_rank, r.start, r.stop, r.covers) for r in side]
        for side in (found.witness.lost, found.witness.foreign)
    )
    assert lost == [(3, 0, 0, 16, "s 0 h 0 .. s 1 h 7"), (3, 1, 0, 16, "s 2 h 0 .. s 3 h 7")]
    assert foreign == [(3, 1, 0, 16, "s 2 h 0 .. s 3 h 7"), (3, 0, 0, 16, "s 0 h 0 .. s 1 h 7")]


# --- several tensors of one edge ---


def tuple_boundary(members, num_tp, transport):
    """All members cross from ranks 0 .. n - 1 to the next n in one micro-batch, each by the messages of the
    transport."""
    tensors = [spec(f"output {m.member}", m, num_tp) for m in members]
    tensors += [spec(f"input {m.member}", m, num_tp, at_sender=False) for m in members]
    rows = [[] for _ in range(2 * num_tp)]
    send, receive, gather = parse_op("0SEND_F0"), parse_op("1RECV_F0"), parse_op("1GATHER_F0")
    for k in range(num_tp):
        mine, theirs = rows[k], rows[num_tp + k]
        mine.append(Row(parse_op("0F0")))
        for i, member in enumerate(members):
            numel = prod(member.local_shape)
            is_whole = effective_transport(transport, numel, num_tp) == "full"
            start, stop = (0, numel) if is_whole else slice_range(numel, num_tp, k)
            if not is_whole:
                mine.append(Row(parse_op("0SLICE_F0"), tensor=i, start=start, stop=stop))
            mine.append(Row(send, num_tp + k, i, start, stop))
            theirs.append(Row(receive, k, len(members) + i, start, stop))
            theirs.append(Row(parse_op("WAIT(1RECV_F0)")))
            if not is_whole:
                theirs.append(Row(gather, tensor=len(members) + i, start=start, stop=stop, group=1))
        theirs.append(Row(parse_op("1F0")))
        mine += [Row(parse_op("WAIT(0SEND_F0)")) for _ in members]
    return build_graph(
        rows, tensors, [Group("tp", tuple(range(num_tp))), Group("tp", tuple(range(num_tp, 2 * num_tp)))]
    )


HIDDEN = Boundary("sh", (8, 4), sharded(0), "float32", 2, "hidden")
MASK = Boundary("bs", (1, 8), INVARIANT, "float32", 2, "mask")


def test_only_the_member_that_differs_over_tp_is_corrupted():
    """Fleet's tuples: under partial the replicated mask survives, the sequence-parallel hidden states do not."""
    (found,) = LOSSY.check(graph_subject(tuple_boundary([HIDDEN, MASK], 2, "partial")))
    assert "16 of 32 elements of `hidden` wrongly" in found.message
    assert [(r.rank, r.start, r.stop, r.covers) for r in found.witness.lost] == [
        (2, 8, 16, "s 2 h 0 .. s 3 h 3"), (3, 0, 8, "s 4 h 0 .. s 5 h 3"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("members", "transport"),
    [([HIDDEN, MASK], "full"), ([MASK], "partial"), ([dataclasses.replace(HIDDEN, tp=REPLICATED), MASK], "partial")],
)
def test_right_tuples_near_it_pass(members, transport):
    assert list(LOSSY.check(graph_subject(tuple_boundary(members, 2, transport)))) == []


def test_a_member_that_does_not_divide_is_sent_whole():
    """Paddle 34615: partial is decided for each tensor; a receiver that believes otherwise gets half of it."""
    odd = dataclasses.replace(MASK, shape=(1, 7))
    graph = tuple_boundary([odd], 2, "partial")
    assert list(LOSSY.check(graph_subject(graph))) == []
    rows = graph.rows()
    for k in (0, 1):
        for mine, text, tensor in ((rows[k], "0SEND_F0", 0), (rows[2 + k], "1RECV_F0", 1)):
            place = next(i for i, row in enumerate(mine) if str(row.op) == text)
            start, stop = (0, 4) if k == 0 else (3, 7)
            mine[place] = dataclasses.replace(mine[place], tensor=tensor, start=start, stop=stop)
    wrong = build_graph(rows, graph.tensors, graph.groups)
    (found,) = LOSSY.check(graph_subject(wrong))
    assert [(r.rank, r.start, r.stop) for r in found.witness.lost] == [(2, 4, 7), (3, 0, 3)]
    assert found.witness.foreign == ()


# --- other data, folded graphs ---


def test_data_of_another_replica_is_foreign():
    """Ranks of dp 0 and dp 1 send to each other's counterpart: shapes fit, and equal layouts do not help."""
    base = subject(topology={"pp": 2, "tp": 1, "dp": 2}, schedule={"num_micro_batches": 1})
    rows = base.graph.rows()
    for rank in range(4):
        for i, row in enumerate(rows[rank]):
            if str(row.op) in ("0SEND_F0", "1RECV_F0"):
                rows[rank][i] = dataclasses.replace(row, peer=row.peer ^ 1)
    wrong = base.with_graph(build_graph(rows, base.graph.tensors, base.graph.groups))
    (found,) = LOSSY.check(wrong)
    assert "512 of 512 elements" in found.message
    assert {(r.rank, r.source_rank) for r in found.witness.foreign} == {(2, 1), (3, 0)}


@settings(max_examples=20, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]),
    sp=st.booleans(),
    transport=st.sampled_from(["full", "partial"]),
    order=st.sampled_from(["sbh", "bsh"]),
    kind=st.sampled_from(["1f1b", "interleaved"]),
)
def test_a_folded_graph_has_the_verdict_of_the_whole_one(tp, sp, transport, order, kind):
    whole = subject(
        model={"activation_order": order},
        topology={"pp": 2, "tp": tp, "sequence_parallel": sp},
        schedule={"kind": kind, "num_micro_batches": 2, **({"num_chunks": 2} if kind == "interleaved" else {})},
        transport=transport,
    )
    lowered = dataclasses.replace(whole.plan, graph=whole.plan.canonical)
    folded = dataclasses.replace(whole, graph=lowered.graph, lowered=lowered)
    assert folded.plan.folded == (tp > 1)
    assert list(LOSSY.check(folded)) == list(LOSSY.check(whole))


# --- declared boundaries of whole plans ---


@st.composite
def declared(draw):
    """Plans with tuples of tensors, other layouts at the receiver, micro-batches of other sizes."""
    tp = draw(st.sampled_from([1, 2, 4]))
    layouts = st.sampled_from(["invariant", "sharded(s)", "sharded(h)"])
    members = [{"name": "hidden", "dims": draw(st.sampled_from(["sbh", "bsh"])), "tp": draw(layouts)}]
    if draw(st.booleans()):
        members[0]["receiver_tp"] = draw(layouts)
    if draw(st.booleans()):
        members.append({"name": "mask", "dims": "bs", "dtype": "bool", "tp": "replicated"})
    if draw(st.booleans()):
        members.append({"name": "odd", "dims": "x", "shape": [7]})
    schedule = {"num_micro_batches": 3}
    if draw(st.booleans()):
        schedule |= {"seq_lengths": [8, 4, 8], "last_micro_batch_size": 1}
    topology = {"pp": 2, "tp": tp, "dp": draw(st.integers(1, 2))}
    return {"topology": topology, "schedule": schedule, "boundaries": members,
            "transport": draw(st.sampled_from(["full", "partial"]))}  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(sections=declared())
def test_of_declared_boundaries_only_cut_tensors_under_partial_are_lost(sections):
    one = subject(**sections)
    hidden, tp = sections["boundaries"][0], sections["topology"]["tp"]
    receiver = hidden.get("receiver_tp", hidden["tp"])
    is_sliced = sections["transport"] == "partial" and receiver == hidden["tp"]
    corrupt = is_sliced and hidden["tp"].startswith("sharded") and tp > 1
    found = list(LOSSY.check(one))
    assert bool(found) == corrupt
    assert all("of `hidden` wrongly" in f.message for f in found)
    folded = dataclasses.replace(one.plan, graph=one.plan.canonical)
    assert bool(list(LOSSY.check(dataclasses.replace(one, graph=folded.graph, lowered=folded)))) == corrupt


def test_a_member_that_partial_sends_whole_is_noted_by_its_name():
    one = subject(
        topology={"pp": 2, "tp": 2},
        transport={"forward": "partial"},
        boundaries=[{"name": "hidden", "dims": "sbh"}, {"name": "odd", "dims": "x", "shape": [7]}],
    )
    (note,) = [finding for finding in check_subject(one).findings if finding.code == "PP202"]
    assert "the 7 local elements of `odd` do not divide by topology.tp 2, so each rank sends its full" in note.message
    assert note.help is None


def test_a_wrong_range_between_two_layouts_of_a_plan_is_found():
    base = subject(
        topology={"pp": 2, "tp": 2},
        boundaries=[
            {"name": "hidden", "dims": "sbh"},
            {"name": "memory", "dims": "sbh", "receiver_tp": "sharded(s)", "gradient": False},
        ],
        schedule={"num_micro_batches": 2},
    )
    assert check_subject(base).errors == ()
    rows = base.graph.rows()
    for rank in (0, 1):  # both TP ranks send the first half, as if the receivers were equal
        rows[rank] = [
            dataclasses.replace(row, start=0, stop=128) if (row.start, row.stop) == (128, 256) else row
            for row in rows[rank]
        ]
    wrong = base.with_graph(build_graph(rows, base.graph.tensors, base.graph.groups))
    (found,) = LOSSY.check(wrong)
    assert found.message == (
        "boundary 0->1, forward: the messages from invariant to sharded(0) deliver 128 of 128 elements of `memory` "
        "wrongly in each of 2 micro-batches"
    )
    assert [(r.rank, r.source_rank, r.start, r.stop, r.covers) for r in found.witness.lost] == [
        (3, 1, 128, 256, "s 4 b 0 h 0 .. s 7 b 1 h 15")
    ]
    assert {f.code for f in check_subject(wrong).errors} == {"PP201"}
