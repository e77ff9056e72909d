"""The greedy schedule: complete, within memory, above every bound, and never slower than the orders it knows."""

from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeproof.schedule.generators.list_schedule import Priority, Rule, Weights, list_schedule
from pipeproof.schedule.generators.one_f_one_b import one_f_one_b
from pipeproof.schedule.generators.optimal import optimal
from pipeproof.schedule.generators.workload import in_index_order, make_workload, most_held
from pipeproof.schedule.generators.zb_h1 import zb_h1
from pipeproof.schedule.kinds import SCHEDULE_KINDS, Request
from pipeproof.schedule.programs import StageCosts, UnfitSizesError, asap, even_costs, stages_of
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.check_plan import check
from tests.plans import plan_dict
from tests.schedule.workloads import check_schedule, costs_of, loop, lower_bounds, there_and_back, workloads


def makespan(placement, num_micro_batches, costs, limit=None):
    return check_schedule(
        optimal(placement, num_micro_batches, costs, limit), placement, num_micro_batches, costs, limit
    )


@given(workloads())
@settings(deadline=None, max_examples=60)
def test_any_work_is_scheduled_once_within_memory_and_no_faster_than_the_bounds(work):
    placement, num_micro_batches, costs, _ = work
    assert makespan(*work) >= max(lower_bounds(placement, num_micro_batches, costs))


@given(workloads())
@settings(deadline=None, max_examples=40)
def test_no_rule_ever_locks_memory_and_every_one_keeps_its_limit(work):
    workload = make_workload(*work)
    for priority, weights, oldest_first, reserve in product(Priority, Weights, (False, True), (0, 8)):
        rule = Rule(priority, weights, oldest_first=oldest_first, patience=1, reserve=reserve)
        found = list_schedule(workload, rule)
        assert check_schedule(found.schedule(), *work) * workload.ticks_per_unit <= found.makespan


@pytest.mark.parametrize(("limit", "expected"), [(4, 27), (3, 32), (2, 41), (1, 72)])
def test_four_ranks_and_eight_micro_batches_with_times_of_one(limit, expected):
    """The optima are 27, 31, 41 and 72."""
    assert makespan(loop(4), 8, even_costs(4), limit) == expected


def test_without_a_limit_a_pipeline_of_equal_stages_has_no_bubble_but_the_first_forwards():
    assert makespan(loop(8), 32, even_costs(8)) == 3 * 32 + 7


@given(st.integers(1, 6), st.integers(1, 12), st.data())
@settings(deadline=None, max_examples=60)
def test_never_slower_than_1f1b_or_zb_h1_in_their_own_memory(num_ranks, num_micro_batches, data):
    costs = data.draw(costs_of(num_ranks))
    for known in (one_f_one_b, zb_h1):
        schedule = known(num_ranks, num_micro_batches)
        limits = most_held(schedule.programs)
        found = makespan(loop(num_ranks), num_micro_batches, costs, limits)
        assert found <= asap(schedule, costs).makespan, (known.__name__, limits)


@given(
    st.sampled_from(["eager_1f1b", "zb_h2", "interleaved", "interleaved_zb", "zb_v", "v_half", "v_min"]),
    st.integers(1, 5),
    st.integers(1, 10),
    st.data(),
)
@settings(deadline=None, max_examples=60)
def test_never_slower_than_the_kinds_it_knows_in_their_own_memory(name, num_ranks, num_micro_batches, data):
    kind = SCHEDULE_KINDS[name]
    variant = kind.variants[0] if kind.variants else None
    try:
        schedule = kind.generate(Request(num_ranks, num_micro_batches, kind.min_chunks, variant=variant))
    except UnfitSizesError:
        assume(False)
    costs = data.draw(costs_of(num_ranks * kind.min_chunks))
    found = makespan(stages_of(schedule.programs), num_micro_batches, costs, max(most_held(schedule.programs)))
    assert found <= asap(schedule, costs).makespan


def test_the_limit_counts_to_the_end_of_w():
    """Freed at I, ZB-H1's last rank holds one activation; to the end of W, four."""
    schedule = zb_h1(4, 8)
    timed = asap(schedule, even_costs(4))
    assert makespan(loop(4), 8, even_costs(4), (4, 4, 4, 4)) == timed.makespan
    assert makespan(loop(4), 8, even_costs(4), (4, 3, 2, 1)) > timed.makespan


