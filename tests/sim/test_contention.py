"""Links that are shared: small cases by hand, and that nothing alone is slower or anything together faster."""

import re
from fractions import Fraction
from pathlib import Path

import pytest
import simpy
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.comm.lower import lower
from pipeproof.cost.network_times import Shape
from pipeproof.diagnostics.finding import BadPlanAtError
from pipeproof.schedule.op_table import Group, Row, build_graph
from pipeproof.schedule.ops import parse_op
from pipeproof.sim.contention import FairShares, every_rank_of, fair_rates
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import plan_from_dict
from tests.plans import plan_dict

some = settings(max_examples=60, deadline=None)

# Four ranks, two on a node. 100 bytes a microsecond inside a node, 10 on a network card; no latencies but where given.
INSIDE, ACROSS = 100, 10
NETWORK = {"ranks_per_node": 2, "node": {"bandwidth": INSIDE / 1000}, "between": {"bandwidth": ACROSS / 1000}}


def network_of(*programs, groups=(), network=None, cost=None):
    """A plan of four ranks with these programs, each a list of (operation, fields); elements have 4 bytes."""
    links = {**NETWORK, "contention": True, **(network or {})}
    plan = plan_dict(topology={"pp": 4}, cost={"network": links, "forward_us": 5, **(cost or {})})
    rows = [[Row(parse_op(text), **fields) for text, fields in program] for program in programs]
    return lower(plan_from_dict(plan).spec).with_graph(build_graph(rows, (), groups))


def ends(lowered):
    """When each receive and collective is done, in microseconds, by rank and operation."""
    spans = simulate(lowered).timeline.spans
    return {(s.rank, s.op): s.end for s in spans if "WAIT" not in s.op and ("RECV" in s.op or "ALL" in s.op)}


