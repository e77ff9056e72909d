"""Solved schedules: equal to every order tried one by one, proved on the goldens, and the same in every run."""

import random
import sys
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.diagnostics.install_command import install_extra
from pipeproof.schedule.generators.gpipe import gpipe
from pipeproof.schedule.generators.one_f_one_b import one_f_one_b
from pipeproof.schedule.generators.optimal import optimal
from pipeproof.schedule.generators.solve import SolverMissingError, UnfitHintError, solve
from pipeproof.schedule.generators.workload import most_held
from pipeproof.schedule.ops import Op, OpKind, parse_op
from pipeproof.schedule.programs import Schedule, StageCosts, UnfitSizesError, asap, even_costs
from tests.schedule.workloads import anywhere, check_schedule, costs_of, loop, lower_bounds, there_and_back, workloads

pytestmark = pytest.mark.needs("ortools")

KINDS = (OpKind.FORWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT)


def checked(solution, *work):
    """The makespan of a solution whose schedule is complete, within memory and as long as it says."""
    assert check_schedule(solution.schedule, *work) == solution.makespan
    assert solution.bound <= solution.makespan
    assert solution.proved == (solution.gap == 0)
    return solution.makespan


@pytest.mark.parametrize(("limit", "expected"), [(4, 27), (3, 31), (2, 41), (1, 72)])
def test_four_ranks_and_eight_micro_batches_with_times_of_one_are_proved(limit, expected):
    work = loop(4), 8, even_costs(4), limit
    solution = solve(*work, time_limit_s=5)
    assert checked(solution, *work) == solution.bound == expected


def programs(*texts):
    return Schedule(tuple(tuple(map(parse_op, text.split())) for text in texts))


def merged(chains):
    if not any(chains):
        yield ()
    for place, chain in enumerate(chains):
        if chain:
            rest = [*chains[:place], chain[1:], *chains[place + 1 :]]
            for order in merged(rest):
                yield (chain[0], *order)


def shortest(placement, num_micro_batches, costs, limit):
    """The shortest makespan over all orders of all ranks, micro-batches in any order too."""
    orders = [
        [
            program
            for program in merged(
                [[Op(kind, stage, k) for kind in KINDS] for stage in stages for k in range(num_micro_batches)]
            )
            if limit is None or most_held([program])[0] <= limit
        ]
        for stages in placement
    ]
    best = None
    for programs in product(*orders):
        try:
            makespan = asap(Schedule(programs), costs).makespan
        except ValueError:  # these orders wait for each other
            continue
        best = makespan if best is None else min(best, makespan)
    return best


@given(st.sampled_from([(loop(2), 2), (((0, 1), (2,)), 1), (((0, 2), (1,)), 1)]), st.data())
@settings(deadline=None, max_examples=25)
def test_no_order_is_shorter_not_even_with_micro_batches_out_of_order(sizes, data):
    placement, num_micro_batches = sizes
    most = num_micro_batches * max(map(len, placement))
    work = (
        placement,
        num_micro_batches,
        data.draw(costs_of(sum(map(len, placement)))),
        data.draw(st.sampled_from([None, *range(max(map(len, placement)), most + 1)])),
    )
    solution = solve(*work, time_limit_s=5)
    assert solution.proved
    assert checked(solution, *work) == shortest(*work)


@given(workloads(anywhere(3, 5), max_micro_batches=5))
@settings(deadline=None, max_examples=25)
def test_it_lies_between_the_bounds_and_the_greedy_schedule(work):
    solution = solve(*work, time_limit_s=1)
    makespan = checked(solution, *work)
    assert max(lower_bounds(*work[:3])) <= solution.bound
    assert makespan <= asap(optimal(*work), work[2]).makespan


@pytest.mark.slow
def test_the_greedy_schedule_is_close_to_the_shortest():
    draw = random.Random(1)
    ratios = []
    for _ in range(20):
        placement = draw.choice([loop(draw.randint(2, 4)), loop(draw.randint(2, 3), 2), there_and_back(3)])
        stages = range(sum(map(len, placement)))
        costs = StageCosts(*([draw.randint(5, 9) for _ in stages] for _ in range(3)), draw.choice([0, 1, 3]))
        least = max(map(len, placement))
        work = placement, draw.randint(2, 6), costs, draw.randint(least, least * len(placement))
        solution = solve(*work, time_limit_s=0.3)
        if solution.proved:
            ratios.append(asap(optimal(*work), costs).makespan / solution.makespan)
    assert len(ratios) > 15
    assert max(ratios) < 1.1
    assert sum(ratios) / len(ratios) < 1.015


