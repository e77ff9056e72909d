"""Times of messages and collectives by the links of nodes and between them, and the rest of a stage's time."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeproof.analysis.tune.step_clock import asap_clock, simulated_clock
from pipeproof.comm.lower import lower, mesh_of
from pipeproof.cost.analytic_links import groups_of
from pipeproof.cost.devices import DEVICES
from pipeproof.cost.network_times import Link, Network, Shape
from pipeproof.cost.plan_times import resolved_cost
from pipeproof.cost.transfer_times import MeasuredLinks
from pipeproof.diagnostics.finding import BadPlanAtError
from pipeproof.schedule.ops import SEND_KINDS, OpKind
from pipeproof.sim.op_durations import durations_of
from pipeproof.sim.simulate import simulate
from pipeproof.specs.cost import AnalyticSpec, NetworkSpec
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.plan_sections import TopologySpec
from tests.plans import plan_dict, plan_spec
from tests.profiles import profile_text
from tests.schedule.drawn import generated, plan_of, requests

NETWORK = {
    "ranks_per_node": 2,
    "node": {"bandwidth": 1, "latency_us": 1},
    "between": {"bandwidth": 0.1, "latency_us": 5},
    "launch_us": 2,
}


def plan(cost=None, network=None, **sections):
    cost = {"forward_us": 10**6, "backward_us": 10**6, **(cost or {}), "network": {**NETWORK, **(network or {})}}
    return plan_spec(cost=cost, **sections)


# Formulas

FOUR_BY_TWO = Shape.of([*range(8)], 2, 1)  # four nodes of two
LINKS = Network(2, Link(Fraction(1), Fraction(100)), Link(Fraction(1), Fraction(100)), Link(Fraction(5), Fraction(10)))
BYTES = Fraction(800)


@pytest.mark.parametrize(
    ("kind", "algorithm", "time"),
    [
        (OpKind.ALL_REDUCE, "ring", 14 * 5 + Fraction(1400, 10)),  # 2 * 7 steps, 2 * 7/8 of 800 bytes
        (OpKind.ALL_REDUCE, "tree", 2 * (2 * 5 + 1) + Fraction(1600, 10)),  # two levels of nodes, one hop inside
        (OpKind.ALL_REDUCE, "auto", 22 + 160),
        (OpKind.REDUCE_SCATTER, "tree", 7 * 5 + 70),
        (OpKind.ALL_GATHER, "ring", 7 * 5 + 560),  # each brings 800
        (OpKind.GATHER_FORWARD, "ring", 7 * 5 + 560),
        (OpKind.BROADCAST, "ring", 7 * 5 + 80),
        (OpKind.BARRIER, "auto", 22),
        (OpKind.ALL_TO_ALL, "ring", 5 + 60),  # 6/8 leave each card
    ],
)
def test_collectives_by_hand(kind, algorithm, time):
    num_bytes = Fraction(0) if kind is OpKind.BARRIER else BYTES
    network = replace(LINKS, algorithm=algorithm)
    assert network.collective_us(kind, FOUR_BY_TWO, num_bytes) == time
    assert replace(network, launch_us=Fraction(3)).collective_us(kind, FOUR_BY_TWO, num_bytes) == time + 3
    assert network.collective_us(kind, Shape.of([5], 2, 1), num_bytes) == 0


def test_auto_takes_the_tree_for_small_sizes_and_the_ring_for_large_ones():
    network = replace(LINKS, algorithm="auto")
    of = {name: replace(LINKS, algorithm=name) for name in ("ring", "tree")}
    for num_bytes, better in ((Fraction(8), "tree"), (Fraction(80_000), "ring")):
        times = {name: one.collective_us(OpKind.ALL_REDUCE, FOUR_BY_TWO, num_bytes) for name, one in of.items()}
        assert network.collective_us(OpKind.ALL_REDUCE, FOUR_BY_TWO, num_bytes) == times[better] == min(times.values())
    two = Shape.of([0, 1], 2, 1)
    assert len({one.collective_us(OpKind.ALL_REDUCE, two, BYTES) for one in of.values()}) == 1


def test_groups_use_only_their_own_links():
    inside, across = Shape.of([0, 1], 2, 1), Shape.of([0, 2], 2, 1)
    assert LINKS.collective_us(OpKind.ALL_REDUCE, inside, BYTES) == 2 + 8
    assert LINKS.collective_us(OpKind.ALL_REDUCE, across, BYTES) == 10 + 80
    slow_nodes = replace(LINKS, node=Link(Fraction(50), Fraction(1)))
    assert slow_nodes.collective_us(OpKind.ALL_REDUCE, across, BYTES) == 10 + 80
    assert slow_nodes.collective_us(OpKind.ALL_REDUCE, FOUR_BY_TWO, BYTES) == 14 * 50 + 1400
    with pytest.raises(ValueError, match="goes around no ring"):
        LINKS.way(OpKind.FORWARD, inside, BYTES)


@settings(deadline=None, max_examples=100)
@given(
    sizes=st.fixed_dictionaries({axis: st.integers(1, 4) for axis in ("tp", "cp", "ep", "dp", "pp")}),
    order=st.permutations(["tp", "cp", "ep", "dp", "pp"]),
    node=st.integers(1, 12),
    per_nic=st.integers(1, 3),
)
def test_the_shapes_of_an_axis_are_those_of_its_groups(sizes, order, node, per_nic):
    topology = TopologySpec(**sizes, order=tuple(order))
    mesh = mesh_of(PlanSpec.model_construct(topology=topology))
    for axis in order:
        groups = [list(group.ranks) for group in mesh.groups(axis)]
        assert sorted(groups_of(topology, axis).tolist()) == sorted(groups)
        shapes = {Shape.of(group, node * per_nic, per_nic) for group in groups}
        assert replace(LINKS, ranks_per_node=node * per_nic, ranks_per_nic=per_nic).shapes(np.array(groups)) == shapes


def test_a_device_brings_its_links():
    network = Network.of_device(AnalyticSpec(device="h100"), DEVICES["h100"], NetworkSpec(algorithm="auto"))
    assert (network.ranks_per_node, network.launch_us, network.algorithm) == (8, 20, "auto")
    assert network.between == Link(Fraction(5), Fraction(50_000) * Fraction(3, 4))


# Durations


def by_op(lowered, prefix):
    """Durations of operations with this prefix, for sends of their message, in microseconds, in order."""
    durations = durations_of(lowered)
    return [
        Fraction(durations.message(op_id) if op.kind in SEND_KINDS else durations.ticks[op_id], durations.ticks_per_us)
        for op_id, op in enumerate(lowered.graph.ops)
        if str(op).startswith(prefix)
    ]


def test_each_edge_has_its_own_time():
    lowered = lower(plan(topology={"pp": 4}))
    num_bytes = 2 * 8 * 16 * 4
    inside, across = 2 + 1 + Fraction(num_bytes, 1000), 2 + 5 + Fraction(num_bytes, 100)
    assert set(by_op(lowered, "0SEND_F")) == set(by_op(lowered, "1SEND_B")) == {Fraction("4.024")} == {inside}
    assert set(by_op(lowered, "1SEND_F")) == {across}
    assert lowered.spec.cost.p2p_latency_us == across  # for schedules and clocks
    assert resolved_cost(lowered.spec) is lowered.spec.cost


def test_slices_and_gathers_follow_the_transport():
    full, partial = (lower(plan(topology={"pp": 2, "tp": 2}, transport=name)) for name in ("full", "partial"))
    num_bytes = 2 * 8 * 16 * 4
    assert set(by_op(full, "0SEND_F")) == {7 + Fraction(num_bytes, 100)}
    assert set(by_op(partial, "0SEND_F")) == {7 + Fraction(num_bytes, 200)}
    assert set(by_op(partial, "1GATHER_F")) == {2 + 1 + Fraction(num_bytes, 2000)}
    assert set(by_op(partial, "0SLICE_F")) == {0}


def test_a_stage_s_time_includes_its_collectives():
    lowered = lower(plan(topology={"pp": 2, "tp": 2}))
    timeline = simulate(lowered).timeline
    children = [span for span in timeline.spans if span.rank == 0 and span.op.startswith("0F0/")]
    (whole,) = (span for span in timeline.spans if span.rank == 0 and span.op == "0F0")
    assert len(children) == 5  # the embedding's, two of each block
    assert (whole.end - whole.start, whole.end) == (10**6, children[-1].end)
    each = 2 + 2 + Fraction(2 * 8 * 16 * 4, 1000)
    assert [span.end - span.start for span in children] == [each] * 5
    assert children[0].start == 10**6 - 5 * each


def test_the_largest_micro_batch_takes_the_whole_time_and_others_less():
    lengths = {"seq_lengths": [8, 4, 8, 8], "micro_batch_size": 2}
    lowered = lower(plan(topology={"pp": 2, "tp": 2}, schedule=lengths))
    spans = {span.op: span for span in simulate(lowered).timeline.spans if span.rank == 0}
    took = [spans[f"0F{k}"].end - spans[f"0F{k}"].start for k in range(4)]
    assert took[0] == took[2] == took[3] == 10**6
    assert took[0] - took[1] == 5 * Fraction(2 * 4 * 16 * 4, 1000)


def test_gradients_are_reduced_in_their_own_type_after_the_last_backward():
    cost = {
        "analytic": {"device": "h200", "dtype": "bfloat16", "link_efficiency": 0.75, "launch_us": 0, "node_step_us": 0}
    }
    lowered = lower(plan_spec(topology={"pp": 1, "dp": 2}, cost=cost))
    spans = [span for span in simulate(lowered).timeline.spans if span.rank == 0]
    reduces = [span for span in spans if span.op.startswith("0REDUCE_GRAD:dp/")]
    last_backward = next(span for span in spans if span.op == "0B3")
    step = next(span for span in spans if span.op == "0STEP")
    assert reduces[0].start == last_backward.end
    assert reduces[-1].end == step.start < step.end
    embedding = 32 * 16 * 4  # float32; half of it in each of two steps goes through each rank
    assert reduces[0].end - reduces[0].start == Fraction("0.007") >= Fraction(embedding, 450 * 750)


@pytest.mark.parametrize("topology", [{"dp": 2}, {"tp": 2, "dp": 2}, {"tp": 2, "ep": 2}])
def test_replicas_take_what_the_rank_takes_that_stands_for_them(topology):
    model = {"moe": {"num_experts": 4, "top_k": 2, "ffn_size": 8}} if "ep" in topology else {}
    for ranks_per_node in (2, 4):
        network = {"ranks_per_node": ranks_per_node}
        whole = lower(plan(topology={"pp": 2, **topology}, network=network, model=model))
        folded = whole.with_graph(whole.canonical)
        assert folded.folded
        assert not whole.folded
        assert simulate(folded).makespan == simulate(whole).makespan


def test_of_replicas_the_slowest_counts():
    """Some of four pipelines on nodes of three cross nodes."""
    mesh = {"topology": {"pp": 2, "dp": 4, "order": ["pp", "tp", "cp", "ep", "dp"]}, "network": {"ranks_per_node": 3}}
    whole = lower(plan(**mesh))
    folded = whole.with_graph(whole.canonical)
    times = by_op(whole, "0SEND_F")
    assert len({*times}) == 2
    assert {*by_op(folded, "0SEND_F")} == {max(times)}
    reductions = by_op(whole, "0REDUCE_GRAD:dp/")
    assert {*by_op(folded, "0REDUCE_GRAD:dp/")} <= {*reductions}


def test_without_a_network_collectives_take_nothing():
    lowered = lower(plan_spec(topology={"pp": 2, "tp": 2, "dp": 2}, cost={"p2p_latency_us": 7}))
    assert lowered.links is None
    durations = durations_of(lowered)
    assert durations.message_ticks is None
    assert set(by_op(lowered, "0SEND_F")) == {7}
    assert {*by_op(lowered, "0F"), *by_op(lowered, "0B")} == {100, 200, 0}  # collectives are among them


def test_a_profile_says_what_messages_and_collectives_take(tmp_path):
    path = tmp_path / "measured.json"
    path.write_text(profile_text(topology={"pp": 2, "tp": 2}))
    data = plan_dict(topology={"pp": 2, "tp": 2}, cost={"profile": str(path), "p2p": "rendezvous"})
    lowered = lower(plan_from_dict(data).spec)
    assert isinstance(lowered.links, MeasuredLinks)
    measured, num_bytes = lowered.links.profile, 2 * 8 * 16 * 4
    assert set(by_op(lowered, "0SEND_F")) == {measured.message_us(num_bytes)} == {7}
    children = {*by_op(lowered, "0F0/")}
    assert children == {measured.collective_us(OpKind.ALL_REDUCE, 2, num_bytes)}
    (whole,) = (span for span in simulate(lowered).timeline.spans if (span.rank, span.op) == (0, "0F0"))
    assert whole.end - whole.start == 110


@st.composite
def networked(draw):
    """A plan of any kind of schedule, on some mesh and network, whose stages have room for their collectives."""
    kind, request = draw(requests(max_ranks=3, max_chunks=2))
    generated(kind, request)
    data = plan_of(kind, request)
    data["model"]["seq_length"] = 48
    data["topology"] |= draw(st.sampled_from([{}, {"tp": 2}, {"dp": 2}, {"tp": 2, "sequence_parallel": True}]))
    data["transport"] = draw(st.sampled_from(["full", "partial"]))
    network = {
        "ranks_per_node": draw(st.integers(1, 4)),
        "node": {"bandwidth": 100, "latency_us": draw(st.sampled_from([0, "1/3"]))},
        "between": {"bandwidth": draw(st.sampled_from([1, 50])), "latency_us": 1},
    }
    cost = dict.fromkeys(("forward_us", "backward_input_us", "backward_weight_us"), 1000)
    data["cost"] = {**cost, "network": network, "p2p": draw(st.sampled_from(["async", "rendezvous"]))}
    return lower(plan_from_dict(data).spec)


@given(lowered=networked())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_both_engines_time_networks_alike(lowered):
    fast, simpy = (simulate(lowered, engine=name) for name in ("auto", "simpy"))
    assert fast.timeline == simpy.timeline
    assert fast.figures == simpy.figures


# Refusals


def test_cards_fill_the_nodes_of_a_device():
    data = plan_dict(cost={"analytic": "h200", "network": {"ranks_per_nic": 3}})
    with pytest.raises(BadPlanAtError, match=r"a node has 8 ranks, which .* 3 does not divide") as caught:
        lower(plan_from_dict(data).spec)
    assert caught.value.path == ("cost", "network", "ranks_per_nic")


def test_a_plan_with_a_network_survives_its_dump():
    spec = plan()
    for unset in (False, True):
        assert plan_from_dict(spec.model_dump(mode="json", exclude_unset=unset)).spec == spec


def test_a_stage_has_room_for_its_collectives():
    lowered = lower(plan(cost={"forward_us": 5}, topology={"pp": 2, "tp": 2}))
    with pytest.raises(
        BadPlanAtError, match=r"F of stage 0 takes 5 us, and the collectives inside it 25\.1 us"
    ) as caught:
        simulate(lowered)
    assert (caught.value.findings[0].code, caught.value.path) == ("PP154", ("cost", "forward_us"))


@pytest.mark.parametrize("p2p", ["async", "rendezvous"])
def test_clocks_compare_by_one_measure(p2p):
    """One latency for all, whichever way a clock is made."""
    lowered = lower(plan(cost={"p2p": p2p}, network={"ranks_per_nic": 2}, topology={"pp": 2, "dp": 2}))
    given = lowered.spec.model_copy(update={"cost": lowered.spec.cost})
    assert simulated_clock(lowered).timed == simulated_clock(lower(given)).timed
    if p2p == "async":
        assert simulated_clock(lowered).path().makespan == asap_clock(lowered.schedule, lowered.spec).path().makespan
