"""Times of pairs from their parts are those of the simulation, and schedules made for them are never later than others.

A step is compared to the end of its last computation, as schedules are made for it.
"""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.comm.lower import lower
from pipeproof.cost.pair_times import PairTimes
from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.schedule.generators.workload import most_held
from pipeproof.schedule.op_table import NONE
from pipeproof.schedule.ops import COMPUTE_KINDS
from pipeproof.sim.fast_engine import run_fast
from pipeproof.sim.op_durations import durations_of
from pipeproof.sim.simpy_model import run_model
from pipeproof.sim.simulate import channel_model_of, simulate
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.check_plan import check
from tests.plans import plan_dict

MOE = {"num_experts": 4, "top_k": 2, "ffn_size": 16}
INTERLEAVED = {"kind": "interleaved", "variant": "megatron", "num_chunks": 2, "num_micro_batches": 4}
NETWORK = {"ranks_per_node": 8, "node": {"latency_us": 2, "bandwidth": 0.02}}
GIVEN = {
    "forward_us": [900, 1100, 1000, 1200],
    "backward_input_us": 1000,
    "backward_weight_us": 500,
    "network": NETWORK,
}
ANALYTIC = {"device": "h100", "execution": "graph"}


def spec_of(schedule, cost=GIVEN, *, moe=(), topology=(), num_layers=4, model=()):
    sizes = {"num_layers": num_layers, "moe": {**MOE, **dict(moe)}, **dict(model)}
    topology = {"pp": 2, "ep": 2, **dict(topology)}
    return plan_from_dict(plan_dict(model=sizes, topology=topology, schedule=schedule, cost=cost)).spec


def lengths(spec):
    """Simulated microseconds of each pair by the stages of its computations."""
    one = lower(spec)
    graph, timeline = one.graph, simulate(one).timeline
    found = {}
    for forward, backward in graph.pairs.tolist():
        inside = [timeline.spans[i] for i in np.flatnonzero(np.isin(graph.parent, [forward, backward])).tolist()]
        length = timeline.us(max(span.end for span in inside) - min(span.start for span in inside))
        found.setdefault((int(graph.stage[forward]), int(graph.stage[backward])), set()).add(length)
    return found


WIDE = {"hidden_size": 512, "seq_length": 256}


@pytest.mark.parametrize("overlap", ["pairs", {"order": ["F", "B"]}, {"order": ["F", "W", "B"]}])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"moe": {"dispatcher": "all_gather", "num_shared_experts": 1}},
        {"topology": {"tp": 2}},
        {"num_layers": 8},
        {"cost": {"analytic": ANALYTIC}, "model": WIDE},
        {"cost": {"analytic": {**ANALYTIC, "execution": "eager"}}, "model": WIDE},
        {"cost": {"analytic": {**ANALYTIC, "host_us": 30, "collective_us": 50}}, "model": WIDE, "topology": {"tp": 2}},
        {"cost": {"forward_us": 100, "backward_us": 200}},
    ],
    ids=["given", "all-gather", "tp", "layers", "graph", "eager", "host", "no network"],
)
def test_a_pair_takes_as_long_as_it_is_simulated(overlap, changes):
    spec = spec_of({**INTERLEAVED, "overlap": overlap}, **changes)
    found, times = lengths(spec), PairTimes.of_plan(spec)
    assert len(found) > 4
    assert {stages: {times.pair_us(*stages)} for stages in found} == found


def test_exchanges_that_slow_computations_down_count_to_the_tick():
    spec = spec_of({**INTERLEAVED, "overlap": "pairs"}, {**GIVEN, "collective_slowdown": "1/7"})
    times = PairTimes.of_plan(spec)
    for stages, found in lengths(spec).items():
        assert abs(times.pair_us(*stages) - max(found)) < Fraction(1, 10)
        assert max(found) - min(found) < Fraction(1, 10)


