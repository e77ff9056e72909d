"""Simulation of pairs that alternate: times of parts, both queues, and collectives that slow computations down."""

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import simpy
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.comm.lower import lower
from pipeproof.cost.analytic_times import AnalyticCosts
from pipeproof.cost.part_shares import PartShares, PhaseParts
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.schedule.op_table import NONE
from pipeproof.schedule.ops import COMPUTE_KINDS, PART_KINDS, OpKind
from pipeproof.sim.fast_engine import run_fast
from pipeproof.sim.op_durations import alternates, durations_of
from pipeproof.sim.simpy_model import EXCHANGE, RECEIVE, SlowedWork, run_model
from pipeproof.sim.simulate import channel_model_of, simulate
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.stages.describe.op_work import Phase
from tests.comm.test_overlap_pairs import MOE, V, plan
from tests.plans import plan_dict, plan_spec
from validation.board.dualpipe_pair_rows import read_pair_summary

ROOT = Path(__file__).parents[2]
NETWORK = {"ranks_per_node": 8, "node": {"latency_us": 2, "bandwidth": 1}}
TIMES = {"forward_us": 100, "backward_input_us": 120, "backward_weight_us": 80, "network": NETWORK}


def lowered(cost=TIMES, **sections):
    return lower(plan(cost=cost, **sections).spec)


REPLAYED = {"analytic": {"device": "h100", "execution": "graph"}}
EAGER = {"analytic": {"device": "h100", "execution": "eager"}}


@pytest.mark.parametrize("cost", [TIMES, REPLAYED], ids=["given", "analytic"])
def test_parts_share_the_time_of_their_computation(cost):
    one = lowered(cost)
    graph, durations = one.graph, durations_of(one)
    alone, parts = defaultdict(set), defaultdict(Fraction)
    for op_id, op in enumerate(graph.ops):
        if op.kind in PART_KINDS:
            parts[int(graph.parent[op_id])] += durations.ticks[op_id]
    for op_id, op in enumerate(graph.ops):
        if op.kind in COMPUTE_KINDS and op_id not in parts:
            alone[op.kind, op.stage].add(durations.ticks[op_id])
    assert parts
    for op_id, time in parts.items():
        assert durations.ticks[op_id] == 0
        same = alone[graph.ops[op_id].kind, graph.ops[op_id].stage]
        assert not same or same == {time}


@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather"])
def test_shares_of_a_layer_with_experts(dispatcher):
    (forward, *_), backward = (
        [stage[phase].shares for stage in PartShares(plan(moe={**MOE, "dispatcher": dispatcher}).spec).stages]
        for phase in (Phase.FORWARD, Phase.WEIGHT)
    )
    sizes = [float(share) for share in forward]
    assert sum(forward) == 1
    assert sizes[0] > 0  # attention and the router
    assert sizes[-2] > 0  # experts
    assert sizes[-1] == 0  # the first stage has one block, and no product behind its experts
    assert all(sum(shares) == 1 for shares in backward)


def test_parts_end_on_a_grid_and_with_the_whole():
    thirds, grid = (Fraction(1, 3),) * 3, Fraction(1, 10)
    free = PhaseParts(thirds, (Fraction(0),) * 3)
    assert free.ends(Fraction(10, 3), grid) == [Fraction(11, 10), Fraction(22, 10), Fraction(10, 3)]


@pytest.mark.parametrize(
    ("host_us", "ends"),
    [
        ((1, 1, 1), [4, 8, 12]),  # the device is the limit
        ((6, 1, 1), [6, 8, 12]),  # the host is late with the first part, and ahead again behind the second
        ((6, 6, 6), [6, 12, 18]),  # the host is the limit
        ((10, -5, 10), [10, 10, 15]),  # it goes on while a collective blocks the queue
    ],
)
def test_a_part_ends_when_the_device_has_done_it_and_the_host_has_launched_it(host_us, ends):
    parts = PhaseParts((Fraction(1, 3),) * 3, tuple(map(Fraction, host_us)))
    assert parts.ends(Fraction(12), Fraction(1, 1000)) == ends


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("input_us", [0, 700])
def test_the_host_of_the_parts_is_that_of_their_stage(recompute, dispatcher, input_us):
    cost = {"analytic": {**EAGER["analytic"], "input_us": input_us, "collective_us": 40}}
    spec = plan(cost=cost, moe={**MOE, "dispatcher": dispatcher}, memory={"recompute": recompute}).spec
    whole = AnalyticCosts(spec, spec.cost.analytic).stages
    for parts, times in zip(PartShares(spec).stages, whole, strict=True):
        assert {phase: sum(parts[phase].host_us) for phase in Phase} == {phase: times[phase].host_us for phase in Phase}


