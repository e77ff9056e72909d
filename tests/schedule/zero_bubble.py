"""Helpers of the tests of zero-bubble schedules: times, runs and PyTorch's own programs."""

from fractions import Fraction

from hypothesis import settings
from hypothesis import strategies as st

from pipeproof.schedule.ops import OpKind
from pipeproof.schedule.programs import StageCosts, asap, even_costs

few = settings(max_examples=50, deadline=None)
time = st.builds(Fraction, st.integers(1, 12), st.integers(1, 6))
times = st.tuples(time, time, time)
"""tf, ti and tw, the same for every stage."""


def run(schedule, tf=1, ti=1, tw=1, latency=0):
    """Times of a schedule whose stages all cost the same."""
    num_stages = 1 + max(op.stage for program in schedule.programs for op in program)
    return asap(schedule, even_costs(num_stages, tf, ti, tw, latency))


@st.composite
def uneven_runs(draw, schedule):
    """A run with a time of its own for every stage and kind, and some latency."""
    num_stages = 1 + max(op.stage for program in schedule.programs for op in program)
    per_stage = st.lists(time, min_size=num_stages, max_size=num_stages)
    return asap(schedule, StageCosts(draw(per_stage), draw(per_stage), draw(per_stage), draw(time)))


def spans(timed):
    return [timed.span(rank) for rank in range(len(timed.programs))]


def peaks(timed, freed_at=OpKind.BACKWARD_WEIGHT):
    return [timed.peak(rank, freed_at) for rank in range(len(timed.programs))]


def texts(schedule):
    return [[str(op) for op in program] for program in schedule.programs]


def pytorch_texts(name, num_ranks, num_micro_batches, num_chunks):
    """Computations of PyTorch's schedule of that name, without its idle slots."""
    from torch.distributed.pipelining import schedules

    theirs = object.__new__(getattr(schedules, name))  # its constructor wants stages that can run
    theirs.pp_group_size, theirs.n_local_stages, theirs._n_microbatches = num_ranks, num_chunks, num_micro_batches
    theirs.num_stages = num_ranks * num_chunks
    theirs.number_of_rounds = max(1, num_micro_batches // num_ranks)
    theirs.microbatches_per_round = num_micro_batches // theirs.number_of_rounds
    return [
        [str(action) for action in theirs._calculate_single_rank_operations(rank) if action is not None]
        for rank in range(num_ranks)
    ]
