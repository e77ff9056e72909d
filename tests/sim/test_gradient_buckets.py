"""Sums of gradients and gathers of weights that go by buckets, and the part that computations hide."""

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.comm.lower import lower
from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.sim.fast_engine import run_fast
from pipeproof.sim.op_durations import durations_of
from pipeproof.sim.simpy_model import run_model
from pipeproof.sim.simulate import channel_model_of, simulate
from pipeproof.specs.load_plan import plan_from_dict
from tests.plans import plan_dict, plan_spec, refusal

LATENCY, BYTES_PER_US = 2, 1000
NETWORK = {"ranks_per_node": 64, "node": {"latency_us": LATENCY, "bandwidth": 1}}
LONG = {"forward_us": 1000, "backward_us": 2000}


def lowered(*, kind="1f1b", when="at_end", topology=(), memory=(), **cost):
    chunks = {"num_chunks": 2} if kind == "interleaved" else {}
    return lower(
        plan_spec(
            topology={"dp": 2, **dict(topology)},
            schedule={"kind": kind, **chunks, "reduce_gradients": when},
            memory=dict(memory),
            cost={"network": NETWORK, **LONG, **cost},
        )
    )


FIRST = [weight for weight in lowered().weights_of(0, 0) if weight.name.startswith(("embed", "layer.0"))]
"""Weights of the first stage up to its first block."""


def spans_of(plan, rank=0):
    return {span.op: span for span in simulate(plan).timeline.spans if span.rank == rank}


def length(plan, op, rank=0):
    span = spans_of(plan, rank)[op]
    return float(span.end - span.start)


def numel(plan, stage, names=()):
    weights = plan.weights_of(stage, stage % plan.mesh.size("pp"))
    return sum(prod(weight.shape) for weight in weights if not names or weight.name.startswith(names))


def all_reduce_us(elements, ranks=2):
    return 2 * (ranks - 1) * (LATENCY + 4 * elements / ranks / BYTES_PER_US)


def half_us(elements, ranks=2):
    """Time of a reduce-scatter or an all-gather."""
    return all_reduce_us(elements, ranks) / 2


@pytest.mark.parametrize("size", ["stage", "megatron", 10**9])
def test_a_stage_in_one_bucket_is_one_collective(size):
    plan = lowered(bucket_size=size)
    assert length(plan, "0REDUCE_GRAD:dp") == pytest.approx(all_reduce_us(numel(plan, 0)), abs=0.002)
    alone = length(lowered(), "0REDUCE_GRAD:dp")
    assert alone - length(plan, "0REDUCE_GRAD:dp") == pytest.approx(
        2 * LATENCY * (len(plan.weights_of(0, 0)) - 1), abs=0.1
    )


def test_the_first_stage_alone_has_several_buckets():
    plan = lowered(bucket_size=1)
    num_weights = len(plan.weights_of(0, 0))
    expected = all_reduce_us(numel(plan, 0)) + 2 * LATENCY * (num_weights - 1)
    assert length(plan, "0REDUCE_GRAD:dp") == pytest.approx(expected, abs=0.1)
    assert length(plan, "1REDUCE_GRAD:dp", rank=2) == pytest.approx(all_reduce_us(numel(plan, 1)), abs=0.002)


def test_a_bucket_is_complete_at_its_size():
    """From the last weight on: the block's down-projection, then up and gate."""
    weights = [prod(weight.shape) for weight in lowered().weights_of(0, 0)]
    size = weights[-1] + 1
    buckets, filling = 0, 0
    for one in reversed(weights):
        filling += one
        if filling >= size:
            buckets, filling = buckets + 1, 0
    buckets += filling > 0
    plan = lowered(bucket_size=size)
    assert 1 < buckets < len(weights)
    expected = all_reduce_us(sum(weights)) + 2 * LATENCY * (buckets - 1)
    assert length(plan, "0REDUCE_GRAD:dp") == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize("size", [1, "stage"])
def test_a_long_backward_hides_all_but_the_buckets_of_the_first_block(size):
    """Its gradients are made last, and the embedding's after them, which takes no time; one bucket is not hidden."""
    plan = lowered(when="when_ready", bucket_size=size)
    buckets = len(FIRST) if size == 1 else 1
    rest = numel(plan, 0, ("embed", "layer.0")) if size == 1 else numel(plan, 0)
    expected = all_reduce_us(rest) + 2 * LATENCY * (buckets - 1)
    assert length(plan, "0REDUCE_GRAD:dp") == pytest.approx(expected, abs=0.002 * buckets)
    assert length(plan, "1REDUCE_GRAD:dp", rank=2) == pytest.approx(all_reduce_us(numel(plan, 1)), abs=0.002)


def test_a_short_backward_hides_no_more_than_itself():
    short = {"forward_us": 0.001, "backward_us": 0.002}
    shown, whole = (lowered(when=when, bucket_size=1, **short) for when in ("when_ready", "at_end"))
    hidden = length(whole, "0REDUCE_GRAD:dp") - length(shown, "0REDUCE_GRAD:dp")
    assert 0 <= hidden <= 0.003  # the backward, and a nanosecond of rounding


