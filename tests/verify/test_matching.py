"""Matching: both ends of a message, and members of a collective, agree in identity, contents and shapes."""

import dataclasses
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.schedule.op_table import NONE, EdgeKind, Group, Row, build_graph
from pipeproof.schedule.ops import SEND_KINDS, TRANSFER_KINDS, Op, parse_op
from pipeproof.verify import collectives
from pipeproof.verify import fifo_matching as matching
from pipeproof.verify.fifo_matching import partner_of
from pipeproof.verify.message_contents import has_holes, memory_order
from tests.plans import subject
from tests.verify import matching_definition
from tests.verify.programs import codes, errors, finding_of, group, mutated, place, program, remove, replace_row, tensor

# --- transfers ---


def test_every_transfer_and_its_partner_mean_each_other():
    for kind in TRANSFER_KINDS:
        transfer = Op(kind, 3, 5)
        partner = partner_of(transfer)
        assert partner_of(partner) == transfer
        assert (partner.kind in SEND_KINDS) != (kind in SEND_KINDS)
        assert partner.is_forward == transfer.is_forward
    assert str(partner_of(parse_op("2SEND_META_B1"))) == "1RECV_META_B1"


TWO_CHUNKS = (
    (
        "0F0 0SEND_F0{w} 0F1 0SEND_F1{w} 2RECV_F0{w} WAIT(2RECV_F0) 2F0 2SEND_F0{w} "
        "2RECV_F1{w} 2RECV_B0{w} WAIT(2RECV_F1) WAIT(2RECV_B0) 2F1 2SEND_F1{w} 2B0 2SEND_B0{w} "
        "2RECV_B1{w} WAIT(2RECV_B1) 2B1 2SEND_B1{w} 0RECV_B0{w} WAIT(0RECV_B0) 0B0 0RECV_B1{w} WAIT(0RECV_B1) 0B1 "
        "WAIT(0SEND_F0) WAIT(0SEND_F1) WAIT(2SEND_F0) WAIT(2SEND_F1) WAIT(2SEND_B0) WAIT(2SEND_B1)"
    ).replace("w}", "peer=1 communicator=world}"),
    (
        "1RECV_F0{w} WAIT(1RECV_F0) 1F0 1SEND_F0{w} 1RECV_F1{w} WAIT(1RECV_F1) 1F1 3RECV_F0{w} WAIT(3RECV_F0) 3F0 3B0 "
        "1SEND_F1{w} 3SEND_B0{w} 3RECV_F1{w} WAIT(3RECV_F1) 3F1 3B1 3SEND_B1{w} 1RECV_B0{w} WAIT(1RECV_B0) 1B0 "
        "1SEND_B0{w} 1RECV_B1{w} WAIT(1RECV_B1) 1B1 1SEND_B1{w} "
        "WAIT(1SEND_F0) WAIT(1SEND_F1) WAIT(3SEND_B0) WAIT(3SEND_B1) WAIT(1SEND_B0) WAIT(1SEND_B1)"
    ).replace("w}", "peer=0 communicator=world}"),
)
"""Two ranks with two stages each on one communicator: each is next and previous to the other."""


def test_an_activation_received_as_a_gradient():
    base = program(*TWO_CHUNKS)
    assert codes(base) == set()

    def swap(rows):
        first, second = place(rows[0], "2RECV_F1"), place(rows[0], "2RECV_B0")
        rows[0][first], rows[0][second] = rows[0][second], rows[0][first]

    mutant = mutated(base, swap)
    assert codes(mutant) == {"PP302"}
    reported = [finding.message for finding in errors(mutant)]
    assert "1SEND_F1 and means 2RECV_F1, but the receive there is 2RECV_B0" in reported[0]
    assert "3SEND_B0 and means 2RECV_B0, but the receive there is 2RECV_F1" in reported[1]


MEMBERS = (tensor("hidden out", member="hidden"), tensor("mask out", member="mask"))
PAIR = (
    "0F0 0SEND_F0{peer=1 tensor=0 range=0..8} 0SEND_F0{peer=1 tensor=1 range=0..8} WAIT(0SEND_F0) WAIT(0SEND_F0)",
    "1RECV_F0{peer=0 tensor=0 range=0..8} 1RECV_F0{peer=0 tensor=1 range=0..8} WAIT(1RECV_F0) WAIT(1RECV_F0) 1F0",
)


