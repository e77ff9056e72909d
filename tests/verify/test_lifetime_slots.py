"""Pools of slots: the smallest number is enough, one less is not; generated plans have no finding."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeproof.schedule.op_table import Row, build_graph
from pipeproof.schedule.ops import OpKind, parse_op, wait_for
from pipeproof.verify.check_plan import check_subject
from pipeproof.verify.lifetime import RULES
from pipeproof.verify.lifetime.races import lifetimes
from pipeproof.verify.lifetime.slot_rule import pools, smallest_slots
from pipeproof.verify.subject import program_subject
from tests.plans import subject
from tests.verify.programs import codes


def lifetime_codes(one):
    return {finding.code for rule in RULES for finding in rule.check(one)}


@st.composite
def plans(draw):
    kind = draw(st.sampled_from(["gpipe", "1f1b", "interleaved"]))
    pp = draw(st.integers(2, 4))
    num_chunks = 2 if kind == "interleaved" else 1
    return {
        "model": {"num_layers": pp * num_chunks},
        "topology": {"pp": pp, "tp": draw(st.sampled_from([1, 2])), "sequence_parallel": draw(st.booleans())},
        "schedule": {
            "kind": kind,
            "num_micro_batches": pp * draw(st.integers(1, 3)) if kind == "interleaved" else draw(st.integers(1, 9)),
            "num_chunks": num_chunks,
        },
        "transport": draw(st.sampled_from(["full", "partial"])),
    }


@settings(max_examples=40, deadline=None)
@given(plans(), st.sampled_from(["after_backward", "after_send_done"]))
def test_generated_plans_have_no_finding(plan, release):
    assert lifetime_codes(subject(**plan, buffers={"free_output": release})) == set()


@settings(max_examples=40, deadline=None)
@given(plans(), st.sampled_from([("receive_slots", True), ("send_slots", False)]), st.integers(0, 3))
def test_the_smallest_number_is_enough_and_one_less_is_not(plan, pool, more):
    key, incoming = pool
    enough = smallest_slots(subject(**plan), incoming=incoming)
    assert lifetime_codes(subject(**plan, buffers={key: enough + more})) == set()
    assume(enough > 1)
    assert lifetime_codes(subject(**plan, buffers={key: enough - 1})) == {"PP504"}


def test_1f1b_holds_as_many_inputs_as_it_has_micro_batches_in_flight():
    one = subject(topology={"pp": 4}, schedule={"num_micro_batches": 8})
    assert smallest_slots(one, incoming=True) == 3  # rank 1 of 4
    assert smallest_slots(one, incoming=False) == 8  # backward sends are waited for at the end of the step


def test_a_gathered_slice_frees_its_slot_at_once():
    one = subject(topology={"pp": 4, "tp": 2}, schedule={"num_micro_batches": 8}, transport="partial")
    assert smallest_slots(one, incoming=True) == 1


def test_too_few_slots_name_the_owner_the_holder_and_the_smallest_number():
    one = subject(topology={"pp": 4}, schedule={"num_micro_batches": 8}, buffers={"receive_slots": 2})
    (found,) = check_subject(one).errors
    assert found.code == "PP504"
    assert "1RECV_F2 takes slot 0 of 2, which 1RECV_F0 holds until 1B0 is done with it" in found.message
    assert "needs 3 slots" in found.message
    assert found.help == "set buffers.receive_slots to 3, the smallest number that is enough for every channel"
    assert [op.op for op in found.witness.ops] == ["1RECV_F0", "1B0", "1RECV_F2"]


def with_backward_on_side_queue(*, wait_at):
    """Stage 1 of 2 runs 1B0 on a queue of its own; the compute queue waits for it ``wait_at`` operations later."""
    base = subject(schedule={"kind": "gpipe", "num_micro_batches": 4}, buffers={"receive_slots": 4})
    rows = base.graph.rows()
    at = next(i for i, row in enumerate(rows[1]) if row.op == parse_op("1B0"))
    rows[1][at : at + 1] = [
        Row(wait_for(parse_op("1F0")), queue="side"),
        Row(parse_op("1B0"), queue="side"),
    ]
    if wait_at is not None:
        rows[1].insert(at + 2 + wait_at, Row(wait_for(parse_op("1B0"))))
    return base.with_graph(build_graph(rows, base.graph.tensors, base.graph.groups))


def test_a_holder_on_another_queue_lets_go_where_it_is_waited_for():
    one = with_backward_on_side_queue(wait_at=0)
    assert lifetime_codes(one) == set()
    assert smallest_slots(one, incoming=True) == 4


def test_no_number_of_slots_helps_against_a_holder_that_reaches_into_the_next_step():
    one = with_backward_on_side_queue(wait_at=None)
    (found,) = next(rule for rule in RULES if rule.doc.code == "PP504").check(one)
    assert "1RECV_F0 takes slot 0 of 4 in the next step, which 1RECV_F0 holds until 1B0 is done" in found.message
    assert found.help == "wait for 1B0 at the end of the step"


def test_a_holder_on_another_queue_may_need_more_slots_than_the_program_shows():
    """1B0 comes before 1RECV_F1 in the program, and is waited for only after it."""
    base = subject(schedule={"num_micro_batches": 4})
    rows = base.graph.rows()
    at = next(i for i, row in enumerate(rows[1]) if row.op == parse_op("1B0"))
    rows[1][at : at + 1] = [Row(wait_for(parse_op("1F0")), queue="side"), Row(parse_op("1B0"), queue="side")]
    at = next(i for i, row in enumerate(rows[1]) if row.op == parse_op("1RECV_F2"))
    rows[1].insert(at, Row(wait_for(parse_op("1B0"))))
    one = base.with_graph(build_graph(rows, base.graph.tensors, base.graph.groups))
    pool, _ = pools(one, incoming=True)
    assert (pool.by_program, pool.smallest(lifetimes(one).order)) == (1, 2)
    assert smallest_slots(one, incoming=True) == 2


def test_a_peer_that_waits_for_an_answer_needs_fewer_slots_than_the_program_shows():
    """All three receives are posted first, but the third one begins when the second one is done, and that after 1B0."""
    one = program_subject(
        "rank 0: 0F0 0SEND_F0{peer=1} 0RECV_B0{peer=1} WAIT(0RECV_B0) 0F1 0SEND_F1{peer=1} 0F2 0SEND_F2{peer=1}\n"
        "rank 1: 1RECV_F0{peer=0} 1RECV_F1{peer=0} 1RECV_F2{peer=0} WAIT(1RECV_F0) 1F0 1B0 1SEND_B0{peer=0} "
        "WAIT(1RECV_F1) 1F1 1B1 WAIT(1RECV_F2) 1F2 1B2"
    )
    order = lifetimes(one).order
    found = [(pool.by_program, pool.smallest(order)) for pool in pools(one, incoming=True)]
    assert found == [(3, 2), (1, 1)]
    assert [one.graph.ops[pool.transfers[0]].kind for pool in pools(one, incoming=False)] == [
        OpKind.SEND_FORWARD, OpKind.SEND_BACKWARD,
    ]  # fmt: skip


def test_a_slice_holds_its_slot_until_it_is_gathered():
    one = program_subject(
        "tensor hidden: shape=8 dtype=float32 placement=invariant dims=s\n"
        "rank 0: 0F0 0SEND_F0{peer=1} 0F1 0SEND_F1{peer=1}\n"
        "rank 1: 1RECV_F0{peer=0} WAIT(1RECV_F0) 1RECV_F1{peer=0} WAIT(1RECV_F1) 1GATHER_F0{tensor=0 group=0} "
        "1GATHER_F1{tensor=0 group=0} 1F0 1F1\ngroup tp: 1"
    )
    (pool,) = pools(one, incoming=True)
    assert pool.smallest(lifetimes(one).order) == 2


@pytest.mark.parametrize("release", ["after_send_done", "after_send_posted"])
@pytest.mark.parametrize("transport", ["full", "partial"])
def test_an_output_may_be_released_after_the_wait_but_not_after_the_post(release, transport):
    one = subject(topology={"pp": 3, "tp": 2}, transport=transport, buffers={"free_output": release})
    frees = [str(op) for op in one.graph.ops if op.kind == "FREE"]
    assert len(frees) == 2 * 2 * 4  # on two stages, two tp ranks, four micro-batches
    assert frees[0] == ("FREE(0SEND_F0)" if transport == "full" else "FREE(0SLICE_F0)")
    assert codes(one) == (set() if release == "after_send_done" else {"PP503"})