def test_more_memory_never_makes_the_shortest_longer():
    costs = StageCosts((3, 2, 4), (2, 3, 3), (2, 2, 1), 1)
    makespans = [solve(loop(3), 6, costs, limit, time_limit_s=5) for limit in (1, 2, 3, 4, 6, None)]
    assert all(solution.proved for solution in makespans)
    assert [s.makespan for s in makespans] == sorted((s.makespan for s in makespans), reverse=True)
    assert makespans[0].makespan > makespans[2].makespan > makespans[-1].makespan


def test_a_rank_may_have_a_limit_of_its_own():
    costs = even_costs(3)
    tight = solve(loop(3), 6, costs, (1, 3, 3), time_limit_s=5)
    assert most_held(tight.schedule.programs)[0] == 1
    assert tight.makespan > solve(loop(3), 6, costs, 3, time_limit_s=5).makespan


HARD = loop(3, 2), 6, StageCosts([7, 9, 8, 6, 9, 7], [9, 6, 7, 8, 8, 7], [6, 5, 7, 8, 5, 6], 2), 3


def test_it_is_the_same_in_every_run_when_time_ends_before_the_proof():
    first, second = (solve(*HARD, time_limit_s=0.2) for _ in range(2))
    assert not first.proved
    assert 0 < first.gap < 1
    assert (first.schedule, first.bound) == (second.schedule, second.bound)


@pytest.mark.slow
def test_every_improvement_is_told():
    reported = []
    solution = solve(*HARD, time_limit_s=0.2, on_progress=reported.append)
    makespans, bounds = ([getattr(progress, name) for progress in reported] for name in ("makespan", "bound"))
    assert len(reported) > 1
    assert makespans == sorted(makespans, reverse=True)
    assert bounds == sorted(bounds)
    assert makespans[-1] >= solution.makespan
    assert bounds[-1] <= solution.bound


def test_without_time_the_greedy_schedule_comes_back():
    solution = solve(*HARD, time_limit_s=1e-6)
    assert solution.schedule == optimal(*HARD)
    assert not solution.proved


def test_it_begins_with_a_hint_that_is_better_than_the_greedy_schedule():
    work = loop(4), 8, even_costs(4), 3
    best = solve(*work, time_limit_s=5).schedule
    assert asap(best, work[2]).makespan < asap(optimal(*work), work[2]).makespan
    assert solve(*work, time_limit_s=1e-6, hint=best).schedule == best


def test_a_hint_that_is_worse_does_no_harm():
    work = loop(3), 4, even_costs(3), None
    assert solve(*work, hint=gpipe(3, 4)).makespan == solve(*work).makespan


@pytest.mark.parametrize(
    ("hint", "message"),
    [
        (one_f_one_b(3, 2), "does not compute"),
        (one_f_one_b(2, 1), "does not compute"),
        (gpipe(2, 3), "does not compute"),
        (programs("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1W0 1F1 1I1"), "does not compute"),
        (programs("0F0 0I0 0W0 0F1 0I1 0W1", "1F0 1F1 1I0 1W0 1I1 1W1"), "cannot finish: .*rank 0 at 0I0"),
    ],
)
def test_a_hint_that_is_no_solution_is_refused(hint, message):
    with pytest.raises(UnfitHintError, match=message):
        solve(loop(2), 2, even_costs(2), hint=hint)


def test_a_hint_that_needs_more_memory_is_refused():
    with pytest.raises(UnfitHintError, match="than the memory limit allows: 5 on rank 0, 5 on rank 1"):
        solve(loop(2), 5, even_costs(2), 3, hint=gpipe(2, 5))


def test_times_with_too_many_digits_are_refused():
    costs = StageCosts((Fraction(1, 2**31 - 1), 1), (1, Fraction(1, 2**19 - 1)), (1, 1))
    with pytest.raises(UnfitSizesError, match="so many digits"):
        solve(loop(2), 3, costs)


def test_without_the_solver_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(SolverMissingError) as error:
        solve(loop(2), 3, even_costs(2))
    (finding,) = error.value.findings
    assert finding.code == "PP142"
    assert finding.help == install_extra("solve")
