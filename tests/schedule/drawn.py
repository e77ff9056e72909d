"""Random kinds of schedules with sizes, and the plans that ask for them."""

from fractions import Fraction

from hypothesis import assume
from hypothesis import strategies as st

from pipeproof.schedule.kinds import SCHEDULE_KINDS, Request
from pipeproof.schedule.programs import StageCosts, UnfitSizesError

times = st.builds(Fraction, st.integers(1, 9), st.integers(1, 4))
latencies = st.builds(Fraction, st.integers(0, 9), st.integers(1, 4))


@st.composite
def requests(draw, max_ranks=8, max_chunks=4):
    """A kind of schedule and sizes that its table row allows; the generator may still refuse them."""
    kind = SCHEDULE_KINDS[draw(st.sampled_from(sorted(SCHEDULE_KINDS)))]
    num_ranks = draw(st.integers(1, max_ranks))
    most = max_chunks if kind.max_chunks is None else min(max_chunks, kind.max_chunks)
    num_chunks = draw(st.integers(kind.min_chunks, max(kind.min_chunks, most)))
    num_stages = num_ranks * num_chunks
    by_stage = st.lists(times, min_size=num_stages, max_size=num_stages).map(tuple)
    overlapped = draw(st.none() | by_stage) if kind.name.startswith("dualpipe") else None
    costs = StageCosts(*(draw(by_stage) for _ in range(3)), draw(latencies), overlapped)
    return kind, Request(
        num_ranks=num_ranks,
        num_micro_batches=draw(st.integers(1, 4 * num_ranks)),
        num_chunks=num_chunks,
        num_sequence_splits=draw(st.integers(1, 4)) if kind.splits_sequences else 1,
        variant=draw(st.sampled_from(kind.variants)) if kind.variants else None,
        costs=costs,
        memory_limit=draw(st.sampled_from([None, num_stages, 2 * num_stages])) if kind.name == "optimal" else None,
    )


def generated(kind, request):
    """The schedule; a refused request does not count as an example."""
    try:
        return kind.generate(request)
    except UnfitSizesError:
        assume(False)


def plan_of(kind, request):
    """A small plan, as a dict, that asks for the same schedule with the same costs."""
    splits, costs = request.num_sequence_splits, request.costs
    schedule = {
        "kind": kind.name,
        "num_micro_batches": request.num_micro_batches,
        "micro_batch_size": 1,
        "num_chunks": request.num_chunks,
        "num_sequence_splits": splits,
    }
    optional = {"variant": request.variant, "memory_limit": request.memory_limit}
    cost = {
        "forward_us": _texts(costs.forward, splits),
        "backward_input_us": _texts(costs.backward_input, splits),
        "backward_weight_us": _texts(costs.backward_weight, splits),
        "p2p_latency_us": _text(costs.latency),
    }
    if costs.overlapped is not None:
        cost["overlapped_us"] = _texts(costs.overlapped, splits)
    return {
        "pipeproof": 1,
        "model": {
            "kind": "gpt",
            "num_layers": request.num_ranks * request.num_chunks,
            "hidden_size": 4,
            "num_heads": 2,
            "ffn_size": 4,
            "vocab_size": 8,
            "seq_length": 12,
        },
        "topology": {"pp": request.num_ranks},
        "schedule": schedule | {key: value for key, value in optional.items() if value is not None},
        "cost": cost,
    }


def _texts(by_stage, splits):
    """A stage's times are of whole sequences, a request's of one split."""
    return [_text(time * splits) for time in by_stage]


def _text(time):
    return int(time) if Fraction(time).denominator == 1 else str(time)