def test_the_members_of_a_tuple_come_in_the_order_in_which_they_are_sent():
    assert codes(program(*PAIR, tensors=MEMBERS)) == set()
    first, second = "tensor=0", "tensor=1"
    other_order = PAIR[1].replace(first, "tensor=?").replace(second, first).replace("tensor=?", second)
    mutant = program(PAIR[0], other_order, tensors=MEMBERS)
    assert codes(mutant) == {"PP302"}
    message = errors(mutant)[0].message
    assert "0SEND_F0 of `hidden`" in message
    assert "1RECV_F0 of `mask`" in message


def one_message(sent, wanted, *, count=None):
    """One activation from stage 0 to stage 1 between two tensors, whole on both sides unless ``count`` is smaller."""
    return program(
        f"0F0 0SEND_F0{{peer=1 tensor=0 range=0..{count or sent.numel}}} WAIT(0SEND_F0)",
        f"1RECV_F0{{peer=0 tensor=1 range=0..{count or wanted.numel}}} WAIT(1RECV_F0) 1F0",
        tensors=(sent, wanted),
    )


BASE = tensor("hidden", (8, 2, 4))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, set()),
        ({"name": "another name"}, set()),
        ({"shape": (16, 2, 4)}, {"PP303"}),  # a sequence not divided by its context-parallel ranks
        ({"shape": (4, 4, 4)}, {"PP303"}),  # as many elements in another shape
        ({"dims": "bsh"}, {"PP303"}),
        ({"dtype": "bfloat16"}, {"PP304"}),
        ({"placement": "sharded(0)"}, {"PP305"}),
        ({"strides": (8, 4, 1)}, set()),
        ({"strides": (1, 8, 16)}, {"PP312"}),
    ],
)
def test_two_ends_of_one_message_that_differ(changes, expected):
    assert codes(one_message(BASE, dataclasses.replace(BASE, **changes))) == expected
    assert codes(one_message(dataclasses.replace(BASE, **changes), BASE)) == expected


def test_an_end_that_names_no_tensor_is_compared_by_its_size_alone():
    ranks = (
        "0F0 0SEND_F0{peer=1 tensor=0 range=0..8} WAIT(0SEND_F0)",
        "1RECV_F0{peer=0 range=0..%d} WAIT(1RECV_F0) 1F0",
    )
    assert codes(program(ranks[0], ranks[1] % 8, tensors=(tensor(),))) == set()
    short = program(ranks[0], ranks[1] % 4, tensors=(tensor(),))
    assert "PP303" in codes(short)
    reported = "0SEND_F0 on rank 0 sends 8 elements of s [8], but 1RECV_F0 on rank 1 expects 4 elements"
    assert finding_of(short, "PP303").message == reported


def test_a_part_may_be_taken_from_another_place_than_it_is_put():
    text = (
        "0F0 0SEND_F0{peer=1 tensor=0 range=4..8} WAIT(0SEND_F0)",
        "1RECV_F0{peer=0 tensor=0 range=%s} WAIT(1RECV_F0) 1F0",
    )
    assert "PP303" not in codes(program(text[0], text[1] % "0..4", tensors=(tensor(),)))
    longer = program(text[0], text[1] % "0..8", tensors=(tensor(),))
    assert "sends 4 elements of s [8], but" in finding_of(longer, "PP303").message


