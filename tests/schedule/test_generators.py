import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.schedule import CHUNKED_GENERATORS, GENERATORS
from pipeproof.schedule.ops import OpKind

GOLDENS = json.loads((Path(__file__).parent / "fleet_schedules.json").read_text())

sizes = st.tuples(st.integers(1, 8), st.integers(1, 24))
kinds = st.sampled_from(sorted(GENERATORS))


def fleet_text(program):
    return "".join(f"{op.kind.lower()}{op.micro_batch};" for op in program)


@pytest.mark.parametrize("name", GOLDENS)
def test_equal_to_what_paddle_itself_generates(name):
    case = GOLDENS[name]
    programs = GENERATORS[case["kind"]](case["pp"], case["acc"])
    assert [fleet_text(program) for program in programs] == case["programs"]


@given(kinds, sizes)
def test_each_stage_runs_each_micro_batch_once_in_index_order(kind, size):
    num_ranks, num_micro_batches = size
    programs = GENERATORS[kind](num_ranks, num_micro_batches)
    assert len(programs) == num_ranks
    for stage, program in enumerate(programs):
        assert {op.stage for op in program} == {stage}
        for wanted in (OpKind.FORWARD, OpKind.BACKWARD):
            assert [op.micro_batch for op in program if op.kind is wanted] == list(range(num_micro_batches))


@given(sizes)
def test_1f1b_never_holds_more_than_its_warm_up_and_one(size):
    num_ranks, num_micro_batches = size
    for rank, program in enumerate(GENERATORS["1f1b"](num_ranks, num_micro_batches)):
        live = peak = 0
        for op in program:
            live += 1 if op.kind is OpKind.FORWARD else -1
            peak = max(peak, live)
        assert peak == min(num_micro_batches, num_ranks - rank)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(2, 4))
def test_interleaved_runs_every_chunk_in_order_and_forward_before_backward(num_ranks, rounds, num_chunks):
    num_micro_batches = rounds * num_ranks
    programs = CHUNKED_GENERATORS["interleaved"](num_ranks, num_micro_batches, num_chunks)
    for rank, program in enumerate(programs):
        for stage in range(rank, num_ranks * num_chunks, num_ranks):
            forwards = [op.micro_batch for op in program if op.stage == stage and op.kind is OpKind.FORWARD]
            backwards = [op.micro_batch for op in program if op.stage == stage and op.kind is OpKind.BACKWARD]
            assert forwards == backwards == list(range(num_micro_batches))
        warmup = next(i for i, op in enumerate(program) if op.kind is OpKind.BACKWARD) - 1
        assert warmup == min(
            2 * (num_ranks - 1 - rank) + (num_chunks - 1) * num_ranks, num_micro_batches * num_chunks - 1
        )


def test_interleaved_names_the_nearest_numbers_that_fit():
    with pytest.raises(ValueError, match="10 does not divide by that; use 8 or 12"):
        CHUNKED_GENERATORS["interleaved"](4, 10, 2)
