"""Equal messages are checked once: if two messages differ in one respect, the damaged one is found.

Micro-batch 0 is right and comes first; micro-batch 1 is equal except for the change of the test.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeproof.schedule.op_table import NONE, Group, Row, TensorSpec, build_graph
from pipeproof.schedule.ops import GATHER_KINDS, SEND_KINDS, parse_op
from pipeproof.verify import provenance
from pipeproof.verify.boundary_transport import RULES, Layouts, places_of
from pipeproof.verify.provenance import DATA_RECEIVES, events
from pipeproof.verify.subject import graph_subject
from tests.plans import subject
from tests.verify.delivery import deliver_rows

ROWS_CUT = TensorSpec("rows", (4, 4), "float32", "sharded(0)", "sh")
COLUMNS_CUT = TensorSpec("columns", (8, 2), "float32", "sharded(1)", "sh")


def message(rows, micro_batch, sender, receiver, *, sent=0, wanted=0, part=(0, 16), into=None):
    """One message from stage 0 to stage 1: a range of the sender's tensor into the same range or another one."""
    rows[sender].append(Row(parse_op(f"0SEND_F{micro_batch}"), receiver, sent, *part))
    rows[receiver].append(Row(parse_op(f"1RECV_F{micro_batch}"), sender, wanted, *(into or part)))


def graph_of(rows, *groups, tensors=(ROWS_CUT, COLUMNS_CUT)):
    return build_graph(rows, tensors, [Group("tp", ranks) for ranks in groups])


def damaged(one):
    """(receivers that lack something, the end of the message) of the one finding."""
    (finding,) = RULES[0].check(one)
    return {item.rank for item in finding.witness.lost}, finding.message.partition(" wrongly ")[2]


def test_another_replica():
    """With data parallelism both stages have two replicas; in micro-batch 1 they send each other's tensors."""
    one = exchanged({0: 1, 1: 0, 2: 3, 3: 2}, topology={"pp": 2, "dp": 2})
    assert damaged(one) == ({2, 3}, "in micro-batch 1")
    assert [finding.help for finding in RULES[0].check(one)] == [None]  # it is not the transport


def exchanged(swapped, **sections):
    """A plan with two micro-batches; ``swapped`` has the new peers of the messages of micro-batch 1 by the old ones."""
    base = subject(schedule={"num_micro_batches": 2}, **sections)
    rows = [
        [
            replace(row, peer=swapped.get(row.peer, row.peer)) if str(row.op) in {"0SEND_F1", "1RECV_F1"} else row
            for row in mine
        ]
        for mine in base.graph.rows()
    ]
    return base.with_graph(build_graph(rows, base.graph.tensors, base.graph.groups))


def test_another_part_of_the_sequence():
    """Ranks 0 and 1 have two parts of the sequence of one replica, as do 2 and 3, and so on."""
    parts = exchanged({rank: rank ^ 1 for rank in range(8)}, topology={"pp": 2, "cp": 2, "dp": 2})
    assert damaged(parts) == ({4, 5, 6, 7}, "in micro-batch 1")


def test_a_slice_from_another_replica():
    """The second slices (ranks 1 and 3) are exchanged: all gather one slice of the other replica."""
    slices = exchanged({1: 3, 3: 1, 5: 7, 7: 5}, topology={"pp": 2, "tp": 2, "dp": 2}, transport="partial")
    assert damaged(slices) == ({4, 5, 6, 7}, "in micro-batch 1")


def test_a_rank_of_a_group_represents_several():
    """Each of the ranks stands for two of a group of four, so the second has places 2 and 3 in it."""
    of_swapped = [
        (2, 0, "s 0 h 0 .. s 3 h 3"),
        (2, 0, "s 4 h 0 .. s 7 h 3"),
        (3, 1, "s 8 h 0 .. s 11 h 3"),
        (3, 1, "s 12 h 0 .. s 15 h 3"),
    ]
    for swap, found in ((False, []), (True, of_swapped)):
        rows = [[] for _ in range(4)]
        for k in range(2):
            message(rows, 0, k, 3 - k if swap else 2 + k)
        graph = build_graph(rows, [ROWS_CUT], [Group("tp", (0, 1), 2), Group("tp", (2, 3), 2)])
        findings = RULES[0].check(graph_subject(graph))
        lost = [item for finding in findings for item in finding.witness.lost]
        assert [(item.rank, item.source_rank, item.covers) for item in lost] == found


@pytest.mark.parametrize("second", [16, 0])
def test_shards_that_come_together_on_a_rank_without_a_group(second):
    """Two ranks send half of the rows each, in either order; the whole tensor is right in one of them."""
    rows = [[] for _ in range(3)]
    for sender, start in ((0, 16 - second), (1, second)):
        message(rows, 0, sender, 2, wanted=1, into=(start, start + 16))
    whole = TensorSpec("whole", (8, 4), "float32", "sharded(0)", "sh")
    findings = RULES[0].check(graph_subject(graph_of(rows, (0, 1), tensors=(ROWS_CUT, whole))))
    assert [finding.message for finding in findings] == (
        [] if second else ["boundary 0->1, forward: the messages deliver 32 of 32 elements wrongly in micro-batch 0"]
    )