def test_a_gather_during_the_first_forward():
    """The first block waits for its weights; a later stage has them before its first forward begins."""
    memory = {"shard_optimizer": "dp"}
    late, early = (lowered(memory=memory, bucket_size=1, gather_weights=when) for when in ("at_end", "first_forward"))
    whole = half_us(numel(late, 0)) + LATENCY * (len(late.weights_of(0, 0)) - 1)
    assert length(late, "0GATHER_WEIGHT:dp") == pytest.approx(whole, abs=0.1)
    first = half_us(numel(early, 0, ("embed", "layer.0"))) + LATENCY * (len(FIRST) - 1)
    assert length(early, "0GATHER_WEIGHT:dp") == pytest.approx(first, abs=0.1)
    assert length(late, "1GATHER_WEIGHT:dp", rank=2) == pytest.approx(half_us(numel(late, 1)), abs=0.002)
    assert length(early, "1GATHER_WEIGHT:dp", rank=2) == 0
    one = lowered(memory=memory, bucket_size="stage", gather_weights="first_forward")
    assert length(one, "0GATHER_WEIGHT:dp") == pytest.approx(half_us(numel(one, 0)), abs=0.002)


def test_all_ranks_that_hold_a_weight_sum_it_at_once():
    """Two of cp and two of dp are a ring of four; with shards over dp alone they are two rings."""
    topology = {"cp": 2}
    joined = lowered(
        topology=topology, bucket_size="stage", memory={"shard_optimizer": "dp", "optimizer_ranks": "replicas"}
    )
    assert length(joined, "0REDUCE_GRAD:cp") == 0
    assert length(joined, "0REDUCE_GRAD:dp") == pytest.approx(half_us(numel(joined, 0), 4), abs=0.002)
    assert length(joined, "0GATHER_WEIGHT:dp") == pytest.approx(half_us(numel(joined, 0), 4), abs=0.002)
    apart = lowered(topology=topology, bucket_size="stage", memory={"shard_optimizer": "dp"})
    both = all_reduce_us(numel(apart, 0)) + half_us(numel(apart, 0))
    assert length(apart, "0REDUCE_GRAD:cp") == 0
    assert length(apart, "0REDUCE_GRAD:dp") == pytest.approx(both, abs=0.004)
    assert length(apart, "0GATHER_WEIGHT:dp") == pytest.approx(half_us(numel(apart, 0)), abs=0.002)


def test_experts_have_buckets_of_their_own():
    moe = {"num_experts": 4, "top_k": 2, "ffn_size": 16}
    plan = lower(
        plan_spec(model={"moe": moe}, topology={"ep": 2, "dp": 2}, cost={"network": NETWORK, "bucket_size": "stage"})
    )
    weights = plan.weights_of(0, 0)
    experts = sum(prod(weight.local_shape({"tp": 1, "ep": 2})) for weight in weights if "ep" in weight.sharded_over)
    others = sum(prod(weight.shape) for weight in weights if "ep" not in weight.sharded_over)
    assert experts
    sums = sum(length(plan, f"0REDUCE_GRAD:{axis}") for axis in ("ep", "dp"))
    assert sums == pytest.approx(all_reduce_us(experts) + all_reduce_us(others, 4), abs=0.004)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["1f1b", "interleaved", "zb_h1"]),
    st.sampled_from([{}, {"tp": 2, "sequence_parallel": True}, {"cp": 2}, {"ep": 2}]),
    st.sampled_from(["at_end", "when_ready"]),
    st.sampled_from(["none", "dp"]),
    st.sampled_from(["dp", "replicas"]),
    st.sampled_from(["at_end", "first_forward"]),
    st.sampled_from([1, 600, "megatron", "stage"]),
)
def test_both_engines_have_the_same_times_and_buckets_of_several_weights_are_never_slower(
    kind, mesh, when, shard, ranks, gather, size
):
    memory = {"shard_optimizer": shard, "optimizer_ranks": ranks}
    options = {"kind": kind, "when": when, "topology": mesh, "memory": memory}
    plan = lowered(**options, bucket_size=size, gather_weights=gather)
    durations, model = durations_of(plan), channel_model_of(plan)
    slow, fast = run_model(plan.graph, durations, model), run_fast(plan.graph, durations, model).outcome(plan.graph)
    assert (fast.starts, fast.ends) == (slow.starts, slow.ends)
    if size != 1 or not {"cp", "ep"} & mesh.keys():  # a bucket is one sum over both axes: more steps for one weight
        assert simulate(plan).makespan <= simulate(lowered(**options)).makespan


RULES = {
    "a gather during a forward without buckets": ({"gather_weights": "first_forward"}, {"bucket_size": "megatron"}),
    "buckets of a profile": ({"bucket_size": 1, "profile": "p.json"}, {"bucket_size": None}),
}
"""For each rule: keys of ``cost`` that it alone refuses, and the ones that make them right."""


@pytest.mark.parametrize("name", RULES)
def test_refused_and_next_to_it_right(name):
    refused, repair = RULES[name]
    finding = refusal(plan_dict(cost=refused))
    assert finding.code == "PP106"
    assert "bucket_size" in finding.message
    assert plan_spec(cost={**refused, **repair})


@pytest.mark.parametrize("size", [0, 10**12 + 1, "each", 1.5])
def test_no_size_of_a_bucket(size):
    with pytest.raises(BadPlanError):
        plan_from_dict(plan_dict(cost={"bucket_size": size}))
