"""Tokens that go once to each node of their experts, in a type of their own: by hand, in graphs, on shared links."""

from dataclasses import replace
from fractions import Fraction

import pytest

from pipeproof.comm.lower import lower
from pipeproof.cost.analytic_times import AnalyticCosts
from pipeproof.cost.network_times import Link, Network, Routing, Shape
from pipeproof.diagnostics.finding import Severity
from pipeproof.schedule.op_table import NONE
from pipeproof.schedule.ops import OpKind
from pipeproof.sim.link_costs import bytes_of
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.specs.model import MoeSpec
from pipeproof.stages.describe.boundary import MicroBatchSize
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.model_family import stored_activations
from pipeproof.stages.describe.op_work import Phase
from pipeproof.verify.certificate import graph_digest
from pipeproof.verify.check_plan import check_subject
from tests.plans import plan_dict, plan_spec, subject

MOE = {"num_experts": 8, "top_k": 4, "ffn_size": 8, "dense_layers": 1}
EIGHT_BIT = {**MOE, "dispatch_dtype": "float8"}

# Eight ranks on four nodes of two; 100 bytes a microsecond inside a node, 10 on a network card.
FOUR_BY_TWO = Shape.of([*range(8)], 2, 1)
LINKS = Network(2, Link(Fraction(1), Fraction(100)), Link(Fraction(1), Fraction(100)), Link(Fraction(5), Fraction(10)))


def exchange_us(network, shape=FOUR_BY_TWO, num_bytes=Fraction(800)):
    return network.collective_us(OpKind.ALL_TO_ALL, shape, num_bytes)


@pytest.mark.parametrize(
    ("top_k", "nodes_per_token", "across"),
    [
        (4, 1, Fraction(600, 4)),  # a quarter of the 6/8 of 800 bytes that leave a node
        (4, 2, 300),
        (4, 4, 600),  # one node for each expert: as without
        (8, 6, 300),  # there are no more than four nodes for eight experts
        (2, 3, 600),  # nor more than two for two
    ],
)
def test_exchanges_by_hand(top_k, nodes_per_token, across):
    network = replace(LINKS, routing=Routing(top_k, nodes_per_token))
    assert exchange_us(network) == 5 + 1 + Fraction(across) / 10  # both steps' latencies
    # with a network ten times as fast as the node, the forwarded part counts: half of 800 bytes to the one neighbour
    fast = replace(network, between=Link(Fraction(5), Fraction(1000)))
    assert exchange_us(fast) == 5 + 1 + Fraction(400, 100)


def test_a_node_is_not_left_for_itself_and_ranks_alone_on_theirs_hand_nothing_on():
    network = replace(LINKS, routing=Routing(4, 2))
    inside = Shape.of([0, 1], 2, 1)
    assert exchange_us(network, inside) == exchange_us(LINKS, inside) == 1 + 4
    alone = Shape.of([0, 2, 4, 6], 2, 1)  # 3/4 of 800 bytes, one half of the visits
    assert exchange_us(network, alone) == 5 + 30
    assert exchange_us(LINKS, alone) == 5 + 60


def test_experts_without_a_limit_change_no_links():
    assert LINKS.routed(None) == LINKS.routed(MoeSpec(num_experts=8, top_k=4, ffn_size=8)) == LINKS
    assert LINKS.routed(MoeSpec(num_experts=8, top_k=4, ffn_size=8, nodes_per_token=2)).routing == Routing(4, 2)


def test_the_figure_of_a_published_count():
    """arXiv:2505.09343, section 2.3.2: (1 + 2 bytes) x 32 tokens x 9 paths x 7 K / 50 GB/s = 120.96 us.

    There every token crosses for each expert; of n ranks on n nodes, n - 1 do. The count of each expert's tokens goes
    before, in eight bytes.
    """
    moe = {"num_experts": 252, "top_k": 9, "ffn_size": 16, "dispatch_dtype": "float8"}
    data = plan_dict(
        model={"hidden_size": 7000, "num_heads": 500, "num_layers": 2, "seq_length": 32, "moe": moe},
        topology={"pp": 1, "ep": 36},
        schedule={"kind": "gpipe", "num_micro_batches": 1, "micro_batch_size": 1},
        cost={
            "analytic": {
                "device": "h800", "dtype": "bfloat16", "ranks_per_node": 1, "link_efficiency": 1, "launch_us": 0,
                "network_step_us": 0,
            }
        },
    )  # fmt: skip
    costs = AnalyticCosts(plan_from_dict(data).spec, plan_from_dict(data).spec.cost.analytic)
    published = Fraction("120.96") * Fraction(35, 36)
    (stage,) = costs.stages
    counts = Fraction(252 * 8, 50_000) * Fraction(35, 36)
    for phase, one_block in ((Phase.FORWARD, published + counts), (Phase.INPUT, published)):
        assert stage[phase].links_us == pytest.approx(float(2 * one_block), abs=0.01)  # two blocks


