"""Everything is computed once, in order, by its owner, from tensors that really come."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.schedule.op_table import NONE, Row
from pipeproof.schedule.ops import OpKind, parse_op
from pipeproof.schedule.programs import Schedule
from pipeproof.verify.completeness import is_training
from pipeproof.verify.subject import compute_table
from tests.plans import subject
from tests.verify.programs import codes, errors, mutated, program, remove, tensor


def chunked(**schedule):
    """Two ranks with two stages each."""
    return subject(schedule={"kind": "interleaved", "num_chunks": 2, **schedule})


def messages(one):
    return [finding.message for finding in errors(one)]


# --- the table ---


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from("FBIW"), st.integers(0, 3), st.integers(0, 2)), max_size=20)
)
def test_the_table_counts_what_the_programs_say(ops):
    ranks = [[f"{stage}{kind}{micro_batch}" for r, kind, stage, micro_batch in ops if r == rank] for rank in range(3)]
    graph = program(*map(" ".join, ranks)).graph
    table = compute_table(graph)
    cells = sorted({(rank, stage, micro_batch) for rank, _, stage, micro_batch in ops})
    assert list(zip(table.rank, table.stage, table.work_item, strict=True)) == cells
    for entry, (rank, stage, micro_batch) in enumerate(cells):
        ids = [i for i in graph.rank_ops(rank) if (graph.stage[i], graph.work_item[i]) == (stage, micro_batch)]
        assert table.ops(entry) == ids
        for kind in table.count:
            of_kind = [i for i in ids if graph.ops[i].kind is kind]
            assert table.count[kind][entry] == len(of_kind)
            assert table.first[kind][entry] == (of_kind[0] if of_kind else NONE)
        first = [i for i in ids if graph.ops[i].kind in (OpKind.BACKWARD, OpKind.BACKWARD_INPUT)]
        assert table.first_backward[entry] == (first[0] if first else NONE)
    everywhere = np.array([(r, s, m) for r in range(3) for s in range(-1, 5) for m in range(-1, 4)]).T
    found = table.find(*everywhere).tolist()
    assert found == [cells.index(tuple(cell)) if tuple(cell) in cells else NONE for cell in everywhere.T.tolist()]


def test_numbers_too_high_for_the_table_are_refused():
    graph = program(f"{2**31}F{2**31}", "0F0").graph
    with pytest.raises(OverflowError, match="too high"):
        compute_table(graph)


# --- once, in order, by the owner ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0F0 0B0 0F1 0B1", set()),
        ("0F0 0I0 0W0 0F1 0I1 0W1", set()),
        ("0F0 0I0 0F1 0I1 0W0 0W1", set()),
        ("0F0 0B0 0F1 0I1 0W1", set()),  # whole and split backwards may be mixed
        ("0F0 0F1", set()),  # an evaluation
        ("0F0 0F1 0B0", {"PP121"}),
        ("0F0 0I0 0F1 0I1 0W1", {"PP121"}),
        ("0F0 0W0 0F1 0I1 0W1", {"PP121"}),
        ("0F0 0W0 0F1", {"PP121"}),  # a single weight gradient makes it training
        ("0F0 0F0 0B0", {"PP122"}),
        ("0F0 0B0 0I0 0W0", {"PP122"}),
        ("0F0 0I0 0W0 0W0", {"PP122"}),
        ("0F0 0B0 0W0", {"PP121", "PP122"}),  # B in addition to either part alone is too much already
        ("0F0 0B0 0I0 0F1 0B1", {"PP121", "PP122"}),
        ("0F0.s0 0F0.s1 0B0.s1 0B0.s0", set()),
        ("0F0.s0 0F0.s1 0I0.s1 0I0.s0 0W0.s0 0W0.s1", set()),  # W reads the results of I, of its own split alone
        ("0F0.s0 0F0.s1 0F1.s0 0F1.s1 0B1.s1 0B1.s0 0B0.s1 0B0.s0", set()),  # micro-batches in any order
        ("0F0.s1 0F0.s0 0B0.s1 0B0.s0", {"PP129"}),
        ("0F0.s0 0F0.s1 0I0.s0 0I0.s1 0W0.s0 0W0.s1", {"PP129"}),
        ("0B0 0F0", {"PP123"}),
        ("0I0 0F0 0W0", {"PP123"}),
        ("0F0 0W0 0I0", {"PP123"}),
        ("0F0.s0 0B0.s1 0B0.s0", {"PP121"}),  # a split without a forward is missing, not out of order
        ("0F0 0F1{batch=0} 0B0{batch=0} 0B1", set()),  # a pair that is overlapped rightly
    ],
)
def test_programs_of_one_rank(text, expected):
    assert codes(program(text)) == expected


@pytest.mark.parametrize("stranger", ["0F2", "2F0", "0F7", "9F0", "9F7"])
def test_work_that_no_copy_has_is_foreign(stranger):
    """Beyond the last stage, the last micro-batch, or both: with copies, a table gives the rank of each stage."""
    base = subject(topology={"pp": 2}, schedule={"kind": "chimera", "num_micro_batches": 2})
    assert codes(base) == set()
    mutant = mutated(base, lambda all_rows: all_rows[1].append(Row(parse_op(stranger))))
    assert "PP124" in codes(mutant)


def test_replicas_run_every_micro_batch_and_copies_share_them_out():
    whole, half = "0F0 0B0 0F1 0B1", ("0F0 0B0", "0F1 0B1")
    assert codes(program(whole, whole)) == set()
    assert codes(program(*half)) == set()
    assert messages(program(whole, half[0])) == ["rank 1 never runs 0F1 and 0B1"]
    three = ("0F0 0B0 2F2 2B2", "2F0 2B0 2F1 2B1")  # nobody computes micro-batches 1 and 2 on stage 0
    assert messages(program(*three)) == ["rank 0 never runs 0F1 and 0B1", "rank 0 never runs 0F2 and 0B2"]


def test_an_evaluation_owes_no_backward_but_a_plan_that_trains_does():
    def forward_only(all_rows):
        for mine in all_rows:
            mine[:] = [row for row in mine if row.op.kind is OpKind.FORWARD]

    base = subject(topology={"pp": 1})
    assert is_training(base)
    assert codes(mutated(base, forward_only)) == {"PP121"}
    assert not is_training(program("0F0", "1F0"))
    assert is_training(program("0F0 0W0"))
    evaluation = dataclasses.replace(base.lowered, schedule=Schedule(((parse_op("0F0"), parse_op("0F1")),)))
    assert not is_training(dataclasses.replace(base, lowered=evaluation))


def test_a_program_with_more_or_fewer_micro_batches_than_the_data_has():
    """A schedule that was built with another number than the argument of the call."""
    fewer, more = (subject(topology={"pp": 1}, schedule={"num_micro_batches": n}) for n in (3, 5))
    base = subject(topology={"pp": 1})
    assert codes(base.with_graph(fewer.graph)) == {"PP121"}
    assert codes(base.with_graph(more.graph)) == {"PP124"}
    assert "micro-batches 0..3, but runs 0F4, 0B4" in messages(base.with_graph(more.graph))[0]


def test_a_stage_of_another_rank_is_named_next_to_all_that_the_rank_owns():
    base = chunked()
    mutant = mutated(base, lambda all_rows: all_rows[1].append(Row(parse_op("2F0"))))
    assert codes(mutant) == {"PP124"}
    assert "owns stages 1, 3 and micro-batches 0..3, but runs 2F0" in messages(mutant)[0]


def test_a_stage_that_nobody_has_is_foreign_by_any_number():
    """With four stages in the table, 4F0 of rank 0 has the key of 1F0 of rank 1, unless the table grows with it."""
    mutant = mutated(subject(), lambda all_rows: all_rows[0].append(Row(parse_op("4F0"))))
    assert "rank 0 (pp 0) owns stage 0 and micro-batches 0..3, but runs 4F0" in messages(mutant)


# --- handovers ---


def drop_a_message(all_rows):
    remove(all_rows[0], "0SEND_F3", "WAIT(0SEND_F3)")
    remove(all_rows[1], "1RECV_F3", "WAIT(1RECV_F3)")


def drop_a_gradient(all_rows):
    remove(all_rows[1], "1SEND_B2", "WAIT(1SEND_B2)")
    remove(all_rows[0], "0RECV_B2", "WAIT(0RECV_B2)")


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (drop_a_message, "rank 1 (pp 1) runs 1F3 without what 0SEND_F3 would send and 1RECV_F3 receive"),
        (drop_a_gradient, "rank 0 (pp 0) runs 0B2 without what 1SEND_B2 would send and 0RECV_B2 receive"),
    ],
)
def test_a_tensor_that_is_never_sent(change, reported):
    mutant = mutated(subject(), change)
    assert "PP125" in codes(mutant)
    (found,) = [finding for finding in errors(mutant) if finding.code == "PP125"]
    assert found.message.startswith(reported)
    assert len(found.witness.ops) == 3


@pytest.mark.parametrize("missing", ["0SEND_F3", "1RECV_F3", "1SEND_B3", "0RECV_B3"])
def test_one_end_without_the_other_is_for_the_rule_on_counterparts(missing):
    mutant = mutated(subject(), lambda all_rows: remove(all_rows[int(missing[0])], missing))
    assert "PP301" in codes(mutant)
    assert not codes(mutant) & {"PP125", "PP126"}


def test_a_message_that_is_mistaken_is_for_the_rule_on_identity():
    """Rank 1 receives a tensor of a stage that it does not own, and rank 0 sends another one."""
    assert codes(program(RIGHT[0], RIGHT[1].replace("1RECV", "5RECV"))) == {"PP302"}


def forget_all(all_rows):
    """Drop every message and wait."""
    for mine in all_rows:
        mine[:] = [row for row in mine if row.peer == NONE and row.op.target is None]


def test_of_a_boundary_with_several_tensors_at_least_one_must_cross():
    hidden = {"name": "hidden", "dims": "sbh"}
    base = subject(boundaries=[hidden, {**hidden, "name": "more"}], topology={"pp": 3}, model={"num_layers": 3})
    missing = [f.message for f in errors(mutated(base, forget_all)) if f.code == "PP125"]
    assert sorted(message.split()[5] for message in missing) == sorted(
        [f"{stage}F{i}" for stage in (1, 2) for i in range(4)] + [f"{stage}B{i}" for stage in (0, 1) for i in range(4)]
    )


def test_what_is_never_sent_is_missing_on_the_ranks_of_its_own_replica():
    def drop_of_second(all_rows):
        remove(all_rows[1], "0SEND_F3", "WAIT(0SEND_F3)")
        remove(all_rows[3], "1RECV_F3", "WAIT(1RECV_F3)")

    mutant = mutated(subject(topology={"dp": 2}), drop_of_second)
    (found,) = [finding for finding in errors(mutant) if finding.code == "PP125"]
    assert [(op.rank, op.op) for op in found.witness.ops] == [(1, "0SEND_F3"), (3, "1RECV_F3"), (3, "1F3")]


def test_what_a_rank_should_have_made_itself_is_not_owed_by_a_message():
    base = subject(topology={"pp": 2}, schedule={"kind": "zb_v", "num_chunks": 2, "num_micro_batches": 4})
    assert codes(base) == set()
    found = codes(mutated(base, lambda all_rows: remove(all_rows[1], "1F2")))  # before stage 2 of the same rank
    assert "PP121" in found
    assert "PP125" not in found


def test_a_gradient_that_comes_twice_and_a_receive_that_meets_nothing():
    first, second = "0F0 0SEND_F0! 0RECV_B0! 0RECV_B0! 0B0", "1RECV_F0! 1F0 1B0 1SEND_B0! 1SEND_B0!"
    texts = [re.sub(r"(\S+)!", rf"\1{{peer={peer}}} WAIT(\1)", text) for text, peer in ((first, 1), (second, 0))]
    (found,) = [finding for finding in errors(program(*texts)) if finding.code == "PP126"]
    assert found.message == "rank 0 receives 0RECV_B0 again: the same elements of the same tensor have come already"
    assert "PP126" not in codes(program("0F0 5RECV_F0{peer=1}", "4F0"))


MEMBERS = (tensor("hidden", member="hidden"), tensor("mask", member="mask"))


def with_mask(*, second):
    """Two micro-batches of two tensors each; the second one's mask is sent or not."""
    hidden, mask = "{peer=%d tensor=0 range=0..8}", "{peer=%d tensor=1 range=0..8}"
    sends = f"0SEND_F0{hidden} 0SEND_F0{mask} 0SEND_F1{hidden}" + f" 0SEND_F1{mask}" * second
    receives = f"1RECV_F0{hidden} 1RECV_F0{mask} 1RECV_F1{hidden}" + f" 1RECV_F1{mask}" * second
    waits = ["WAIT(%s0)", "WAIT(%s0)", "WAIT(%s1)", "WAIT(%s1)"][: 3 + second]
    return program(
        f"0F0 0F1 {sends.replace('%d', '1')} {' '.join(waits).replace('%s', '0SEND_F')}",
        f"{receives.replace('%d', '0')} {' '.join(waits).replace('%s', '1RECV_F')} 1F0 1F1",
        tensors=MEMBERS,
    )


