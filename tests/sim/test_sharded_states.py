"""Time and memory of plans whose dp ranks keep shards of gradients, and of weights."""

from io import StringIO
from math import prod

import pytest
from rich.console import Console

from pipeproof.comm.lower import lower
from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.sim.fast_engine import run_fast
from pipeproof.sim.memory_curve import Part
from pipeproof.sim.op_durations import durations_of
from pipeproof.sim.simpy_model import run_model
from pipeproof.sim.simulate import channel_model_of, simulate
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.views.memory_table import render_stage_memory
from tests.plans import plan_dict, refusal

NETWORK = {"ranks_per_node": 64, "node": {"latency_us": 2, "bandwidth": 1}}
STAGES = [{}, {"shard_optimizer": "dp"}, {"shard_optimizer": "dp", "shard_gradients": "dp"}]
SECOND = STAGES[2]
THIRD = SECOND | {"shard_weights": "dp"}
MESHES = [{"dp": 2}, {"tp": 2, "dp": 2, "sequence_parallel": True}, {"ep": 2, "dp": 2}, {"cp": 2, "dp": 3}]
SCHEDULES = [{"kind": "1f1b"}, {"kind": "interleaved", "num_chunks": 2}, {"kind": "zb_h1"}, {"kind": "dualpipe_v"}]


def lowered(memory=SECOND, topology=MESHES[0], schedule=SCHEDULES[0], **cost):
    cost = {"network": NETWORK, "forward_us": 1000, "backward_us": 2000, **cost}
    return lower(plan_from_dict(plan_dict(memory=memory, topology=topology, schedule=schedule, cost=cost)).spec)


def spans_of(plan, rank=0):
    return {span.op: span for span in simulate(plan).timeline.spans if span.rank == rank}