def send(target, num_bytes, index=0):
    return (f"0SEND_F{index}", {"peer": target, "stop": num_bytes // 4})


def receive(source, num_bytes, index=0):
    return [(f"1RECV_F{index}", {"peer": source, "stop": num_bytes // 4}), (f"WAIT(1RECV_F{index})", {})]


# By hand


def test_two_messages_over_one_card_take_twice_as_long():
    # rank 0 sends 200 bytes each to 2 and 3: its card's way out has 10 bytes/us, 5 for each, so 40 us, not 20.
    plan = network_of([send(2, 200), send(3, 200, 1)], [], receive(0, 200), receive(0, 200, 1))
    assert ends(plan) == {(2, "1RECV_F0"): 40, (3, "1RECV_F1"): 40}
    plan = network_of(
        [send(2, 200), send(3, 200, 1)], [], receive(0, 200), receive(0, 200, 1), network={"contention": False}
    )
    assert ends(plan) == {(2, "1RECV_F0"): 20, (3, "1RECV_F1"): 20}


def test_two_messages_between_switches_share_their_links():
    """Two cards of 10 bytes/us below a switch have 2 * 10 / 2 to the other switch: 5 for each of two, 10 for one."""
    switch = {"ranks_per_node": 1, "switch": {"ranks": 2, "oversubscription": 2}}
    plan = network_of([send(2, 200)], [send(3, 200, 1)], receive(0, 200), receive(1, 200, 1), network=switch)
    assert ends(plan) == {(2, "1RECV_F0"): 40, (3, "1RECV_F1"): 40}
    plan = network_of([send(2, 200)], [], receive(0, 200), [], network=switch)
    assert ends(plan) == {(2, "1RECV_F0"): 20}
    plan = network_of([send(1, 200)], receive(0, 200), [send(3, 200, 1)], receive(2, 200, 1), network=switch)
    assert ends(plan) == {(1, "1RECV_F0"): 20, (3, "1RECV_F1"): 20}


def test_both_directions_are_free():
    # 0 -> 2 and 2 -> 0 use the way out of one card and the way in of the other, each alone: 200 / 10.
    plan = network_of([send(2, 200), *receive(2, 200, 1)], [], [send(0, 200, 1), *receive(0, 200)], [])
    assert ends(plan) == {(2, "1RECV_F0"): 20, (0, "1RECV_F1"): 20}


def test_a_way_in_is_shared_as_a_way_out_is():
    # 0 -> 2 and 1 -> 2 leave by two cards and come in by one: 5 bytes/us each until both end at 40.
    plan = network_of([send(2, 200)], [send(2, 200, 1)], [*receive(0, 200), *receive(1, 200, 1)], [])
    assert ends(plan) == {(2, "1RECV_F0"): 40, (2, "1RECV_F1"): 40}


def test_three_flows_of_different_sizes():
    # Out of one card at 12 bytes/us: 4 each. The first, of 80, ends at 20. The others have 120 and 240 left of 200 and
    # 320, at 6 each: the second ends at 20 + 20 = 40, when the third has 240 - 120 = 120 left, at 12: 50.
    plan = network_of(
        [send(2, 80), send(2, 200, 1), send(3, 320, 2)],
        [],
        [*receive(0, 80), *receive(0, 200, 1)],
        receive(0, 320, 2),
        network={"between": {"bandwidth": 0.012}},
    )
    assert ends(plan) == {(2, "1RECV_F0"): 20, (2, "1RECV_F1"): 40, (3, "1RECV_F2"): 50}


def test_a_late_joiner():
    # The first message has sent 50 of 200 bytes when the second begins at 5, after a forward of 5 us. At 5 each, the
    # second's 60 take until 17; the first then has 200 - 50 - 60 = 90 left, at 10: 26.
    late = [send(2, 200), ("0F1", {}), send(3, 60, 1)]
    plan = network_of(late, [], receive(0, 200), receive(0, 60, 1))
    assert ends(plan) == {(2, "1RECV_F0"): 26, (3, "1RECV_F1"): 17}


def test_inside_a_node_nothing_is_shared_with_the_network():
    # 0 -> 1 has 100 bytes/us inside the node, 0 -> 2 has the card: 200 / 100 and 200 / 10.
    plan = network_of([send(1, 200), send(2, 200, 1)], receive(0, 200), receive(0, 200, 1), [])
    assert ends(plan) == {(1, "1RECV_F0"): 2, (2, "1RECV_F1"): 20}


def test_latencies_come_before_bytes():
    # Launch 3 and latency 7: both flows begin at 10 and share: 10 + 2 * 20. A message inside begins at 3 + 1.
    network = {
        "launch_us": 3,
        "between": {"bandwidth": 0.01, "latency_us": 7},
        "node": {"bandwidth": 0.1, "latency_us": 1},
    }
    plan = network_of(
        [send(2, 200), send(3, 200, 1), send(1, 200, 2)],
        receive(0, 200, 2),
        receive(0, 200),
        receive(0, 200, 1),
        network=network,
    )
    assert ends(plan) == {(2, "1RECV_F0"): 50, (3, "1RECV_F1"): 50, (1, "1RECV_F2"): 6}


ALL = Group("dp", (0, 1, 2, 3))


def call(kind, num_bytes, group=0):
    return (f"0{kind}:dp", {"group": group, "stop": num_bytes // 4})


def test_a_ring_beside_a_message():
    # All four reduce 400 bytes: 2 * 3/4 * 400 = 600 through each rank, over the ring 0 > 1 > 2 > 3 > 0, whose 1 > 2 and
    # 3 > 0 use the cards of 1 and 2, and of 3 and 0: 60 us alone. Rank 1 also sends 300 bytes to 3, out of the same
    # card: 5 each. The message ends at 60, when the ring's 1 > 2 has 300 left: 60 + 30 = 90.
    reduce = call("ALL_REDUCE", 400)
    post, wait = receive(1, 300)
    programs = [[reduce], [send(3, 300), reduce], [reduce], [post, reduce, wait]]
    found = ends(network_of(*programs, groups=(ALL,)))
    assert found == {**{(rank, "0ALL_REDUCE:dp"): 90 for rank in range(4)}, (3, "1RECV_F0"): 60}
    alone = ends(network_of(*[[reduce]] * 4, groups=(ALL,)))
    assert set(alone.values()) == {60}


def test_max_min_leaves_to_others_what_a_flow_cannot_use():
    # Flows from 0, 1 and 4 come in at 2: 10/3 each. That leaves 10 - 10/3 = 20/3 of 0's way out to its flow to 3.
    paths = {0: ("out 0", "in 2"), 1: ("out 0", "in 3"), 2: ("out 1", "in 2"), 3: ("out 4", "in 2")}
    rates = fair_rates(paths, lambda _: Fraction(10))
    assert rates == {0: Fraction(10, 3), 2: Fraction(10, 3), 3: Fraction(10, 3), 1: Fraction(20, 3)}
    # 2 bytes/us into one rank leave 8 to the other flow out of the same card
    slow_in = fair_rates({0: ("out", "slow"), 1: ("out", "fast")}, lambda link: Fraction(2 if link == "slow" else 10))
    assert slow_in == {0: 2, 1: 8}


def test_an_all_to_all_of_two_nodes():
    # Each of four ranks has 400 bytes, 100 for each: 2 * 100 leave by its card at 10: 20 us; inside, 100 at 100: 1 us.
    exchange = [[call("ALL_TO_ALL", 400)]] * 4
    assert set(ends(network_of(*exchange, groups=(ALL,))).values()) == {20}
    # one card for two ranks: 4 * 100 bytes, also by the formula without contention
    assert set(ends(network_of(*exchange, groups=(ALL,), network={"ranks_per_nic": 2})).values()) == {40}
    alone = network_of(*exchange, groups=(ALL,), network={"ranks_per_nic": 2, "contention": False})
    assert set(ends(alone).values()) == {40}


def test_a_broadcast_goes_down_the_ring_and_a_barrier_sends_nothing():
    # 0 > 1 > 2 > 3 without 3 > 0, which is what 3's message to 0 has: 200 / 10 both.
    broadcast = call("BROADCAST", 200)
    programs = [[broadcast, *receive(3, 200)], [broadcast], [broadcast], [send(0, 200), broadcast]]
    found = simulate(network_of(*programs, groups=(ALL,))).timeline.spans
    assert {span.end for span in found if "BROADCAST" in span.op or "RECV" in span.op} == {20}
    steps = {"between": {"bandwidth": 0.01, "latency_us": 7}}
    barrier = simulate(network_of(*[[call("BARRIER", 0)]] * 4, groups=(ALL,), network=steps))
    assert barrier.makespan == 6 * 7  # an all-reduce of nothing: six steps


def pipeline(**sections):
    model = {"num_layers": 4, "hidden_size": 64, "seq_length": 64}
    return lower(plan_from_dict(plan_dict(model=model, **sections)).spec)


def test_ranks_that_share_a_card_take_twice_as_long_for_their_messages():
    # tp 2 on each of two nodes; both ranks send 64 * 64 * 4 bytes at a time: 16384 / 10 us, or twice that by one card.
    # One micro-batch: two forwards and two backwards of 5000, and two messages.
    network = {"ranks_per_node": 2, "node": {"bandwidth": 10**6}, "between": {"bandwidth": 0.01}, "contention": True}
    cost = {"forward_us": 5000, "backward_us": 5000}
    schedule = {"num_micro_batches": 1, "micro_batch_size": 1}
    times = {}
    for ranks_per_nic in (1, 2):
        links = {**network, "ranks_per_nic": ranks_per_nic}
        plan = pipeline(topology={"pp": 2, "tp": 2}, schedule=schedule, cost={**cost, "network": links})
        times[ranks_per_nic] = simulate(plan).makespan
    message = Fraction(64 * 64 * 4, 10)
    assert (times[1], times[2]) == (20000 + 2 * message, 20000 + 4 * message)


def test_one_pair_of_a_full_mesh_has_one_link():
    # mi300x: 64 GB/s to one device of the node, 448 to all: two messages from 0 do not meet, and take what one takes.
    plan = plan_dict(topology={"pp": 4}, cost={"analytic": "mi300x", "network": {"contention": True}})
    lowered = lower(plan_from_dict(plan).spec)
    num_bytes = 48 * 10**6
    programs = [[send(1, num_bytes), send(2, num_bytes, 1)], receive(0, num_bytes), receive(0, num_bytes, 1), []]
    rows = [[Row(parse_op(text), **fields) for text, fields in program] for program in programs]
    found = ends(lowered.with_graph(build_graph(rows, (), ())))
    assert set(found.values()) == {20 + 1 + 1000}  # at 64 * 3/4 GB/s


# Properties

KINDS = ("ALL_REDUCE", "ALL_GATHER", "REDUCE_SCATTER", "ALL_TO_ALL", "BROADCAST", "BARRIER")
networks = st.builds(
    lambda latencies, bandwidths, launch, node, cards, algorithm: {
        "ranks_per_node": node,
        "ranks_per_nic": cards if node % cards == 0 else 1,
        "node": {"latency_us": latencies[0], "bandwidth": bandwidths[0]},
        "between": {"latency_us": latencies[1], "bandwidth": bandwidths[1]},
        "launch_us": launch,
        "algorithm": algorithm,
    },
    st.tuples(*[st.sampled_from([0, 1, 0.75, "1/3"])] * 2),
    st.tuples(*[st.sampled_from([0.001, 0.03, 0.7, 11])] * 2),
    st.sampled_from([0, 2, "1/7"]),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["ring", "tree", "auto"]),
)


@given(
    network=networks,
    kind=st.sampled_from((*KINDS, "SEND_F")),
    members=st.permutations(range(4)).flatmap(lambda ranks: st.integers(2, 4).map(lambda n: tuple(sorted(ranks[:n])))),
    size=st.integers(0, 5000),
)
@some
def test_alone_everything_takes_what_the_formulas_say(network, kind, members, size):
    source, target = members[:2]
    both = []
    for contention in (False, True):
        links = {**network, "contention": contention}
        if kind == "SEND_F":
            programs = [[], [], [], []]
            programs[source] = [send(target, 4 * size)]
            programs[target] = receive(source, 4 * size)
            plan = network_of(*programs, network=links)
        else:
            programs = [[call(kind, 4 * size)] if rank in members else [] for rank in range(4)]
            plan = network_of(*programs, groups=(Group("dp", members),), network=links)
        both.append(simulate(plan).timeline)
    assert both[0] == both[1]


flows = st.lists(
    st.tuples(
        st.integers(0, 30),
        st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True).map(tuple),
        st.integers(1, 60).map(Fraction),
    ),
    min_size=1,
    max_size=8,
)
capacities = st.lists(st.sampled_from([Fraction(1), Fraction(7, 3), Fraction(5), Fraction(64)]), min_size=5, max_size=5)


def carried(flows, capacities):
    """(when each flow ends, the rates from each change on)."""
    env, seen, done = simpy.Environment(initial_time=0), [], {}
    shares = FairShares(env, lambda link: capacities[link], lambda now, rates: seen.append((now, rates)))

    def begin(number, path, num_bytes):
        shares.start(path, num_bytes).callbacks.append(lambda _: done.setdefault(number, int(env.now)))

    for number, (start, path, num_bytes) in enumerate(flows):
        env.timeout(start).callbacks.append(lambda _, n=number, p=path, b=num_bytes: begin(n, p, b))
    env.run()
    return done, seen


@given(flows=flows, capacities=capacities)
@settings(max_examples=150, deadline=None)
def test_no_link_is_overfull_none_idles_and_every_byte_arrives(flows, capacities):
    done, seen = carried(flows, capacities)
    assert len(done) == len(flows)
    for now, rates in seen:
        load = [sum((rate for path, rate in rates if link in path), Fraction(0)) for link in range(5)]
        assert all(have <= most for have, most in zip(load, capacities, strict=True)), now
        for path, rate in rates:  # every flow has a link that is full, on which no other flow has more
            assert any(
                load[link] == capacities[link] and all(other <= rate for those, other in rates if link in those)
                for link in path
            )
    for link, most in enumerate(capacities):  # what passes from a time on cannot pass faster than the link
        through = [(start, num_bytes, done[n]) for n, (start, path, num_bytes) in enumerate(flows) if link in path]
        for since in {start for start, _, _ in through}:
            total = sum((num_bytes for start, num_bytes, _ in through if start >= since), Fraction(0))
            assert total <= most * (max(end for start, _, end in through if start >= since) - since)


@given(flows=flows, capacities=capacities)
@settings(max_examples=100, deadline=None)
def test_nobody_is_faster_than_alone(flows, capacities):
    done, _ = carried(flows, capacities)
    for number, flow in enumerate(flows):
        alone, _ = carried([flow], capacities)
        assert done[number] >= alone[0]
        assert alone[0] == flow[0] + -(-flow[2] // min(capacities[link] for link in flow[1]))


@given(
    kind=st.sampled_from(["gpipe", "1f1b", "zb_h1"]),
    micro_batches=st.integers(1, 5),
    forward=st.integers(100, 120),
    bandwidth=st.sampled_from([0.1, 0.3, 7]),
    p2p=st.sampled_from(["async", "rendezvous"]),
)
@some
def test_a_pipeline_whose_messages_never_meet_is_timed_as_by_the_fast_engine(
    kind, micro_batches, forward, bandwidth, p2p
):
    """Two ranks: one way is all forward and the other all backward; a message is shorter than any computation."""
    network = {"ranks_per_node": 1, "node": {"bandwidth": 1}, "between": {"bandwidth": bandwidth, "latency_us": "1/3"}}
    plans = [
        pipeline(
            topology={"pp": 2},
            schedule={"kind": kind, "num_micro_batches": micro_batches, "micro_batch_size": 1},
            cost={
                "forward_us": 2 * forward,
                "backward_input_us": 200,
                "backward_weight_us": 90,
                "p2p": p2p,
                "network": {**network, "contention": contention},
            },
        )
        for contention in (False, True)
    ]
    fast, shared = simulate(plans[0], engine="fast"), simulate(plans[1])
    assert (fast.engine, shared.engine) == ("fast", "simpy")
    assert fast.timeline == shared.timeline
    assert fast.figures == shared.figures


@given(
    topology=st.sampled_from([{"pp": 2, "tp": 2}, {"pp": 4}, {"pp": 2, "tp": 2, "dp": 2}, {"pp": 2, "dp": 2}]),
    ranks_per_node=st.sampled_from([1, 2, 4]),
    bandwidth=st.sampled_from([0.01, 1]),
)
@settings(max_examples=10, deadline=None)
def test_a_step_is_never_shorter_with_contention(topology, ranks_per_node, bandwidth):
    network = {
        "ranks_per_node": ranks_per_node,
        "node": {"bandwidth": 2 * bandwidth},
        "between": {"bandwidth": bandwidth, "latency_us": 1},
        "ranks_per_nic": ranks_per_node,
    }
    cost = {"forward_us": 10**7, "backward_us": 2 * 10**7}
    alone, shared = (
        simulate(pipeline(topology=topology, cost={**cost, "network": {**network, "contention": contention}}))
        for contention in (False, True)
    )
    assert shared.makespan >= alone.makespan


# What is refused


def test_links_are_not_shared_by_more_ranks_than_memory_holds(monkeypatch):
    cost = {"forward_us": 900, "backward_us": 1800, "network": {"ranks_per_node": 8, "node": {"bandwidth": 1}}}
    cost["network"]["contention"] = True
    plan = pipeline(topology={"pp": 2, "dp": 4}, cost=cost)
    folded = plan.with_graph(plan.canonical)
    assert every_rank_of(folded).graph.num_ranks == 8
    monkeypatch.setattr("pipeproof.sim.contention.MAX_OPERATIONS", folded.graph.num_ops)
    with pytest.raises(BadPlanAtError, match="8 ranks, which are simulated one by one") as caught:
        simulate(folded)
    assert (caught.value.findings[0].code, caught.value.path) == ("PP116", ("cost", "network", "contention"))


def test_the_fast_engine_is_refused():
    plan = network_of([send(2, 200)], [], receive(0, 200), [])
    with pytest.raises(BadPlanAtError, match="share links"):
        simulate(plan, engine="fast")


def test_a_shape_counts_members_of_nodes_and_cards():
    shape = Shape.of([0, 1, 2, 4], 4, 2)
    assert (shape.on_nodes, shape.on_cards) == ((1, 3), ((1, 1), (1, 3), (2, 3)))
    assert shape.crosses


def test_the_figures_of_the_page_are_those_of_its_plan():
    text = (Path(__file__).parents[2] / "docs" / "network.md").read_text()
    block = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)[0]
    data = yaml.safe_load(block)
    rows = []
    for contention in (False, True):
        data["cost"]["network"]["contention"] = contention
        result = simulate(lower(plan_from_dict(data).spec))
        spans = {(span.rank, span.op): span for span in result.timeline.spans}
        reduction = spans[0, "0REDUCE_GRAD:dp"]
        rows.append((spans[8, "1F0"].start, reduction.end - reduction.start, result.makespan))
    for without, shared in zip(*rows, strict=True):
        assert f"| {float(without) / 1000:.1f} ms | {float(shared) / 1000:.1f} ms |" in text