def test_latency_is_hidden_by_more_forwards_ahead():
    costs = even_costs(4, latency=2)
    one_by_one = asap(one_f_one_b(4, 16), costs).makespan
    assert makespan(loop(4), 16, costs, 4) < one_by_one
    assert makespan(loop(4), 16, costs, 8) < makespan(loop(4), 16, costs, 4)


@given(workloads(max_micro_batches=5), st.fractions(Fraction(1, 7), 7, max_denominator=7))
@settings(deadline=None, max_examples=20)
def test_the_unit_of_time_does_not_matter(work, factor):
    placement, num_micro_batches, costs, limit = work
    scaled = StageCosts(
        *(
            tuple(time * factor for time in part)
            for part in (costs.forward, costs.backward_input, costs.backward_weight)
        ),
        costs.latency * factor,
    )
    assert optimal(placement, num_micro_batches, costs, limit) == optimal(placement, num_micro_batches, scaled, limit)


def test_overlapped_times_are_not_read():
    costs = even_costs(4)
    assert optimal(loop(4), 5, costs, 3) == optimal(loop(4), 5, replace(costs, overlapped=(1, 1, 1, 1)), 3)


def test_index_order_never_delays_and_never_needs_more():
    """Breadth-first backwards run from the last micro-batch."""
    costs = StageCosts((1, 2, 1, 3), (2, 1, 1, 2), (1, 1, 2, 1), 1)
    schedule = SCHEDULE_KINDS["looped_bfs"].generate(Request(2, 6, 2))
    renamed = replace(schedule, programs=in_index_order(schedule.programs))
    assert most_held(renamed.programs) == most_held(schedule.programs)
    assert check_schedule(renamed, loop(2, 2), 6, costs, None) < asap(schedule, costs).makespan


@pytest.mark.parametrize(
    ("placement", "limit", "message", "help"),
    [
        (there_and_back(2), 1, "rank 0 has 2 stages and may hold 1", "allow 2 or more"),
        (((0,), (1, 2)), (3, 1), "rank 1 has 2 stages and may hold 1", "allow 2 or more"),
        (((0, 1), (1, 0)), None, "stage 0 is on rank 0 and on rank 1", "place each stage once"),
    ],
)
def test_what_no_schedule_exists_for(placement, limit, message, help):
    with pytest.raises(UnfitSizesError, match=message) as error:
        optimal(placement, 4, even_costs(3 if placement[0] == (0,) else 4 if limit else 2), limit)
    assert help in error.value.help


@pytest.mark.parametrize(
    ("placement", "num_micro_batches", "costs", "limit", "message"),
    [
        (((0,), (2,)), 4, even_costs(2), None, "stage 1 is on no rank"),
        (((0,), ()), 4, even_costs(1), None, "rank 1 has no stage"),
        (loop(2), 0, even_costs(2), None, "0 micro-batches"),
        (loop(2), 4, even_costs(3), None, "forward has 3 times for 2 stages"),
        (loop(2), 4, even_costs(2, backward_weight=-1), None, "backward_weight is -1"),
        (loop(2), 4, even_costs(2, forward=0), None, "a forward takes time"),
        (loop(2), 4, even_costs(2), (2, 2, 2), "3 memory limits for 2 ranks"),
    ],
)
def test_what_is_no_work(placement, num_micro_batches, costs, limit, message):
    with pytest.raises(ValueError, match=message):
        optimal(placement, num_micro_batches, costs, limit)


@pytest.mark.parametrize(
    "schedule",
    [
        {"num_micro_batches": 8, "memory_limit": 3},
        {"num_micro_batches": 3, "num_chunks": 2, "memory_limit": 2, "placement": "v"},
        {"num_micro_batches": 5, "memory_limit": 4, "placement": [[0, 1, 6], [3], [2, 7], [4, 5]]},
    ],
)
def test_plans_with_it_pass_the_check(schedule):
    plan = plan_dict(
        model={"num_layers": 8},
        topology={"pp": 4},
        schedule={"kind": "optimal", **schedule},
        cost={"forward_us": 3, "backward_input_us": 2, "backward_weight_us": 1, "p2p_latency_us": 1},
    )
    report = check(plan_from_dict(plan))
    assert not [finding for finding in report.findings if finding.severity == "error"]