SLICED_SHARDS = [(2, 0, 8, 16, "h 8 .. h 15"), (3, 1, 0, 8, "h 0 .. h 7")]


@pytest.mark.parametrize(("placement", "expected"), [("invariant", []), ("sharded(0)", SLICED_SHARDS)])
def test_slices_of_a_tensor_that_its_receiver_has_in_another_shape(placement, expected):
    """Slices of equal copies make the same tensor; of shards, each receiver lacks the half that the other one got."""
    rows = [[] for _ in range(4)]
    for k in range(2):
        part = 8 * k, 8 * k + 8
        message(rows, 0, k, 2 + k, wanted=1, part=part)
        rows[2 + k].append(Row(parse_op("1GATHER_F0"), tensor=1, start=part[0], stop=part[1], group=1))
    tensors = [
        TensorSpec("flat", (16,), "float32", placement, "h"),
        TensorSpec("rows", (4, 4), "float32", placement, "sh"),
    ]
    findings = RULES[0].check(graph_subject(graph_of(rows, (0, 1), (2, 3), tensors=tensors)))
    lost = [item for finding in findings for item in finding.witness.lost]
    assert [(item.rank, item.source_rank, item.start, item.stop, item.covers) for item in lost] == expected


LARGE = [
    TensorSpec("rows", (8, 4), "float32", "sharded(0)", "sh"),
    TensorSpec("columns", (16, 2), "float32", "sharded(1)", "sh"),
    TensorSpec("equal", (32,), "float32", "invariant", "h"),
]
PARTS = [
    ((0, 16), (0, 16)),
    ((0, 8), (0, 8)),
    ((8, 16), (8, 16)),
    ((0, 8), (8, 16)),
    ((0, 8), (0, 16)),
    ((8, 16), (0, 16)),
]
RESPECTS = {
    "receivers": st.sampled_from([(2, 3), (2, 3), (4, 5), (3, 2), (2,), (3,)]),
    "senders": st.tuples(*[st.sampled_from([0, 1, 0, 1, 4, 5])] * 2),
    "sent": st.integers(0, 2),
    "wanted": st.integers(0, 2),
    "parts": st.tuples(*[st.sampled_from(PARTS)] * 2),
    "shifts": st.tuples(*[st.sampled_from([0, 0, 8, 4])] * 2),
    "is_gathered": st.sampled_from([(True, True), (True, True), (False, False), (True, False)]),
    "gather_range": st.sampled_from([None, None, (4, 12), (8, 24)]),
    "unsent": st.sampled_from([(), (), (), (0,), (1,), (0, 1)]),
}


@st.composite
def nearly_alike(draw):
    """Messages from stage 0 to stage 1: in most micro-batches they differ from the first micro-batch's in one
    respect."""
    usual = {name: draw(values) for name, values in RESPECTS.items()}
    rows = [[] for _ in range(6)]
    for micro_batch in range(draw(st.integers(2, 8))):
        changed = draw(st.sampled_from(["", *RESPECTS]))
        form = {**usual, **({changed: draw(RESPECTS[changed])} if changed else {})}
        for place, (receiver, sender, (part, into), is_gathered) in enumerate(
            zip(form["receivers"], form["senders"], form["parts"], form["is_gathered"], strict=False)
        ):
            if sender == receiver:
                continue
            message(rows, micro_batch, sender, receiver, sent=form["sent"], wanted=form["wanted"], part=part, into=into)
            for rank, shift in zip((sender, receiver), form["shifts"], strict=True):
                rows[rank][-1] = replace(rows[rank][-1], shift=shift)
            if place in form["unsent"]:
                rows[sender].pop()
            if is_gathered:
                gather = parse_op(f"1GATHER_F{micro_batch}")
                group, (start, stop) = receiver // 2, form["gather_range"] or into
                rows[receiver].append(Row(gather, NONE, form["wanted"], start, stop, group, shift=form["shifts"][1]))
    copies = draw(st.sampled_from([1, 1, 2]))
    groups = [Group("tp", ranks, copies) for ranks in ((0, 1), (2, 3), (4, 5))]
    return graph_subject(build_graph(rows, LARGE, groups))


def damage(layouts, found, places, event):
    """Effect of one event on its receivers, each by its place in its group."""
    result = []
    for delivery in found.deliveries(event, places):
        loss = layouts.loss(delivery)
        ranges = () if loss is None else [(r.start, r.stop, r.covers) for r in (*loss.lost, *loss.foreign)]
        result.append((int(places.index[found.graph.rank[delivery.receive]]), delivery.copy, *ranges))
    return result


