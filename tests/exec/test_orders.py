"""Orders of sums that a plan declares, in the form of the reference."""

import pytest

from pipeproof.comm.accumulation_order import Accumulation, accumulation_of, sum_orders
from tests.plans import subject


def orders_of(**sections):
    plan = subject(**sections).plan
    return plan, sum_orders(plan)


def test_a_split_backward_adds_at_the_position_of_its_weight_gradient():
    programs = [["0F0", "0F1", "0I0", "0I1", "0W1", "0W0"], ["1F0", "1F1", "1I1", "1I0", "1W0", "1W1"]]
    plan, orders = orders_of(schedule={"kind": "custom", "num_micro_batches": 2, "programs": programs})
    assert orders.loss == ((0, 1),)
    assert orders.by_stage == {0: ((1, 0),), 1: ((0, 1),)}
    assert accumulation_of(plan) is Accumulation.REORDERED
    by_parameter = orders.by_parameter(plan)
    assert (by_parameter["embed.weight"], by_parameter["head.weight"]) == (((1, 0),), ((0, 1),))


@pytest.mark.parametrize("kind", ["zb_h1", "zb_h2", "optimal"])
def test_zero_bubble_schedules_add_in_order(kind):
    plan, orders = orders_of(schedule={"kind": kind})
    assert set(orders.by_stage.values()) == {((0, 1, 2, 3),)}
    assert accumulation_of(plan) is Accumulation.IN_ORDER


def test_copies_have_an_order_each():
    """Micro-batches shared out by hand, three to one; copies in the order of their ranks, whatever their stages."""
    programs = [
        ["0F0", "1F3", "1B3", "0F1", "0B0", "0F2", "0B1", "0B2"],
        ["1F0", "0F3", "1B0", "1F1", "0B3", "1B1", "1F2", "1B2"],
    ]
    schedule = {"kind": "custom", "placement": [[0, 1], [1, 0]], "programs": programs}
    plan, orders = orders_of(schedule=schedule)
    assert orders.loss == ((3,), (0, 1, 2))
    assert orders.by_stage == {0: ((0, 1, 2), (3,)), 1: ((3,), (0, 1, 2))}
    assert accumulation_of(plan) is Accumulation.TWO_COPIES


def test_sequence_splits_are_separate_work_items():
    plan, orders = orders_of(schedule={"kind": "seq1f1b", "num_sequence_splits": 2, "num_micro_batches": 2})
    assert orders.loss == ((0, 1, 2, 3),)
    assert orders.by_stage == {0: ((1, 0, 3, 2),), 1: ((1, 0, 3, 2),)}
    assert accumulation_of(plan) is Accumulation.REORDERED


@pytest.mark.parametrize("kind", ["dualpipe", "chimera"])
def test_every_copy_of_a_generated_schedule_has_its_half(kind):
    _, orders = orders_of(topology={"pp": 4}, schedule={"kind": kind, "num_micro_batches": 8})
    for copies in (orders.loss, *orders.by_stage.values()):
        assert [len(order) for order in copies] == [4, 4]
        assert sorted(copies[0] + copies[1]) == list(range(8))