def test_the_host_goes_on_during_collectives_that_block_the_compute_queue():
    spec = plan(cost=EAGER, topology={"tp": 2}).spec
    one = lower(spec)
    graph, durations = one.graph, durations_of(one)
    forwards = [i for i in np.flatnonzero(alternates(graph)).tolist() if graph.ops[i].kind is OpKind.FORWARD]
    assert forwards
    for op_id in forwards:
        stage = graph.ops[op_id].stage
        over_tp = [i for i in np.flatnonzero(graph.parent == op_id) if graph.ops[i].axis == "tp"]
        blocked = Fraction(sum(durations.ticks[i] for i in over_tp), durations.ticks_per_us)
        whole = AnalyticCosts(spec, spec.cost.analytic).stages[stage][Phase.FORWARD].host_us
        assert blocked
        assert sum(PartShares(spec).stages[stage][Phase.FORWARD].host_us) == whole - blocked


def step_us(cost, overlap, dispatcher="all_to_all", **schedule):
    """Microseconds of a step on one pipeline rank with two expert-parallel ranks."""
    experts = {"num_experts": 64, "top_k": 8, "ffn_size": 1024, "dispatcher": dispatcher}
    model = {"kind": "gpt", "num_layers": 4, "hidden_size": 2048, "num_heads": 16, "ffn_size": 8192}
    data = {
        "pipeproof": 1,
        "model": {**model, "vocab_size": 4096, "seq_length": 4096, "moe": experts},
        "topology": {"pp": 1, "ep": 2},
        "schedule": {"kind": "1f1b", "num_micro_batches": 8, "overlap": overlap, **schedule},
        "cost": cost,
        "run": {"backend": "torch", "device": "gpu", "dtype": "bfloat16"},
    }
    return simulate(lower(plan_from_dict(data).spec)).makespan


@pytest.mark.parametrize(
    ("execution", "micro_batch_size", "gains"),
    [("eager", 1, False), ("compiled", 1, False), ("graph", 1, True), ("eager", 2, True)],
)
def test_turns_hide_no_time_of_the_host(execution, micro_batch_size, gains):
    cost = {"analytic": {"device": "h200", "execution": execution}}
    none, pairs = (step_us(cost, overlap, micro_batch_size=micro_batch_size) for overlap in ("none", "pairs"))
    assert (pairs < Fraction(9, 10) * none) == gains
    if not gains:
        assert none <= pairs < Fraction(101, 100) * none


@st.composite
def plans_of_equal_stages(draw):
    """Sections of a plan with experts and one block in each stage; the times have room for the collectives inside."""
    times = {name: draw(st.integers(4000, 12000)) for name in ("forward_us", "backward_input_us", "backward_weight_us")}
    node = {"latency_us": draw(st.sampled_from([0, 2, 50])), "bandwidth": draw(st.sampled_from([1, 0.01, 0.002]))}
    pp, num = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    order = draw(st.sampled_from(["pairs", {"order": ["F", "B"]}, {"order": ["F", "W", "B"]}]))
    sums = draw(st.sampled_from(["at_end", "when_ready"]))
    return {
        "model": {"moe": {**MOE, "dispatcher": draw(st.sampled_from(["all_to_all", "all_gather"]))}, "num_layers": pp},
        "topology": {"pp": pp, "ep": 2, "tp": draw(st.sampled_from([1, 2]))},
        "schedule": {"kind": "1f1b", "num_micro_batches": num, "overlap": order, "reduce_gradients": sums},
        "cost": {**times, "network": {"ranks_per_node": 16, "node": node}},
    }


@given(plans_of_equal_stages())
@settings(max_examples=200, deadline=None)
def test_pairs_of_1f1b_with_equal_stages_are_never_slower(sections):
    without = {**sections, "schedule": {**sections["schedule"], "overlap": "none"}}
    pairs, none = (simulate(lower(plan_spec(**each))).makespan for each in (sections, without))
    assert pairs <= none


def test_pairs_of_1f1b_make_the_example_faster():
    data = yaml.safe_load((ROOT / "examples" / "moe_overlap.yaml").read_text())
    step_ms = {}
    for overlap in ("none", "pairs"):
        data["schedule"] = {"kind": "1f1b", "num_micro_batches": 8, "micro_batch_size": 1, "overlap": overlap}
        step_ms[overlap] = float(simulate(lower(plan_from_dict(data).spec)).makespan) / 1000
    assert step_ms == pytest.approx({"none": 506.5, "pairs": 381.7}, abs=0.05)


