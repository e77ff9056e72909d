"""Properties of every kind of schedule: all work once, in order, on time, and refusals that name sizes that fit."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import assume, given, settings

from pipeproof.schedule.kinds import _CONDITIONS, ANY_SIZES, SCHEDULE_KINDS, Placement, Request, sizes_of
from pipeproof.schedule.ops import Op, OpKind
from pipeproof.schedule.programs import Schedule, UnfitSizesError, asap, even_costs, stages_of
from pipeproof.specs.schedule import ScheduleName
from tests.schedule.drawn import generated, requests

F, B, INPUT, W = OpKind.FORWARD, OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT
few = settings(deadline=None)


def work(schedule, kind):
    """(stage, micro-batch, split) of all operations of a kind, over all ranks."""
    return sorted(
        (op.stage, op.micro_batch, op.split or 0) for program in schedule.programs for op in program if op.kind is kind
    )


def test_plans_can_name_every_kind():
    assert set(get_args(ScheduleName)) == {*SCHEDULE_KINDS, "custom", "file"}


@given(requests())
@settings(few, max_examples=300)
def test_all_work_is_done_once(drawn):
    kind, request = drawn
    schedule = generated(kind, request)
    num_stages = 1 + max(op.stage for program in schedule.programs for op in program)
    units = [
        (stage, micro_batch, split)
        for stage in range(num_stages)
        for micro_batch in range(request.num_micro_batches)
        for split in range(request.num_sequence_splits)
    ]
    assert num_stages == request.num_ranks * request.num_chunks
    assert len(schedule.programs) == request.num_ranks
    assert work(schedule, F) == units
    assert sorted(work(schedule, B) + work(schedule, INPUT)) == units
    assert work(schedule, INPUT) == work(schedule, W)


@given(requests())
@settings(few, max_examples=300)
def test_every_schedule_finishes_and_never_runs_ahead_of_what_it_needs(drawn):
    """For any times of stages: the order on each rank is the order of start times, which `asap` derives from the
    inputs."""
    kind, request = drawn
    schedule = generated(kind, request)
    timed = asap(schedule, request.costs)
    started = {
        (op.kind, op.stage, op.micro_batch, op.split): (start, end)
        for program, starts, ends in zip(schedule.programs, timed.starts, timed.ends, strict=True)
        for op, start, end in zip(program, starts, ends, strict=True)
    }
    for (made, stage, micro_batch, split), (start, _) in started.items():
        forward = started[F, stage, micro_batch, split]
        if made in (B, INPUT):
            assert start >= forward[1]
        if made is W:
            assert start >= started[INPUT, stage, micro_batch, split][1]


@given(requests())
@settings(few, max_examples=300)
def test_the_number_of_computations_is_known_before_generating(drawn):
    kind, request = drawn
    schedule = generated(kind, request)
    num_items = request.num_ranks * request.num_chunks * request.num_micro_batches * request.num_sequence_splits
    assert sum(map(len, schedule.programs)) == kind.num_computations(request.num_ranks, num_items)


def head(schedule, rank, costs):
    """When a rank can begin at the earliest, where all micro-batches enter at the first stage."""
    holder = {op.stage: r for r, program in enumerate(schedule.programs) for op in program}
    first = min(op.stage for op in schedule.programs[rank])
    crossings = sum(holder[stage] != holder[stage + 1] for stage in range(first))
    return sum(costs.forward[:first]) + crossings * costs.latency


@given(requests())
@settings(few, max_examples=200)
def test_no_schedule_that_is_fed_at_one_end_is_shorter_than_any_ranks_head_and_work(drawn):
    kind, request = drawn
    assume(kind.placement is not Placement.BOTH_WAYS)
    schedule = generated(kind, request)
    timed = asap(schedule, request.costs)
    for rank in range(request.num_ranks):
        assert timed.makespan >= head(schedule, rank, request.costs) + timed.busy(rank)


def test_a_schedule_that_is_fed_at_both_ends_may_be_shorter():
    """4 ranks, 8 micro-batches, unit costs: 3 units until a single front reaches the last rank, and 24 of work."""
    schedule = SCHEDULE_KINDS["dualpipe"].generate(Request(4, 8))
    assert asap(schedule, even_costs(4)).makespan == 26 < 3 + 8 * 3


@given(requests())
@settings(few, max_examples=200)
def test_stages_are_placed_as_in_the_table(drawn):
    kind, request = drawn
    p, chunks = request.num_ranks, range(request.num_chunks)
    expected = {
        "loop": lambda rank: [chunk * p + rank for chunk in chunks],
        "any": lambda rank: [chunk * p + rank for chunk in chunks],
        "v": lambda rank: [chunk * p + (p - 1 - rank if chunk % 2 else rank) for chunk in chunks],
        "both_ways": lambda rank: {rank, p - 1 - rank} if request.num_micro_batches > 1 else {rank},
    }[kind.placement]
    placement = stages_of(generated(kind, request).programs)
    assert placement == tuple(tuple(sorted(expected(rank))) for rank in range(p))


@given(requests())
@settings(few, max_examples=200)
def test_a_pair_is_a_forward_with_a_backward_behind_it(drawn):
    kind, request = drawn
    schedule = generated(kind, request)
    for rank, program in enumerate(schedule.programs):
        for place in schedule.pairs_of(rank):
            assert program[place].kind is F
            assert program[place + 1].kind in (B, INPUT)
            assert place + 1 not in schedule.pairs_of(rank)


_NUMBER = re.compile(r"\d+")
_FIELD = {"num_micro_batches": "num_micro_batches", "pp": "num_ranks", "num_chunks": "num_chunks"}


def sizes(kind):
    for num_ranks in range(1, 7):
        for num_micro_batches in range(1, 3 * num_ranks + 2):
            for num_chunks in range(kind.min_chunks, min(3, kind.max_chunks or 3) + 1):
                for variant in kind.variants or (None,):
                    yield Request(num_ranks, num_micro_batches, num_chunks, variant=variant)


@pytest.mark.parametrize("name", [name for name in SCHEDULE_KINDS if name != "optimal"])  # which takes any size
def test_a_refusal_names_a_value_that_fits(name):
    kind = SCHEDULE_KINDS[name]
    for request in sizes(kind):
        refusal = refusal_of(kind, request)
        field = None if refusal is None else _FIELD.get(refusal.key[-1])
        if field is not None:
            offered = [int(number) for number in _NUMBER.findall(refusal.help)]
            assert any(not refusal_of(kind, replace(request, **{field: n})) for n in offered), (request, refusal.help)


def refusal_of(kind, request):
    """Why the generator refuses the sizes; None where it takes them."""
    try:
        kind.generate(request)
    except UnfitSizesError as error:
        return error
    return None


def test_asap_names_where_it_is_stuck():
    crossed = Schedule(((Op(F, 0, 0), Op(B, 0, 0)), (Op(B, 1, 0), Op(F, 1, 0))))
    with pytest.raises(ValueError, match="rank 0 at 0B0, rank 1 at 1B0"):
        asap(crossed, even_costs(2))


VARIANTS = [(kind, variant) for kind in SCHEDULE_KINDS.values() for variant in kind.variants or (None,)]


@pytest.mark.parametrize(("kind", "variant"), VARIANTS, ids=lambda value: getattr(value, "name", str(value)))
def test_a_schedule_exists_exactly_where_its_condition_holds(kind, variant):
    condition = sizes_of(kind.name, variant)
    for p in range(1, 7):
        for m in range(1, 4 * p + 2):
            for num_chunks in {kind.min_chunks, min(kind.min_chunks + 1, kind.max_chunks or kind.min_chunks + 1)}:
                try:
                    kind.generate(Request(p, m, num_chunks, variant=variant))
                    exists = True
                except UnfitSizesError:
                    exists = False
                holds = condition == ANY_SIZES or eval(condition, {"p": p, "m": m, "max": max})
                assert exists == holds, (p, m, num_chunks)


def test_conditions_are_of_kinds_and_variants_that_there_are():
    assert set(_CONDITIONS) <= {(kind.name, variant) for kind, variant in VARIANTS}
