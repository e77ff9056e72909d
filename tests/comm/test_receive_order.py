"""Receives are posted in the order of the sends, whatever the order in which a rank uses what comes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.check_plan import check, check_subject
from tests.plans import plan_dict, subject

USED_BACKWARDS = [
    ["0F0", "0F1", "0B1", "0B0"],
    ["1F1", "1F0", "1B0", "1B1"],
]
"""Rank 0 sends 0 then 1 and rank 1 works on 1 first; rank 1 sends back 0 first and rank 0 works on 1 first."""


def custom(programs, **sections):
    num_micro_batches = 1 + max(int(op[2:]) for program in programs for op in program)
    schedule = {"kind": "custom", "programs": programs, "num_micro_batches": num_micro_batches}
    return subject(schedule=schedule, **sections)


def test_an_earlier_message_is_received_before_the_one_that_is_needed():
    graph = custom(USED_BACKWARDS).graph
    on_rank_1 = [str(graph.ops[i]) for i in graph.rank_ops(1)]
    assert on_rank_1[:6] == ["1RECV_F0", "1RECV_F1", "WAIT(1RECV_F1)", "1F1", "WAIT(1RECV_F0)", "1F0"]
    assert check_subject(custom(USED_BACKWARDS)).certificate is not None


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 2, "dp": 2}])
@pytest.mark.parametrize("transport", ["full", "partial"])
def test_on_every_mesh_and_transport(mesh, transport):
    assert check_subject(custom(USED_BACKWARDS, topology={"pp": 2, **mesh}, transport=transport)).certificate


orders = st.integers(1, 5).flatmap(lambda m: st.tuples(*[st.permutations(range(m))] * 4))


@given(orders)
@settings(deadline=None)
def test_any_order_of_use_is_proved(drawn):
    """Every rank does its forwards and its backwards in an order of its own."""
    first, second, third, fourth = drawn
    programs = [
        [*(f"0F{k}" for k in first), *(f"0B{k}" for k in second)],
        [*(f"1F{k}" for k in third), *(f"1B{k}" for k in fourth)],
    ]
    assert check_subject(custom(programs)).errors == ()


def test_where_a_send_is_missing_the_rules_say_so():
    programs = [["0F0", "0B1", "0B0"], ["1F1", "1F0", "1B0", "1B1"]]
    assert {f.code for f in check_subject(custom(programs)).errors} >= {"PP121"}


def test_fleets_balanced_order_of_a_last_group_that_is_not_full():
    """2 ranks, 4 chunks, 7 micro-batches: gradients come in another order than they are used."""
    sizes = {"num_chunks": 4, "num_micro_batches": 7}
    plan = plan_dict(model={"num_layers": 8}, schedule={"kind": "interleaved", "variant": "fleet_balanced", **sizes})
    report = check(plan_from_dict(plan))
    assert report.errors == ()
    assert any(posts for posts in report.subject.plan.receives)