def test_every_tensor_of_a_boundary_comes_for_every_micro_batch():
    assert codes(with_mask(second=True)) == set()
    mutant = with_mask(second=False)
    assert codes(mutant) == {"PP125"}
    assert "1F1 without `mask`, 0SEND_F1 to 1RECV_F1" in messages(mutant)[0]


RIGHT = ("0F0 0SEND_F0{peer=1} WAIT(0SEND_F0)", "1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0")


@pytest.mark.parametrize(
    ("ranks", "reported"),
    [
        (("1F0 0SEND_F0{peer=1} WAIT(0SEND_F0)", RIGHT[1]), "rank 0 sends 0SEND_F0, but has no part in stage 0"),
        ((RIGHT[0], "1RECV_F0{peer=0} WAIT(1RECV_F0) 2F0"), "rank 1 receives 1RECV_F0, but has no part in stage 1"),
        (
            (
                "0F0 0SEND_F0{peer=1} 0SEND_F0{peer=1} WAIT(0SEND_F0) WAIT(0SEND_F0)",
                "1RECV_F0{peer=0} 1RECV_F0{peer=0} WAIT(1RECV_F0) WAIT(1RECV_F0) 1F0",
            ),
            "rank 1 receives 1RECV_F0 again",
        ),
        (  # the last stage hands its output to a stage that does not exist
            (
                "0F0 0SEND_F0{peer=1} 2RECV_F0{peer=1} WAIT(0SEND_F0) WAIT(2RECV_F0)",
                "1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0 1SEND_F0{peer=0} WAIT(1SEND_F0)",
            ),
            "rank 0 receives 2RECV_F0, but has no part in stage 2",
        ),
    ],
)
def test_a_message_without_a_place_in_the_pipeline(ranks, reported):
    assert codes(program(*RIGHT)) == set()
    mutant = program(*ranks)
    assert codes(mutant) == {"PP126"}
    assert messages(mutant)[0].startswith(reported)