def by_hand(one):
    """Starts and ends of a folded graph of one rank: two FIFOs, and parts that follow each other."""
    graph, ticks = one.graph, durations_of(one).ticks
    free, ends, last = defaultdict(int), {}, {}
    for op_id in graph.rank_ops(0):
        op, queue, parent = graph.ops[op_id], int(graph.queue[op_id]), int(graph.parent[op_id])
        assert op.kind is not OpKind.WAIT
        start = free[queue]
        if graph.part_before[op_id] != NONE:
            start = max(start, last[parent])
        free[queue] = ends[op_id] = start + ticks[op_id]
        if op.kind is not OpKind.WEIGHTS:
            last[parent] = ends[op_id]
        if parent != NONE:
            ends[parent] = max(ends[parent], ends[op_id])
    return ends


@pytest.mark.parametrize("overlap", ["pairs", {"order": ["F", "B"]}, {"order": ["F", "W", "B"]}])
@pytest.mark.parametrize("moe", [MOE, {**MOE, "dispatcher": "all_gather", "num_shared_experts": 1}])
@pytest.mark.parametrize("bandwidth", [0.002, 0.01, 1])
def test_both_queues_by_hand(overlap, moe, bandwidth):
    network = {"ranks_per_node": 8, "node": {"latency_us": 2, "bandwidth": bandwidth}}
    times = {"forward_us": 5000, "backward_us": 9000, "network": network}
    one = lowered(times, moe=moe, topology={"pp": 1}, schedule={**V, "overlap": overlap})
    outcome = run_model(one.graph, durations_of(one), channel_model_of(one))
    ends = by_hand(one)
    assert [outcome.ends[op_id] for op_id in one.graph.rank_ops(0)] == [ends[i] for i in one.graph.rank_ops(0)]


def test_exchanges_hide_behind_the_other_computation():
    both = [simulate(lowered(TIMES, schedule={**V, **more})) for more in ({}, {"overlap": "none"})]
    assert both[0].makespan < both[1].makespan


SCHEDULES = [
    V,
    {**V, "overlap": {"order": ["F", "B"]}, "reduce_gradients": "when_ready"},
    {"kind": "dualpipe", "overlap": "pairs"},
    {"kind": "1f1b", "overlap": {"order": ["F", "W", "B"]}},
    {"kind": "interleaved", "num_chunks": 2, "variant": "megatron", "overlap": "pairs", "num_micro_batches": 8},
]


