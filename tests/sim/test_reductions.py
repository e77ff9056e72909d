"""Sums of gradients next to the backward, and the gather of a sharded optimizer, in both engines."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.comm.lower import lower
from pipeproof.schedule.ops import OpKind
from pipeproof.sim.fast_engine import run_fast
from pipeproof.sim.op_durations import durations_of
from pipeproof.sim.simpy_model import run_model
from pipeproof.sim.simulate import channel_model_of, simulate
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.views.html.relations import Relations, critical_path
from tests.plans import plan_dict, subject

NETWORK = {"ranks_per_node": 8, "node": {"latency_us": 2, "bandwidth": 1}}
SCHEDULES = (
    {"kind": "1f1b"},
    {"kind": "interleaved", "num_chunks": 2},
    {"kind": "zb_h1"},
    {"kind": "zb_v", "num_chunks": 2},
    {"kind": "dualpipe_v", "num_chunks": 2},
)
MESHES = ({"dp": 2}, {"tp": 2, "dp": 2, "sequence_parallel": True}, {"ep": 2}, {"cp": 2, "dp": 2})


def plan_of(schedule, *, topology=(), when="when_ready", network=NETWORK, **sections):
    cost = {"forward_us": 100, "backward_us": 200, "network": network, **sections.pop("cost", {})}
    schedule = {"num_micro_batches": 8, **schedule, "reduce_gradients": when}
    return plan_dict(topology={"dp": 2, **dict(topology)}, schedule=schedule, cost=cost, **sections)


def lowered(schedule, **options):
    return lower(plan_from_dict(plan_of(schedule, **options)).spec)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(SCHEDULES),
    st.sampled_from(MESHES),
    st.sampled_from(["async", "rendezvous"]),
    st.sampled_from(["none", "dp"]),
    st.sampled_from([None, 1.0]),
    st.booleans(),
)
def test_both_engines_have_the_same_times(schedule, mesh, p2p, shard, clip_norm, tied):
    run = {} if clip_norm is None else {"clip_norm": clip_norm}
    plan = lowered(
        schedule,
        topology={"dp": 1, **mesh},
        cost={"p2p": p2p, "forward_us": 300, "backward_us": 400},
        memory={"shard_optimizer": shard},
        model={"tied_embedding": tied},
        run=run,
    )
    durations, model = durations_of(plan), channel_model_of(plan)
    sums = {OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER}
    assert any(time for i, time in enumerate(durations.ticks) if plan.graph.ops[i].kind in sums)
    slow = run_model(plan.graph, durations, model)
    fast = run_fast(plan.graph, durations, model).outcome(plan.graph)
    assert (fast.starts, fast.ends) == (slow.starts, slow.ends)


def test_sums_of_the_chunk_that_ends_first_take_no_time_of_the_other():
    late, early = (simulate(lowered(SCHEDULES[1], when=when)) for when in ("at_end", "when_ready"))
    assert early.engine == "fast"
    spans = {span.op: span for span in early.timeline.spans if span.rank == 0}
    last = max(span.end for op, span in spans.items() if op.startswith("0B"))
    chunk = spans["2REDUCE_GRAD:dp"]
    assert chunk.queue == "gradients"
    assert chunk.start == spans["2B7"].end
    assert chunk.end < last
    saved = chunk.end - chunk.start
    assert 0 < saved <= late.makespan - early.makespan


def test_the_optimizer_waits_for_the_last_sum():
    """Also where sums take longer than everything else."""
    slow = {"ranks_per_node": 8, "node": {"latency_us": 500, "bandwidth": 1}}
    timeline = simulate(lowered(SCHEDULES[1], network=slow)).timeline
    for rank, coords in enumerate(timeline.ranks):
        spans = {span.op: span for span in timeline.spans if span.rank == rank}
        for stage in (coords["pp"], coords["pp"] + 2):
            assert spans[f"{stage}STEP"].start >= spans[f"{stage}REDUCE_GRAD:dp"].end > spans[f"{stage}B7"].end


def test_a_sharded_optimizer_moves_no_more_bytes_than_whole_sums():
    """A reduce-scatter and a gather around a ring are an all-reduce: here of float32 on both sides."""
    network = {"ranks_per_node": 8, "node": {"latency_us": 0, "bandwidth": 1}}
    whole, shared = (
        simulate(lowered(SCHEDULES[0], when="at_end", topology={"dp": 4}, network=network, **sections))
        for sections in ({}, {"memory": {"shard_optimizer": "dp"}})
    )
    times = []
    for one in (whole, shared):
        parents = ("0REDUCE_GRAD:dp", "0GATHER_WEIGHT:dp")
        times.append(sum(s.end - s.start for s in one.timeline.spans if s.rank == 0 and s.op in parents))
    assert times[0] > 0
    per_weight = Fraction(1, 1000)  # each of both collectives is rounded up to a nanosecond
    assert abs(times[0] - times[1]) <= 2 * per_weight * len(whole.timeline.spans)


@pytest.mark.parametrize("when", ["at_end", "when_ready"])
def test_plans_too_large_to_unfold_have_the_times_of_unfolded_ones(when):
    one = subject(topology={"dp": 2}, schedule={"reduce_gradients": when}, memory={"shard_optimizer": "dp"})
    assert simulate(one.plan).makespan == simulate(one.unfolded().plan).makespan


@pytest.mark.parametrize("latency_us", [2, 100])
def test_sums_that_outlast_computations_are_on_the_critical_path(latency_us):
    """On the page of a timeline; the path has no gap."""
    network = {"ranks_per_node": 8, "node": {"latency_us": latency_us, "bandwidth": 1}}
    plan = lowered(SCHEDULES[1], network=network)
    timeline = simulate(plan).timeline
    relations = Relations(timeline, plan.graph)
    path = critical_path(relations)
    assert (path[0].begin, path[-1].end) == (0, timeline.makespan_us)
    assert all(one.end == after.begin for one, after in pairwise(path))
    assert {relations.ops[part.span].kind for part in path} >= {OpKind.BACKWARD, OpKind.ALL_REDUCE}