def test_a_tensor_may_come_in_parts_but_each_part_once():
    large = tensor(shape=(2**40,))
    halves = [f"range={part * 2**39}..{(part + 1) * 2**39}" for part in (0, 1)]

    def of(*parts):
        sends = " ".join(f"0SEND_F0{{peer=1 tensor=0 {part}}}" for part in parts)
        receives = " ".join(f"1RECV_F0{{peer=0 tensor=0 {part}}}" for part in parts)
        waits = [" ".join([f"WAIT({op})"] * len(parts)) for op in ("0SEND_F0", "1RECV_F0")]
        return program(f"0F0 {sends} {waits[0]}", f"{receives} {waits[1]} 1F0", tensors=(large,))

    assert codes(of(*halves)) == set()
    again = of(*halves, halves[0])
    assert codes(again) == {"PP126"}
    assert len(errors(again)) == 1


def test_a_rank_that_computes_nothing_is_not_described_and_not_blamed():
    assert codes(program("0SEND_F0{peer=1} WAIT(0SEND_F0)", "1RECV_F0{peer=0} WAIT(1RECV_F0)")) == set()


V_TURN = "0F0 1F0 1B0 0B0 0STEP 1STEP"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (V_TURN, set()),
        ("1F0 0F0 1B0 0B0 0STEP 1STEP", {"PP127"}),
        ("0F0 1F0 0B0 1B0 0STEP 1STEP", {"PP127"}),
        ("0F0 1F0 0I0 1I0 0W0 1W0 0STEP 1STEP", {"PP127"}),
        ("0F0 1F0 1B0 0B0 0STEP", {"PP128"}),
        ("0F0 1F0 1B0 0B0 0STEP 1STEP 1STEP", {"PP128"}),
        ("0F0 1F0 1B0 0B0 0STEP 1STEP 2STEP", {"PP128"}),
        ("0F0 1F0 1B0 0B0", set()),  # the caller steps
        ("0STEP", set()),  # the computations of the rank are not described
        ("0STEP 0STEP", {"PP128"}),
    ],
)
def test_two_stages_of_one_rank(text, expected):
    assert codes(program(text)) == expected