def test_parts_between_unlike_layouts_are_left_to_the_rules_on_transports():
    """A message that is a part of a tensor may be one of several that change the layout."""
    wide = dataclasses.replace(BASE, shape=(16, 2, 4), placement="invariant")
    share = dataclasses.replace(BASE, placement="sharded(0)")
    turned = dataclasses.replace(BASE, placement="sharded(1)")  # as many elements, cut another way
    longer = dataclasses.replace(share, shape=(16, 2, 4))  # cut the same way, over fewer ranks
    for wanted in (wide, turned, longer):
        part = one_message(share, wanted, count=BASE.numel // 2)
        assert not codes(part) & {"PP303", "PP305"}
    assert codes(one_message(share, turned)) == {"PP305"}
    assert not codes(one_message(share, wide, count=BASE.numel)) & {"PP303", "PP305"}  # whole at one end
    reshaped = dataclasses.replace(share, shape=(4, 4, 4))
    assert "PP303" in codes(one_message(share, reshaped, count=BASE.numel // 2))
    assert codes(one_message(share, dataclasses.replace(share, placement="invariant"))) == {"PP305"}


def test_an_end_with_holes_and_an_end_without_a_tensor():
    holed = dataclasses.replace(BASE, strides=(16, 4, 1))
    assert codes(one_message(BASE, holed)) == codes(one_message(holed, BASE)) == {"PP312"}
    for sent, expected in ((0, set()), (1, {"PP312"})):
        unnamed = program(
            f"0F0 0SEND_F0{{peer=1 tensor={sent} range=0..8}} WAIT(0SEND_F0)",
            "1RECV_F0{peer=0 range=0..8} WAIT(1RECV_F0) 1F0",
            tensors=(tensor(strides=(1,)), tensor(strides=(2,))),
        )
        assert codes(unnamed) == expected


def test_both_ends_may_lie_in_memory_in_the_same_other_order():
    turned = dataclasses.replace(BASE, strides=(1, 8, 16))
    assert codes(one_message(turned, turned)) == set()
    holed = dataclasses.replace(BASE, strides=(16, 4, 1))
    assert codes(one_message(holed, holed)) == {"PP312"}
    assert "with holes" in errors(one_message(holed, holed))[0].message
    with pytest.raises(ValueError, match="3 dims and 2 strides"):
        codes(one_message(BASE, dataclasses.replace(BASE, strides=(4, 1))))


@given(st.permutations([0, 1, 2]), st.lists(st.integers(1, 4), min_size=3, max_size=3))
def test_dense_strides_have_no_holes_and_those_of_a_slice_do(order, shape):
    strides, step = [0, 0, 0], 1
    for dim in order:
        strides[dim], step = step, step * shape[dim]
    dense = tensor(shape=shape, strides=tuple(strides))
    assert not has_holes(dense)
    assert len(memory_order(dense)) == sum(size > 1 for size in shape)
    sliced = tensor(shape=shape, strides=tuple(2 * stride for stride in strides))
    assert has_holes(sliced) == (dense.numel > 1)


# --- announced shapes ---

LENGTHS = (tensor("short", (4,)), tensor("long", (8,)))


def with_meta(announce_second, second=1):
    """Two micro-batches, the second of another length; its shape is announced, or the first one's kept."""
    size = LENGTHS[second].numel
    meta = "", "", ""
    if announce_second:
        meta = (
            f"0SEND_META_F1{{peer=1 tensor={second}}}",
            "1RECV_META_F1{peer=0} WAIT(1RECV_META_F1)",
            "WAIT(0SEND_META_F1)",
        )
    return program(
        f"0SEND_META_F0{{peer=1 tensor=0}} 0F0 0SEND_F0{{peer=1 tensor=0 range=0..4}} {meta[0]} 0F1 "
        f"0SEND_F1{{peer=1 tensor={second} range=0..{size}}} WAIT(0SEND_META_F0) WAIT(0SEND_F0) {meta[2]} "
        "WAIT(0SEND_F1)",
        "1RECV_META_F0{peer=0 tensor=0} WAIT(1RECV_META_F0) 1RECV_F0{peer=0 tensor=0 range=0..4} WAIT(1RECV_F0) 1F0 "
        f"{meta[1]} 1RECV_F1{{peer=0 tensor={second} range=0..{size}}} WAIT(1RECV_F1) 1F1",
        tensors=LENGTHS,
    )


def test_a_shape_that_is_announced_once_must_not_change():
    assert codes(with_meta(announce_second=True)) == set()
    assert codes(with_meta(announce_second=False, second=0)) == set()
    stale = with_meta(announce_second=False)
    assert codes(stale) == {"PP313"}
    (found,) = errors(stale)
    assert "1RECV_F1 on rank 1 gets float32 s [8], but 1RECV_META_F0 announced float32 s [4]" in found.message
    assert [op.op for op in found.witness.ops] == ["1RECV_META_F0", "1RECV_F1"]


def test_announcements_of_tuple_members_and_of_other_inputs_do_not_mix():
    mask = (tensor("hidden", (8,), member="hidden"), tensor("mask", (2,), member="mask"))
    right = program(
        "0SEND_META_F0{peer=1 tensor=0} 0SEND_META_F0{peer=1 tensor=1} 0F0 0SEND_F0{peer=1 tensor=0 range=0..8} "
        "0SEND_F0{peer=1 tensor=1 range=0..2} WAIT(0SEND_META_F0) WAIT(0SEND_META_F0) WAIT(0SEND_F0) WAIT(0SEND_F0)",
        "1RECV_META_F0{peer=0} 1RECV_META_F0{peer=0} WAIT(1RECV_META_F0) WAIT(1RECV_META_F0) "
        "1RECV_F0{peer=0 tensor=0 range=0..8} 1RECV_F0{peer=0 tensor=1 range=0..2} WAIT(1RECV_F0) WAIT(1RECV_F0) 1F0",
        tensors=mask,
    )
    assert codes(right) == set()

    def keep_to_itself(rows):
        """The mask's shape is not announced: the receiver knows it."""
        del rows[0][1], rows[1][1]
        remove(rows[0], "WAIT(0SEND_META_F0)")
        remove(rows[1], "WAIT(1RECV_META_F0)")

    assert codes(mutated(right, keep_to_itself)) == set()


def test_an_exchange_of_shapes_on_another_communicator_meets_nothing():
    base = with_meta(announce_second=True)
    change = lambda rows: replace_row(rows[0], "0SEND_META_F1", communicator="default")  # noqa: E731
    assert "PP301" in codes(mutated(base, change))


# --- collectives ---


def tp_plan(**sections):
    return subject(topology={"pp": 2, "tp": 2}, **sections)


def test_a_collective_of_another_dtype_or_root():
    tensors = (tensor(), tensor("half", dtype="bfloat16"))
    text = "0F0 0ALL_REDUCE0:tp{group=0 range=0..8 tensor=%d reduction=sum}"
    both = (group("tp", 0, 1),)
    assert codes(program(text % 0, text % 0, tensors=tensors, groups=both)) == set()
    mixed = program(text % 0, text % 1, tensors=tensors, groups=both)
    assert codes(mixed) == {"PP306"}
    assert "in float32 (sum) on rank 0 but 0ALL_REDUCE0:tp of 8 elements in bfloat16 (sum)" in errors(mixed)[0].message
    text = "0F0 0BROADCAST0:tp{group=0 range=0..8 peer=%d}"
    assert codes(program(text % 1, text % 1, groups=both)) == set()
    assert codes(program(text % 0, text % 1, groups=both)) == {"PP306"}


def test_members_along_pp_are_of_unlike_stages():
    """A gradient norm over all stages, a barrier of all: each rank names its own stage."""
    text = "{0}F0 {0}B0 {0}ALL_REDUCE:pp{{group=0 range=0..1 reduction=sum}} {0}BARRIER:pp{{group=0}}"
    alone = [text.format(stage) for stage in (0, 1)]
    assert codes(program(*alone, groups=(group("pp", 0, 1),))) == set()
    dropped = alone[0], alone[1].replace("1BARRIER:pp{group=0}", "")
    assert "PP306" in codes(program(*dropped, groups=(group("pp", 0, 1),)))


def test_all_members_agree_on_a_group_of_another_axis():
    """A statistic of one stage over the default group: nothing hangs, every stage gets all stages' maximum."""
    text = "{0}F0 {0}ALL_REDUCE0:{1}{{group=0 range=0..1 reduction=max}}"
    right = program(text.format(0, "tp"), text.format(0, "tp"), groups=(group("tp", 0, 1),))
    assert codes(right) == set()
    mutant = program(text.format(0, "tp"), text.format(0, "tp"), groups=(group("dp", 0, 1),))
    assert codes(mutant) == {"PP307"}
    assert errors(mutant)[0].message == "rank 0 issues 0ALL_REDUCE0:tp on the dp group [0, 1], and 1 more there"
    alone = program(text.format(0, "tp"), groups=(group("dp", 0),))
    assert [finding.message for finding in errors(alone)] == ["rank 0 issues 0ALL_REDUCE0:tp on the dp group [0]"]
    of_stages = program(text.format(0, "pp"), text.format(1, "pp"), groups=(group("pp", 0, 1),))
    assert codes(of_stages) == set()


def test_a_collective_on_a_stranger_s_group():
    text = "0F0 0ALL_REDUCE0:tp{group=0 range=0..8}"
    assert codes(program(text, text, text, groups=(group("tp", 0, 1, 2),))) == set()
    mutant = program(text, text, text, groups=(group("tp", 0, 1),))
    assert codes(mutant) == {"PP308"}
    reported = "rank 2 issues 0ALL_REDUCE0:tp on the tp group [0, 1], which lacks it"
    assert [finding.message for finding in errors(mutant)] == [reported]
    again = program(text, text, f"{text} 0ALL_REDUCE0:tp{{group=0}}", groups=(group("tp", 0, 1),))
    assert f"{reported}, and 1 more" in [finding.message for finding in errors(again)]
    assert codes(program("0F0 0ALL_REDUCE0:tp")) == set()  # a graph alone may leave the group out


def test_a_plan_s_collective_needs_a_group():
    def forget(rows):
        for rank in (0, 1):
            replace_row(rows[rank], "0F0/1.ALL_REDUCE:tp", group=NONE)

    mutant = mutated(tp_plan(), forget)
    assert codes(mutant) == {"PP308"}
    assert all(" issues 0F0/1.ALL_REDUCE:tp on no group" in finding.message for finding in errors(mutant))


# --- two writings ---


@st.composite
def broken(draw):
    """A right plan with up to six rows moved, dropped, doubled or sent elsewhere."""
    base = subject(
        topology={"pp": 2, "tp": draw(st.sampled_from([1, 2]))},
        schedule=draw(
            st.sampled_from(
                [
                    {"kind": "gpipe", "num_micro_batches": 2},
                    {"kind": "1f1b", "num_micro_batches": 3},
                    {"kind": "interleaved", "num_chunks": 2, "num_micro_batches": 2},
                ]
            )
        ),
        transport=draw(st.sampled_from(["full", "partial"])),
    )
    rows = base.graph.rows()
    for _ in range(draw(st.integers(0, 6))):
        mine = rows[draw(st.integers(0, len(rows) - 1))]
        at = draw(st.integers(0, len(mine) - 1))
        match draw(st.sampled_from(["move", "drop", "double", "reroute"])):
            case "move":
                row = mine.pop(at)
                mine.insert(draw(st.integers(0, len(mine))), row)
            case "drop":
                del mine[at]
            case "double":
                mine.insert(draw(st.integers(0, len(mine))), mine[at])
            case "reroute" if mine[at].op.kind in TRANSFER_KINDS:
                mine[at] = dataclasses.replace(mine[at], communicator=draw(st.sampled_from(["forward", "world"])))
    return base.with_graph(build_graph(rows, base.graph.tensors, base.graph.groups))


@settings(max_examples=120, deadline=None)
@given(broken())
def test_matching_is_the_same_on_the_graph_and_on_the_columns(one):
    graph = one.graph
    assert matching_definition.matched(graph.nx) == {tuple(pair) for pair in graph.edges[EdgeKind.MATCH].tolist()}
    unmatched, identity = ({rule.doc.code: rule.check for rule in matching.RULES}[code] for code in ("PP301", "PP302"))
    alone = [op.op_id for finding in unmatched(one) for op in finding.witness.ops if op.op_id is not None]
    left_over = matching_definition.unmatched(graph.nx)
    ends = lambda ops: Counter((int(graph.channel[i]), graph.ops[i].kind in SEND_KINDS) for i in ops)  # noqa: E731
    assert ends(alone) == ends(left_over)  # as many of each end; those without a counterpart, not the last ones
    for op_id in alone:
        here = [op for i, op in enumerate(graph.ops) if graph.channel[i] == graph.channel[op_id]]
        assert here.count(graph.ops[op_id]) > here.count(partner_of(graph.ops[op_id]))
    wrong = {tuple(op.op_id for op in finding.witness.ops) for finding in identity(one)}
    assert wrong == matching_definition.mismatched(graph.nx)


@settings(max_examples=80, deadline=None)
@given(broken())
def test_collectives_are_the_same_on_the_graph_and_on_the_columns(one):
    graph = one.graph
    members = {index: group.ranks for index, group in enumerate(graph.groups)}
    (collective,) = [rule for rule in collectives.RULES if rule.doc.code == "PP306"]
    reported = [finding.message for finding in collective.check(one)]
    expected = matching_definition.out_of_order(graph.nx, members)
    assert len(reported) == len(expected)
    for index, rank in expected:
        assert any(f"group {list(members[index])}" in text and text.endswith(f"on rank {rank}") for text in reported)


# --- tables of the graph ---


@pytest.mark.parametrize(
    ("ranks", "message"),
    [((), "no members"), ((0, 0), "a member twice"), ((0, 2), "a member that is not a rank 0..1")],
)
def test_a_group_that_cannot_be_is_refused(ranks, message):
    with pytest.raises(ValueError, match=rf"group 1 \(tp\) has {message}"):
        build_graph([[Row(parse_op("0F0"))], []], (), (Group("tp", (0, 1)), Group("tp", ranks)))


def test_stages_without_experts_next_to_stages_with_them():
    """The ranks of a dense stage issue no all-to-all; the ranks of the other stage agree among themselves."""
    experts = "1F0 1F0/0.ALL_TO_ALL:ep{group=1 range=0..8} 1F0/1.ALL_TO_ALL:ep{group=1 range=0..8}"
    one = program("0F0", "0F0", experts, experts, groups=(group("ep", 0, 1), group("ep", 2, 3)))
    assert codes(one) == set()
    permuted = experts.replace("/0.", "/?.").replace("/1.", "/0.").replace("/?.", "/1.")
    one = program("0F0", "0F0", experts, permuted, groups=(group("ep", 0, 1), group("ep", 2, 3)))
    assert codes(one) == {"PP306"}