def test_what_goes_to_experts_has_its_type_and_what_comes_back_has_not():
    spec = plan_spec(model={"moe": EIGHT_BIT}, topology={"ep": 2})
    dense, block = describe_gpt(spec)[1:3]
    assert not dense.forward_collectives
    counts, *forward = block.forward_collectives
    assert (counts.label, counts.item_bytes(2)) == ("layer.1.mlp.counts", 8)
    for calls, labels in (
        (forward, ["layer.1.mlp.dispatch", "layer.1.mlp.combine"]),
        (block.backward_collectives, ["layer.1.mlp.combine.grad", "layer.1.mlp.dispatch.grad"]),
    ):
        assert [(c.label, c.dtype) for c in calls] == [(labels[0], "float8"), (labels[1], None)]
        assert [c.item_bytes(2) for c in calls] == [1, 2]


def test_the_graph_has_the_type_and_times_follow_it():
    network = {"ranks_per_node": 1, "node": {"bandwidth": 1}, "between": {"bandwidth": 0.001}}
    cost = {"forward_us": 10**6, "backward_us": 10**6, "network": network}
    lowered = lower(plan_spec(model={"moe": EIGHT_BIT}, topology={"ep": 2}, cost=cost))
    graph = lowered.graph
    exchanges = [i for i in graph.rank_ops(0) if graph.ops[i].kind is OpKind.ALL_TO_ALL]
    assert {graph.tensors[t].dtype for t in graph.tensor[exchanges].tolist() if t != NONE} == {"float8", "int64"}
    visits = 2 * 8 * 4 * 16  # 16 tokens, 4 experts each, 16 elements; activations have 4 bytes
    counts = 8 * 8  # of each expert, in 8 bytes
    assert {*bytes_of(lowered, lowered.links)[exchanges].tolist()} == {counts, visits, 4 * visits}
    timeline = simulate(lowered).timeline
    spans = {s.op: s.end - s.start for s in timeline.spans if s.rank == 0 and "0F0/" in s.op}
    assert list(spans.values()) == [counts / 2, visits / 2, 4 * visits / 2]  # one half leaves, at a byte a nanosecond


def test_plans_with_it_are_right_and_others():
    plain, narrow, limited = (
        subject(model={"moe": moe}, topology={"ep": 4, "dp": 2})
        for moe in (MOE, EIGHT_BIT, {**MOE, "nodes_per_token": 2})
    )
    for one in (plain, narrow, limited):
        found = check_subject(one).findings
        assert [f.code for f in found if f.severity is Severity.ERROR] == []
    assert len({graph_digest(one) for one in (plain, narrow, limited)}) == 3
    assert plain.graph.tensors + narrow.graph.tensors[-1:] == narrow.graph.tensors


@pytest.mark.parametrize(
    ("topology", "kind"),
    [
        ({"tp": 2, "ep": 2, "cp": 2, "sequence_parallel": True}, "zb_h1"),
        ({"tp": 2, "ep": 4, "dp": 2}, "1f1b"),
        ({"ep": 2}, "dualpipe"),
    ],
)
def test_other_plans_with_it_are_right_and_both_engines_time_them_alike(topology, kind):
    cost = {"analytic": {"device": "h800", "dtype": "bfloat16", "ranks_per_node": 2}}
    moe = {**EIGHT_BIT, "nodes_per_token": 2}
    one = subject(model={"moe": moe}, topology=topology, schedule={"kind": kind}, cost=cost)
    for plan in (one.plan, one.plan.unfolded()):
        found = check_subject(replace(one, lowered=plan)).findings
        assert [f.code for f in found if f.severity is Severity.ERROR] == []
        assert simulate(plan, engine="fast").timeline == simulate(plan, engine="simpy").timeline


def test_experts_keep_tokens_as_they_were_sent():
    def held(moe):
        spec = plan_spec(model={"moe": moe}, topology={"ep": 2}, memory={"dtype": "bfloat16"})
        (block,) = [layer for layer in describe_gpt(spec) if layer.name == "layer.1"]
        return {h.name: h.num_bytes for h in stored_activations(spec, [block], MicroBatchSize(8, 2))}

    wide, narrow = held(MOE), held(EIGHT_BIT)
    assert (wide["mlp.experts.gate_up"], narrow["mlp.experts.gate_up"]) == (2 * 16 * 4 * 16, 16 * 4 * 16)
    assert {k: v for k, v in wide.items() if k != "mlp.experts.gate_up"} == {
        k: v for k, v in narrow.items() if k != "mlp.experts.gate_up"
    }
