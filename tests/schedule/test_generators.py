"""Properties of every generator without variants, and of GPipe and 1F1B in particular."""

from hypothesis import given
from hypothesis import strategies as st

from pipeproof.schedule.kinds import SCHEDULE_KINDS, Request
from pipeproof.schedule.ops import COMPUTE_KINDS, Op, OpKind
from pipeproof.schedule.programs import asap, even_costs, stage_ops

sizes = st.tuples(st.integers(1, 8), st.integers(1, 24))


def made(kind, num_ranks, num_micro_batches):
    return SCHEDULE_KINDS[kind].generate(Request(num_ranks, num_micro_batches))


@given(st.sampled_from(["gpipe", "1f1b", "eager_1f1b"]), sizes)
def test_each_stage_runs_each_micro_batch_once_in_index_order(kind, size):
    num_ranks, num_micro_batches = size
    programs = made(kind, *size).programs
    assert len(programs) == num_ranks
    for stage, program in enumerate(programs):
        assert {op.stage for op in program} == {stage}
        for wanted in (OpKind.FORWARD, OpKind.BACKWARD):
            assert [op.micro_batch for op in program if op.kind is wanted] == list(range(num_micro_batches))


@given(sizes)
def test_1f1b_never_holds_more_than_its_warm_up_and_one(size):
    num_ranks, num_micro_batches = size
    timed = asap(made("1f1b", *size), even_costs(num_ranks))
    for rank in range(num_ranks):
        assert timed.peak(rank) == min(num_micro_batches, num_ranks - rank)


@given(st.sampled_from(sorted(COMPUTE_KINDS)), st.integers(0, 9), st.lists(st.integers(0, 9)))
def test_operations_made_at_once_are_those_made_one_by_one(kind, stage, micro_batches):
    made = stage_ops(kind, stage, micro_batches)
    assert made == [Op(kind, stage, micro_batch) for micro_batch in micro_batches]
    assert all(type(op) is Op for op in made)