def has_all_sends(found, event):
    here = found.receive[found.offsets[event] : found.offsets[event + 1]]
    return bool((found.graph.match[here[here != NONE]] != NONE).all())


@pytest.mark.parametrize("hashed", [True, False])
@settings(max_examples=200, deadline=None)
@given(one=nearly_alike())
def test_events_of_one_class_do_the_same_to_their_receivers(hashed, one):
    with pytest.MonkeyPatch.context() as patch:
        if not hashed:  # all have one hash, and are compared column by column
            patch.setattr(provenance, "_mixed", lambda key, column: np.zeros_like(key))
        places = places_of(one)
        found, layouts = events(one.graph, places), Layouts(one, places)
    by_class = {}
    for event, code in enumerate(found.classes.tolist()):
        assert (code == NONE) == (not has_all_sends(found, event))
        if code != NONE:
            outcome = damage(layouts, found, places, event)
            assert by_class.setdefault(code, outcome) == outcome


def expanded(graph, copies):
    """The graph with a rank for each of the ``copies`` that a rank represents."""

    def moved(row, copy):
        by = copy * row.shift
        peer = row.peer if row.peer == NONE else row.peer * copies + copy
        return replace(row, peer=peer, start=row.start + by, stop=row.stop + by, shift=0)

    rows = [[moved(row, copy) for row in mine] for mine in graph.rows() for copy in range(copies)]
    members = [[rank * copies + copy for rank in group.ranks for copy in range(copies)] for group in graph.groups]
    return build_graph(rows, graph.tensors, [Group("tp", tuple(ranks)) for ranks in members])


@settings(max_examples=100, deadline=None)
@given(nearly_alike())
def test_every_element_comes_from_where_the_numbers_say(one):
    """Ranks that represent several are written out, and numbers are carried through their messages."""
    copies, places = one.graph.groups[0].copies, places_of(one)
    graph = expanded(one.graph, copies)
    gathers = np.flatnonzero(graph.is_kind(GATHER_KINDS)).tolist()
    assume(all(graph.ops[member] == graph.ops[i] for i in gathers for member in graph.members_of(i)))
    assume((graph.match[graph.is_kind(DATA_RECEIVES)] != NONE).all())

    def values(rank, micro_batch):
        return (rank * 10 + micro_batch) * 100 + 1 + np.arange(32)

    sends = np.flatnonzero(graph.is_kind(SEND_KINDS)).tolist()
    held = {
        i: values(int(graph.rank[i]), graph.ops[i].micro_batch).reshape(LARGE[graph.tensor[i]].shape) for i in sends
    }
    arrived = {(int(graph.rank[i]), graph.ops[i]): v.reshape(-1) for i, v in deliver_rows(graph, held).items()}
    found = events(one.graph, places)
    num_seen = 0
    for event in np.flatnonzero(found.classes != NONE).tolist():
        for delivery in found.deliveries(event, places):
            num_seen += 1
            op, expected = one.graph.ops[delivery.receive], np.zeros(128, dtype=np.int64)
            for part in delivery.segments:
                source = values(part.source_rank * copies + part.source_copy, op.micro_batch)
                source_stop = part.source_start + part.stop - part.start
                expected[part.start : part.stop] = source[part.source_start : source_stop]
            receiver = int(one.graph.rank[delivery.receive]) * copies + delivery.copy
            assert (
                arrived[receiver, op].tolist() == expected[:32].tolist()
            )  # what is joined may be more than the tensor
    assert num_seen == len(arrived)


def test_a_receive_that_meets_the_announcement_of_a_shape_gets_no_tensor():
    rows = [[Row(parse_op("0SEND_META_F0"), 1)], [Row(parse_op("1RECV_F0"), 0, 0, 0, 16)]]
    one = graph_subject(graph_of(rows))
    assert one.graph.match.tolist() == [1, 0]
    assert events(one.graph, places_of(one)).classes.tolist() == [NONE]
    nothing = graph_subject(graph_of([[Row(parse_op("0F0"))]]))
    assert events(nothing.graph, places_of(nothing)).classes.tolist() == []


@pytest.mark.parametrize("transport", ["full", "partial"])
def test_micro_batches_and_replicas_are_one_class(transport):
    """Else each would be looked into: two boundaries, two directions, and without slices two members of a group."""
    one = subject(
        topology={"pp": 3, "tp": 2, "dp": 3},
        model={"num_layers": 6},
        schedule={"num_micro_batches": 5},
        transport=transport,
    )
    found = events(one.graph, places_of(one))
    num_receivers = 2 if transport == "full" else 1
    assert len(found.classes) == 2 * 2 * 3 * 5 * num_receivers
    assert len(set(found.classes.tolist())) == num_receivers