@pytest.mark.parametrize("topology", MESHES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("p2p", ["async", "rendezvous"])
@pytest.mark.parametrize("memory", [SECOND, THIRD])
def test_both_engines_have_the_same_times(topology, schedule, p2p, memory):
    plan = lowered(memory, topology, schedule, p2p=p2p)
    durations, model = durations_of(plan), channel_model_of(plan)
    slow, fast = run_model(plan.graph, durations, model), run_fast(plan.graph, durations, model).outcome(plan.graph)
    assert (fast.starts, fast.ends) == (slow.starts, slow.ends)


def test_each_micro_batch_has_the_sum_that_a_sharded_optimizer_has_once():
    once, each = (spans_of(lowered(memory)) for memory in STAGES[1:])
    whole = once["0REDUCE_GRAD:dp"]
    for micro_batch in range(4):
        one = each[f"0REDUCE_GRAD{micro_batch}:dp"]
        assert one.end - one.start == whole.end - whole.start > 0
        assert one.start == each[f"0B{micro_batch}"].end
    assert "0REDUCE_GRAD:dp" not in each


@pytest.mark.parametrize("size", ["stage", 600])
def test_a_bucket_of_several_weights_is_one_sum(size):
    once, each = (spans_of(lowered(memory, bucket_size=size)) for memory in STAGES[1:])
    whole, one = once["0REDUCE_GRAD:dp"], each["0REDUCE_GRAD2:dp"]
    assert one.end - one.start == whole.end - whole.start > 0


def weights(plan, stage):
    return [prod(weight.shape) for weight in plan.weights_of(stage, stage % 2)]


@pytest.mark.parametrize("dp", [2, 3])
def test_gradients_are_kept_as_shards_and_whole_from_a_backward_to_its_sums(dp):
    plan = lowered(topology={"dp": dp}, schedule={"kind": "interleaved", "num_chunks": 2})
    curve, spans = simulate(plan).memory[0], spans_of(plan)
    kept = 4 * sum(-(-numel // dp) for stage in (0, 2) for numel in weights(plan, stage))
    assert curve.persistent[Part.GRADIENTS] == kept
    is_gradient = curve.part == list(Part).index(Part.GRADIENTS)
    times, changes = curve.times[is_gradient].tolist(), curve.change[is_gradient].tolist()
    whole = {stage: 4 * sum(weights(plan, stage)) for stage in (0, 2)}
    expected = set()
    for stage, numel in whole.items():
        for micro_batch in range(4):
            backward, sums = spans[f"{stage}B{micro_batch}"], spans[f"{stage}REDUCE_GRAD{micro_batch}:dp"]
            expected |= {(float(backward.start), numel), (float(sums.end), -numel)}
    assert {(float(curve.us(time)), change) for time, change in zip(times, changes, strict=True)} == expected


def test_two_chunks_need_less_with_each_stage():
    plans = [lowered(memory, {"dp": 4}, SCHEDULES[1]) for memory in [*STAGES, THIRD]]
    peaks = [simulate(plan).memory[0].peak for plan in plans]
    assert peaks == sorted(set(peaks), reverse=True)


@pytest.mark.parametrize("size", [1, "stage", 600])
def test_each_computation_has_the_gather_that_a_sharded_optimizer_has_once(size):
    once, plan = (lowered(memory, bucket_size=size) for memory in (SECOND, THIRD))
    gather = spans_of(once)["0GATHER_WEIGHT:dp"]
    spans = [span for span in simulate(plan).timeline.spans if span.rank == 0]
    gathers = [span for span in spans if span.op == "0GATHER_WEIGHT:dp"]
    computations = [span for span in spans if span.op[1] in "FB" and "/" not in span.op]
    assert len(gathers) == len(computations) == 8
    for one, computation in zip(gathers, computations, strict=True):
        assert one.end - one.start == gather.end - gather.start > 0
        assert one.end == computation.start


@pytest.mark.parametrize("dp", [2, 3])
def test_weights_are_kept_as_shards_and_whole_for_each_computation(dp):
    plan = lowered(THIRD, {"dp": dp})
    curve = simulate(plan).memory[0]
    assert curve.persistent[Part.PARAMETERS] == 4 * sum(-(-numel // dp) for numel in weights(plan, 0))
    is_weight = curve.part == list(Part).index(Part.PARAMETERS)
    changes = list(zip(curve.times[is_weight].tolist(), curve.change[is_weight].tolist(), strict=True))
    spans = [span for span in simulate(plan).timeline.spans if span.rank == 0]
    starts = [span.start for span in spans if span.op == "0GATHER_WEIGHT:dp"]
    ends = [span.end for span in spans if span.op[1] in "FB" and "/" not in span.op]
    whole = 4 * sum(weights(plan, 0))
    assert [curve.us(time) for time, change in changes if change == whole] == starts
    assert [curve.us(time) for time, change in changes if change == -whole] == ends
    assert len(changes) == 16


def test_a_stage_has_both_in_the_table():
    stream = StringIO()
    render_stage_memory(lowered(), Console(file=stream, width=160))
    text = stream.getvalue()
    assert "gradients in float32 shared by dp ranks" in text
    assert "whole gradients" in text


RULES = {
    "sharded optimizer": ({"memory": {"shard_gradients": "dp"}}, {"memory": SECOND}),
    "sharded gradients": ({"memory": {"shard_optimizer": "dp", "shard_weights": "dp"}}, {"memory": THIRD}),
    "first_forward": (
        {"memory": THIRD, "cost": {"network": NETWORK, "gather_weights": "first_forward", "bucket_size": 600}},
        {"memory": THIRD, "cost": {"network": NETWORK, "bucket_size": 600}},
    ),
    "split sequences": ({"schedule": {"num_sequence_splits": 2}}, {"schedule": {}}),
    "when_ready": ({"schedule": {"reduce_gradients": "when_ready"}}, {"schedule": {}}),
    "expert_bias_rate": (
        {"model": {"moe": {"num_experts": 4, "top_k": 2, "ffn_size": 8, "expert_bias_rate": 0.1}}},
        {"model": {"moe": {"num_experts": 4, "top_k": 2, "ffn_size": 8}}},
    ),
}
"""For each rule: sections that it refuses with sharded gradients, and the nearest right ones."""


@pytest.mark.parametrize("name", RULES)
def test_refused_and_next_to_it_right(name):
    refused, right = ({"topology": {"dp": 2}, "memory": SECOND, **sections} for sections in RULES[name])
    finding = refusal(plan_dict(**refused))
    assert (finding.code, "memory.shard_" in finding.message) == ("PP106", True)
    assert lower(plan_from_dict(plan_dict(**right)).spec)


@pytest.mark.parametrize(
    "sections",
    [{"model": {"tied_embedding": True}}, {"schedule": {"kind": "dualpipe"}}],
)
def test_weights_in_common_are_refused(sections):
    plan = plan_from_dict(plan_dict(topology={"dp": 2}, memory=SECOND, **sections))
    with pytest.raises(BadPlanError) as refused:
        lower(plan.spec)
    assert [finding.code for finding in refused.value.findings] == ["PP106"]
    assert "remove shard_gradients" in refused.value.findings[0].help
