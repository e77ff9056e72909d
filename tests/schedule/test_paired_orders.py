"""Greedy schedules with pairs: complete, within memory, above the bound, never slower than what they know."""

from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.schedule.generators.one_f_one_b import in_rounds
from pipeproof.schedule.generators.optimal import best_order, optimal
from pipeproof.schedule.generators.paired_orders import (
    RULES,
    PairRule,
    orders_with_pairs,
    paired_list_schedule,
    with_late_weights,
    with_pairs,
)
from pipeproof.schedule.generators.workload import fits, make_workload
from pipeproof.schedule.ops import OpKind
from pipeproof.schedule.programs import Schedule, asap, even_costs, steady_pairs
from tests.schedule.workloads import loop, there_and_back, workloads

F, B, INPUT, W = OpKind.FORWARD, OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT


@st.composite
def paired(draw, **sizes):
    """The arguments of ``optimal``, in which pairs take from the longer computation to a little more than both."""
    placement, num_micro_batches, costs, limit = draw(workloads(**sizes))
    shares = draw(st.lists(st.fractions(0, Fraction(5, 4), max_denominator=4), min_size=1, max_size=3))

    def in_turns(forward, backward):
        one, other = costs.forward[forward], costs.backward_input[backward] + costs.backward_weight[backward]
        return max(one, other) + shares[(forward + backward) % len(shares)] * min(one, other)

    return placement, num_micro_batches, replace(costs, in_turns=in_turns), limit


def check_paired(schedule, placement, num_micro_batches):
    """All work once, in index order on each stage; pairs of a forward and a backward of other work."""
    for rank, (stages, program) in enumerate(zip(placement, schedule.programs, strict=True)):
        for stage in stages:
            for kinds in ((F,), (INPUT, B), (W, B)):
                mine = [op.micro_batch for op in program if op.kind in kinds and op.stage == stage]
                assert mine == list(range(num_micro_batches)), (stage, kinds)
        for place in schedule.pairs_of(rank):
            forward, backward = program[place : place + 2]
            assert (forward.kind, backward.kind) == (F, B)
            assert (forward.stage, forward.micro_batch) != (backward.stage, backward.micro_batch)


def test_a_round_robin_that_leaves_a_rank_without_a_chunk_is_not_interleaved():
    work = make_workload(((0, 2), (1,)), 2, costs_in_turns(3, 2), None)
    assert [*orders_with_pairs(work)] == []


@given(paired())
@settings(deadline=None, max_examples=80)
def test_any_work_is_scheduled_once_within_memory_and_never_slower_than_what_is_known(given_work):
    work = make_workload(*given_work)
    schedule = optimal(*given_work)
    known = [order for order in (best_order(work), *orders_with_pairs(work)) if fits(order, work)]
    makespan = asap(schedule, work.costs).makespan
    assert fits(schedule, work)
    assert makespan >= work.least_with_pairs()
    assert makespan <= min(asap(order, work.costs).makespan for order in known)
    if schedule not in known:
        check_paired(schedule, work.placement, work.num_micro_batches)


@given(paired(max_micro_batches=6))
@settings(deadline=None, max_examples=60)
def test_all_that_is_tried_ends_and_is_above_the_bound(given_work):
    work = make_workload(*given_work)
    tried = with_pairs(work, best_order(work))
    assert [timed.makespan for timed in tried] == sorted(timed.makespan for timed in tried)
    assert tried[0].makespan >= work.least_with_pairs()
    assert all(fits(timed.schedule, work) for timed in tried)


@given(paired(max_micro_batches=6), st.data())
@settings(deadline=None, max_examples=80)
def test_no_rule_for_pairs_ever_locks_memory(given_work, data):
    work = make_workload(*given_work)
    ahead = tuple(data.draw(st.integers(0, limit)) for limit in work.limits)
    for rule, patient in product(RULES, (False, True)):
        schedule = paired_list_schedule(work, PairRule(rule, ahead, patient))
        check_paired(schedule, work.placement, work.num_micro_batches)
        late = with_late_weights(work, schedule)
        check_paired(late, work.placement, work.num_micro_batches)
        assert fits(schedule, work)
        assert asap(late, work.costs).makespan


def costs_in_turns(num_stages, pair, **times):
    return replace(even_costs(num_stages, **times), in_turns=lambda forward, backward: pair)


def test_pairs_are_not_made_where_they_save_nothing():
    for pair in (3, 4):
        schedule = optimal(loop(4), 8, costs_in_turns(4, pair))
        assert not any(schedule.pairs)
        assert schedule == optimal(loop(4), 8, even_costs(4))


@pytest.mark.parametrize(
    ("placement", "num_micro_batches", "limit", "expected"),
    [
        (loop(1), 4, None, 1 + 3 * 2 + 2),  # one forward, pairs, and one backward: the bound
        (loop(4), 16, None, 42),
        (loop(4), 16, 8, 42),
        (loop(4), 16, 5, 51),  # without pairs
        (there_and_back(2), 8, None, 38),
    ],
)
def test_pairs_that_take_as_long_as_a_backward(placement, num_micro_batches, limit, expected):
    costs = costs_in_turns(sum(map(len, placement)), 2)
    assert asap(optimal(placement, num_micro_batches, costs, limit), costs).makespan == expected


def test_a_bound_is_reached_where_one_rank_has_all():
    work = make_workload(loop(1, 2), 6, costs_in_turns(2, 2), None)
    (best, *_) = with_pairs(work, best_order(work))
    assert best.makespan == work.least_with_pairs() == 2 + 10 * 2 + 4


def test_late_weights_fill_gaps_and_keep_the_pairs():
    """The last backwards hand on before their weight gradients, for which there is a gap later."""
    work = make_workload(loop(3), 4, costs_in_turns(3, 2), None)
    num_warmup = (3, 2, 1)
    programs = tuple(in_rounds(stage, num, 4) for stage, num in enumerate(num_warmup))
    order = Schedule(programs, steady_pairs(4, num_warmup))
    late = with_late_weights(work, order)
    assert [" ".join(map(str, program)) for program in late.programs] == [
        "0F0 0F1 0F2 0F3 0B0 0I1 0W1 0I2 0I3 0W2 0W3",
        "1F0 1F1 1F2 1B0 1F3 1B1 1I2 1I3 1W2 1W3",
        "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2I3 2W3",
    ]
    assert late.pairs == order.pairs
    assert (asap(late, work.costs).makespan, asap(order, work.costs).makespan) == (18, 19)


def test_the_same_work_has_the_same_schedule():
    costs = costs_in_turns(8, 2)
    assert optimal(loop(4, 2), 8, costs) == optimal(loop(4, 2), 8, costs)
    assert isinstance(optimal(loop(4, 2), 8, costs), Schedule)