@st.composite
def plans(draw):
    """(sections of a plan but for its schedule, the sizes of the schedule, its overlap, its memory limit)."""
    pp, chunks = draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 2, 3]))
    num_stages = pp * chunks
    times = st.lists(st.integers(900, 1800), min_size=num_stages, max_size=num_stages)
    cost = {
        "forward_us": draw(times),
        "backward_input_us": draw(times),
        "backward_weight_us": draw(st.lists(st.integers(100, 900), min_size=num_stages, max_size=num_stages)),
        "network": {**NETWORK, "node": {"latency_us": 2, "bandwidth": draw(st.sampled_from([0.01, 0.02, 0.05]))}},
    }
    if draw(st.booleans()):
        cost = {"analytic": ANALYTIC}
    moe = {**MOE, "dispatcher": draw(st.sampled_from(["all_to_all", "all_gather"]))}
    model = {"num_layers": num_stages, "moe": moe, **(WIDE if "analytic" in cost else {})}
    sizes = {"num_micro_batches": draw(st.integers(1, 10)), "num_chunks": chunks}
    placement = draw(st.sampled_from(["loop", "v"])) if chunks == 2 else "loop"
    overlap = draw(st.sampled_from(["pairs", {"order": ["F", "B"]}, {"order": ["F", "W", "B"]}]))
    limit = draw(st.none() | st.integers(chunks, 3 * num_stages))
    return {"model": model, "topology": {"pp": pp, "ep": 2}, "cost": cost}, sizes, placement, overlap, limit


def loaded_of(sections, sizes, **schedule):
    return plan_from_dict(plan_dict(**sections, schedule={**sizes, **schedule}))


def computed_us(one):
    """Microseconds to the end of the last computation."""
    timeline, graph = simulate(one).timeline, one.graph
    return max(timeline.us(timeline.spans[i].end) for i in np.flatnonzero(graph.is_kind(COMPUTE_KINDS)).tolist())


@given(plans())
@settings(deadline=None, max_examples=30)
def test_optimal_with_pairs_is_never_later_than_without_or_than_other_kinds_with_pairs(drawn):
    sections, sizes, placement, overlap, limit = drawn
    own = {"kind": "optimal", "placement": placement, **({} if limit is None else {"memory_limit": limit})}
    one = lower(loaded_of(sections, sizes, **own, overlap=overlap).spec)
    assert limit is None or max(most_held(one.programs)) <= limit
    found = computed_us(one)
    assert found <= computed_us(lower(loaded_of(sections, sizes, **own).spec))
    for kind in ("1f1b", "interleaved", "dualpipe_v"):
        variant = {"variant": "megatron"} if kind == "interleaved" else {}
        if (kind == "dualpipe_v") != (placement == "v"):
            continue
        try:
            other = lower(loaded_of(sections, sizes, kind=kind, **variant, overlap=overlap).spec)
        except PipeproofError:  # the sizes are not its own
            continue
        if limit is None or max(most_held(other.programs)) <= limit:
            assert found <= computed_us(other), kind


@given(plans())
@settings(deadline=None, max_examples=15)
def test_optimal_with_pairs_is_proved_and_has_the_same_times_in_both_engines(drawn):
    sections, sizes, placement, overlap, limit = drawn
    report = check(loaded_of(sections, sizes, kind="optimal", placement=placement, overlap=overlap, memory_limit=limit))
    assert {finding.code for finding in report.findings} <= {"PP411"}
    one = report.subject.plan
    durations, model = durations_of(one), channel_model_of(one)
    expected, found = run_model(one.graph, durations, model), run_fast(one.graph, durations, model)
    assert tuple(found.ends.tolist()) == expected.ends
    assert tuple(found.starts.tolist()) == expected.starts


def test_a_plan_in_which_pairs_pay_has_them():
    one = lower(spec_of({"kind": "optimal", "num_chunks": 2, "num_micro_batches": 8, "overlap": "pairs"}))
    none = lower(spec_of({"kind": "optimal", "num_chunks": 2, "num_micro_batches": 8}))
    assert (one.graph.part_before != NONE).any()
    assert computed_us(one) < Fraction(96, 100) * computed_us(none)