@pytest.mark.slow(
    but=["ep-v-async", "tp-order-rendezvous", "ep-dualpipe-rendezvous", "tp-1f1b-async", "ep-interleaved-async"]
)
@pytest.mark.parametrize("p2p", ["async", "rendezvous"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=["v", "order", "dualpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("topology", [{}, {"tp": 2}], ids=["ep", "tp"])
@given(seed=st.integers(0, 2**32), dispatcher=st.sampled_from(["all_to_all", "all_gather"]))
@settings(max_examples=12, deadline=None)
def test_both_engines_give_the_same_times(p2p, schedule, topology, seed, dispatcher):
    one = lowered({**TIMES, "p2p": p2p}, moe={**MOE, "dispatcher": dispatcher}, schedule=schedule, topology=topology)
    durations = durations_of(one)
    drawn = np.random.default_rng(seed).integers(0, 10, one.graph.num_ops).tolist()
    for op_id in np.flatnonzero(alternates(one.graph)).tolist():
        drawn[op_id] = 0
    by_group = {}
    for op_id in range(one.graph.num_ops):  # the members of a collective take the same time
        if one.graph.group[op_id] != NONE:
            key = int(one.graph.group[op_id]), int(one.graph.position[op_id])
            drawn[op_id] = by_group.setdefault(key, drawn[op_id])
    durations = replace(durations, ticks=tuple(drawn), message_ticks=None, latency_ticks=3)
    model = channel_model_of(one)
    expected = run_model(one.graph, durations, model)
    assert None not in expected.ends
    found = run_fast(one.graph, durations, model)
    assert tuple(found.ends.tolist()) == expected.ends
    assert tuple(found.starts.tolist()) == expected.starts


@pytest.mark.parametrize("schedule", SCHEDULES, ids=["v", "order", "dualpipe", "1f1b", "interleaved"])
@given(
    host_us=st.sampled_from([0, 2, 30, 400]),
    collective_us=st.sampled_from([None, 50]),
    tp=st.sampled_from([1, 2]),
    dispatcher=st.sampled_from(["all_to_all", "all_gather"]),
    hidden_size=st.sampled_from([16, 512, 2048]),
)
@settings(max_examples=12, deadline=None)
def test_both_engines_give_the_same_times_with_a_host(schedule, host_us, collective_us, tp, dispatcher, hidden_size):
    analytic = {"device": "h200", "host_us": host_us, "collective_us": collective_us}
    model = {"num_layers": 8, "num_heads": 4, "hidden_size": hidden_size, "seq_length": 64}
    sections = {"model": {**model, "moe": {**MOE, "dispatcher": dispatcher}}, "schedule": schedule}
    data = plan_dict(topology={"pp": 2, "ep": 2, "tp": tp}, cost={"analytic": analytic}, **sections)
    one = lower(plan_from_dict(data).spec)
    durations, model = durations_of(one), channel_model_of(one)
    expected, found = run_model(one.graph, durations, model), run_fast(one.graph, durations, model)
    assert tuple(found.ends.tolist()) == expected.ends
    assert tuple(found.starts.tolist()) == expected.starts


def test_plans_are_timed_by_the_fast_engine_unless_exchanges_slow_computations_down():
    assert simulate(lowered(TIMES)).engine == "fast"
    assert simulate(lowered({**TIMES, "collective_slowdown": 0.1})).engine == "simpy"


def test_collectives_slow_computations_down():
    slow = {**TIMES, "collective_slowdown": 0.5}
    one, other = simulate(lowered(TIMES)), simulate(lowered(slow))
    assert one.makespan < other.makespan < Fraction(3, 2) * one.makespan
    assert other.engine == "simpy"


def ends_of(slowdowns, *transfers):
    """The end of a computation of 10 ticks from 0 on, with (kind, begin, end) of the transfers of its rank."""
    env, ends = simpy.Environment(), []
    work = SlowedWork(env, 1, slowdowns, lambda _: ends.append(env.now))
    work.begin(0, 0, 10)

    def transfer(kind, begin, end):
        yield env.timeout(begin)
        work.transfer_starts(0, kind)
        yield env.timeout(end - begin)
        work.transfer_ends(0, kind)

    for each in transfers:
        env.process(transfer(*each))
    env.run()
    return ends


def test_slowdowns_of_receives_and_exchanges_add_up():
    half, quarter = Fraction(1, 2), Fraction(1, 4)
    assert ends_of((half, quarter)) == [10]
    assert ends_of((half, quarter), (EXCHANGE, 2, 7)) == [11]  # 5 ticks do the work of 4
    assert ends_of((half, quarter), (RECEIVE, 0, 6)) == [12]
    assert ends_of((half, quarter), (RECEIVE, 0, 7), (EXCHANGE, 0, 7)) == [13]  # 7 ticks do the work of 4
    assert ends_of((half, Fraction(0)), (EXCHANGE, 0, 100)) == [10]
    assert ends_of((Fraction(0), half), (EXCHANGE, 0, 3), (EXCHANGE, 1, 6)) == [12]


def test_a_slowdown_without_an_overlap_is_refused():
    with pytest.raises(PlanFileError, match=r"cost\.collective_slowdown"):
        plan(schedule={**V, "overlap": "none"}, cost={**TIMES, "collective_slowdown": 0.5})


def test_deepseeks_profiled_pair_by_its_parts():
    """Four blocks, ep 64 on H800 (deepseek-ai/profile-data): 128.5 ms; exchanges hold 20 of 132 processors."""
    summary = {"device": "NVIDIA H800", "ranks": 64, "streams": [{"busy_us": 1, "first_us": 0, "last_us": 128537}]}
    (measurement,) = read_pair_summary(Path("summary.json"), summary)
    taken = {"collective_slowdown": "20/112"}
    data = {**measurement.plan, "cost": {**measurement.plan["cost"], **taken}}
    data["schedule"] = {**data["schedule"], "overlap": "pairs"}
    one = lower(plan_from_dict(data).spec)
    timeline, graph = simulate(one).timeline, one.graph
    first = next(i for i in range(graph.num_ops) if graph.batch[i] != NONE and graph.stage[i] in (1, 2))
    inside = [timeline.spans[i] for i in range(graph.num_ops) if graph.parent[i] in (first, first + 1)]
    pair = float(timeline.us(max(s.end for s in inside) - min(s.start for s in inside))) / 1000
    computing = sum(float(timeline.us(s.end - s.start)) for s in inside if s.queue == "compute") / 1000
    assert abs(pair / measurement.measured - 1) < 0.1
    assert pair - computing < 0.01 * pair  # nearly all of the exchanges is hidden