def test_the_turn_of_a_v_schedule_needs_no_message():
    """Stages 0 and 3 are on rank 0, 1 and 2 on rank 1: between 1 and 2 nothing is sent."""
    outer = (
        "0F0 0SEND_F0{peer=1} 3RECV_F0{peer=1} WAIT(3RECV_F0) 3F0 3B0 3SEND_B0{peer=1} 0RECV_B0{peer=1} "
        "WAIT(0RECV_B0) WAIT(0SEND_F0) 0B0 WAIT(3SEND_B0)"
    )
    inner = (
        "1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0 2F0 2SEND_F0{peer=0} 2RECV_B0{peer=0} WAIT(2RECV_B0) WAIT(2SEND_F0) 2B0 "
        "1B0 1SEND_B0{peer=0} WAIT(1SEND_B0)"
    )
    assert codes(program(outer, inner)) == set()


@settings(max_examples=30, deadline=None)
@given(
    pp=st.integers(1, 3),
    chunks=st.integers(2, 3),
    groups=st.integers(1, 3),
    tp=st.sampled_from([1, 2]),
    dp=st.integers(1, 2),
    transport=st.sampled_from(["full", "partial"]),
)
def test_generated_plans_with_several_stages_on_a_rank_are_right(pp, chunks, groups, tp, dp, transport):
    one = subject(
        model={"num_layers": pp * chunks},
        topology={"pp": pp, "tp": tp, "dp": dp},
        schedule={"kind": "interleaved", "num_chunks": chunks, "num_micro_batches": pp * groups},
        transport=transport,
    )
    assert codes(one) == set()
