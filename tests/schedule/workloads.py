"""Small workloads for tests of ``optimal`` and ``solve``: placements, uneven times, latencies and memory limits."""

from fractions import Fraction

from hypothesis import strategies as st

from pipeproof.schedule.generators.workload import most_held
from pipeproof.schedule.ops import OpKind
from pipeproof.schedule.programs import StageCosts, asap


def loop(num_ranks, num_chunks=1):
    return tuple(tuple(range(rank, num_ranks * num_chunks, num_ranks)) for rank in range(num_ranks))


def there_and_back(num_ranks):
    return tuple((rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks))


@st.composite
def anywhere(draw, max_ranks=4, max_stages=8):
    """Every rank has a stage; the others are where they fall."""
    num_ranks = draw(st.integers(1, max_ranks))
    others = draw(st.lists(st.integers(0, num_ranks - 1), max_size=max_stages - num_ranks))
    rank_of = draw(st.permutations([*range(num_ranks), *others]))
    return tuple(tuple(stage for stage, owner in enumerate(rank_of) if owner == rank) for rank in range(num_ranks))


PLACEMENTS = st.one_of(
    st.builds(loop, st.integers(1, 4), st.integers(1, 2)), st.builds(there_and_back, st.integers(1, 4)), anywhere()
)


@st.composite
def costs_of(draw, num_stages):
    """Fractions; the parts of a backward may take no time."""
    forward = st.fractions(Fraction(1, 4), 5, max_denominator=4)
    backward = st.one_of(st.just(Fraction(0)), forward)
    parts = (
        tuple(draw(st.lists(part, min_size=num_stages, max_size=num_stages))) for part in (forward, backward, backward)
    )
    return StageCosts(*parts, latency=draw(st.fractions(0, 2, max_denominator=3)))


@st.composite
def workloads(draw, placements=PLACEMENTS, max_micro_batches=8):
    """Placement, micro-batches, costs and the limit of each rank."""
    placement = draw(placements)
    num_micro_batches = draw(st.integers(1, max_micro_batches))
    costs = draw(costs_of(sum(map(len, placement))))
    limits = [draw(st.integers(len(stages), len(stages) * (len(placement) + 1))) for stages in placement]
    return placement, num_micro_batches, costs, draw(st.sampled_from([None, max(limits), tuple(limits)]))


def check_schedule(schedule, placement, num_micro_batches, costs, limit):
    """Each stage's F, I and W once, in index order, within memory; the makespan."""
    for stages, program in zip(placement, schedule.programs, strict=True):
        for stage in stages:
            for kind in (OpKind.FORWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT):
                mine = [op.micro_batch for op in program if (op.kind, op.stage) == (kind, stage)]
                assert mine == list(range(num_micro_batches))
        assert len(program) == 3 * num_micro_batches * len(stages)
    timed = asap(schedule, costs)
    if limit is not None:
        limits = [limit] * len(placement) if isinstance(limit, int) else limit
        peaks = [timed.peak(rank) for rank in range(len(placement))]
        assert all(peak <= most for peak, most in zip(peaks, limits, strict=True)), (peaks, limits)
        assert most_held(schedule.programs) >= peaks
    return timed.makespan


def lower_bounds(placement, num_micro_batches, costs):
    """A lower bound for all schedules: each rank's work after its first forward can begin, and one micro-batch's
    way."""
    rank_of = {stage: rank for rank, stages in enumerate(placement) for stage in stages}
    edges = [costs.latency if rank_of[stage] != rank_of[stage + 1] else 0 for stage in range(len(rank_of) - 1)]
    for stages in placement:
        first = min(stages)
        work = sum(costs.forward[s] + costs.backward_input[s] + costs.backward_weight[s] for s in stages)
        yield sum(costs.forward[:first]) + sum(edges[:first]) + num_micro_batches * work
    yield sum(costs.forward) + 2 * sum(edges) + sum(costs.backward_input) + costs.backward_weight[0]
