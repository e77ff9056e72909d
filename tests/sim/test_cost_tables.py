"""Curves of products, attention and collectives: monotone, below the peak, exact, near published measurements."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.cost.analytic_times import AnalyticCosts, PhaseTime
from pipeproof.cost.device_tables import attention_share, device_table, moved_us, product_us
from pipeproof.cost.devices import DEVICES
from pipeproof.cost.network_times import Network, Shape
from pipeproof.cost.plan_times import resolved_cost
from pipeproof.schedule.ops import Op, OpKind, parse_op
from pipeproof.sim.op_durations import durations_of, work_us
from pipeproof.specs.cost import AnalyticSpec, CostSpec
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.specs.model import MoeSpec
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.op_work import (
    CONTEXT_LAUNCHES,
    LOSS_LAUNCHES,
    ComputeUnit,
    Phase,
    ProductShape,
    layer_work,
)
from tests.plans import FLAT, plan_spec

TABLES = {name: table for name in DEVICES if (table := device_table(name)) is not None}
CURVES = [(name, curve) for name, table in TABLES.items() for curve in table.products]

# Times in microseconds of ai-dynamo/aiconfigurator (systems data, Apache-2.0) by device, type, m, n and k. Those in
# eight and four bits include the cast of [m, k], 8 bytes an element in the mean.
PRODUCTS = [
    ("h100", "bfloat16", 4096, 4096, 4096, 174), ("h100", "bfloat16", 8192, 8192, 8192, 1405),
    ("h100", "bfloat16", 4096, 512, 16384, 90), ("h100", "bfloat16", 8192, 16384, 512, 218),
    ("h100", "float8", 4096, 4096, 4096, 151), ("h100", "float8", 8192, 8192, 8192, 885),
    ("h100", "float8", 4096, 16384, 16384, 1809), ("h100", "float8", 4096, 512, 65536, 850),
    ("b200", "float8", 4096, 8192, 8192, 226), ("b200", "float8_block", 8192, 8192, 8192, 411),
    ("b200", "float4", 8192, 8192, 8192, 285),
]  # fmt: skip
# Equal numbers of elements of two bytes, 2^20 and 2^28 in all, for all-gathers and all-reduces; A100 by vTrain.
COLLECTIVES = [
    ("h100", OpKind.ALL_GATHER, 8, 2**21, 22.2), ("h100", OpKind.ALL_GATHER, 8, 2**29, 1401.5),
    ("h100", OpKind.ALL_REDUCE, 4, 2**29, 2299.7), ("h100", OpKind.REDUCE_SCATTER, 2, 2**29, 1077.9),
    ("a100", OpKind.ALL_REDUCE, 2, 2**29, 2838.4), ("a100", OpKind.ALL_REDUCE, 4, 2**22, 77.3),
    ("a100", OpKind.ALL_REDUCE, 8, 2**29, 4191.5),
    ("b200", OpKind.ALL_REDUCE, 8, 2**29, 1334.6), ("b200", OpKind.ALL_TO_ALL, 4, 2**29, 825.2),
]  # fmt: skip


def peak(name, curve):
    return DEVICES[name].bfloat16 if curve.dtype == "bfloat16" else DEVICES[name].peak(curve.dtype)


def shape(m, n, k, number=1, *, ragged=False):
    return ProductShape(Fraction(m), Fraction(k), Fraction(n), Fraction(number), ragged)


def plan(analytic=None, **sections):
    model = {"hidden_size": 4096, "num_heads": 32, "ffn_size": 14336, "vocab_size": 32000, "seq_length": 4096}
    sections.setdefault("model", model)
    return plan_spec(cost={"analytic": {"device": "h100", "dtype": "bfloat16", **(analytic or {})}}, **sections)


def stages(spec):
    return AnalyticCosts(spec, spec.cost.analytic).stages


sizes = st.integers(1, 2**17)


@settings(deadline=None, max_examples=150)
@given(which=st.sampled_from(CURVES), m=sizes, n=sizes, k=sizes, number=st.integers(1, 64), hot=st.booleans())
def test_a_product_is_never_faster_than_the_peak_and_a_larger_one_takes_longer(which, m, n, k, number, hot):
    name, curve = which
    time = product_us(curve, shape(m, n, k, number), peak(name, curve), is_hot=hot)
    assert time >= Fraction(2 * m * n * k * number) / (Fraction(repr(peak(name, curve))) * 10**6)
    larger = [shape(m + 1, n, k, number), shape(m, n + 1, k, number), shape(m, n, k + 1, number)]
    times = [product_us(curve, size, peak(name, curve), is_hot=hot) for size in larger]
    assert time < min(times)
    assert max(times) <= 2 * time * (1 + Fraction(repr(curve.slowdown)))  # a row more makes no jump
    for more in (shape(m, n, k, number + 1), shape(m, n, k, number, ragged=True)):
        assert time < product_us(curve, more, peak(name, curve), is_hot=hot)


@pytest.mark.parametrize(("name", "dtype", "m", "n", "k", "measured"), PRODUCTS)
def test_products_are_as_measured(name, dtype, m, n, k, measured):
    curve = next(curve for curve in TABLES[name].products if curve.dtype == dtype)
    cast = 0 if dtype == "bfloat16" else 8 * m * k / (DEVICES[name].memory * 1000)
    predicted = float(product_us(curve, shape(m, n, k), peak(name, curve), is_hot=False)) + cast
    assert abs(predicted / measured - 1) < 0.15  # the 90th percentile of the residuals


@pytest.mark.parametrize(("name", "kind", "ranks", "num_bytes", "measured"), COLLECTIVES)
def test_collectives_are_as_measured(name, kind, ranks, num_bytes, measured):
    network = Network.of_device(AnalyticSpec(device=name), DEVICES[name], None, TABLES[name].collectives)
    group = Shape.of(list(range(ranks)), 8, 1)
    put_in = Fraction(num_bytes, ranks if kind is OpKind.ALL_GATHER else 1)
    assert abs(float(network.collective_us(kind, group, put_in)) / measured - 1) < 0.12


@settings(deadline=None, max_examples=80)
@given(name=st.sampled_from(sorted(TABLES)), num_bytes=st.integers(0, 2**32), more=st.integers(1, 2**20))
def test_a_collective_of_more_bytes_takes_longer_and_no_jump(name, num_bytes, more):
    for curve in TABLES[name].collectives:
        before, after = moved_us(curve, Fraction(num_bytes)), moved_us(curve, Fraction(num_bytes + more))
        assert before < after
        steepest = 1 / (curve.bandwidth * 1000) + curve.ramp_us / curve.ramp_bytes
        assert float(after - before) <= more * steepest * 1.001


@pytest.mark.parametrize("name", sorted(TABLES))
def test_more_ranks_take_longer_and_many_ranks_have_the_curve_of_eight(name):
    network = Network.of_device(AnalyticSpec(device=name, ranks_per_node=64), DEVICES[name], None,
                                TABLES[name].collectives)  # fmt: skip
    for kind in (OpKind.ALL_GATHER, OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER, OpKind.ALL_TO_ALL):
        times = [network.collective_us(kind, Shape.of(list(range(n)), 64, 1), Fraction(0)) for n in (2, 4, 8, 64)]
        assert times == sorted(times)


def test_attention_nears_its_share_with_the_number_of_keys():
    curve = TABLES["h100"].attention
    shares = [attention_share(curve, Fraction(keys), is_forward=True) for keys in (1, 256, 4096, 10**7)]
    assert shares == sorted(shares)
    assert shares[1] == Fraction(repr(curve.forward)) / 2
    assert shares[-1] < Fraction(repr(curve.forward))


# Plans


def test_a_phase_takes_the_time_of_the_host_or_that_of_the_device():
    small = {"hidden_size": 64, "num_heads": 4, "ffn_size": 128, "vocab_size": 64, "seq_length": 32}
    eager, slow, graph = (
        stages(plan(more, model=small, topology={"pp": 1}))[0]
        for more in ({"host_us": 50}, {"host_us": 100}, {"execution": "graph"})
    )
    for phase in Phase:
        assert eager[phase].us == eager[phase].host_us > eager[phase].device_us
        assert slow[phase].us == 2 * eager[phase].us
        assert graph[phase].us == graph[phase].device_us == eager[phase].device_us
    compiled = stages(plan({"host_us": 50, "execution": "compiled"}, model=small, topology={"pp": 1}))[0]
    assert 0 < compiled[Phase.FORWARD].host_us < eager[Phase.FORWARD].host_us
    large = stages(plan(topology={"pp": 1}))[0][Phase.FORWARD]
    assert large.us == large.device_us > large.host_us > 0


SMALL = {"hidden_size": 64, "num_heads": 4, "ffn_size": 128, "vocab_size": 64, "seq_length": 32}


def host_us(more=None, phase=Phase.FORWARD, **sections):
    """Host time of one stage's phase where an operation takes 50 us; it bounds the phase."""
    sections = {"topology": {"pp": 1}, **sections}
    time = stages(plan({"host_us": 50, **(more or {})}, **{"model": SMALL, **sections}))[0][phase]
    assert time.us == time.host_us
    return time.host_us


def test_a_bias_is_no_operation_of_the_host():
    for topology in ({"pp": 1}, {"pp": 1, "tp": 2}):
        with_them, without = (
            host_us(model={**SMALL, "biases": biases}, topology=topology) for biases in ("all", "none")
        )
        assert with_them == without


def test_attention_over_a_ring_starts_operations_for_each_of_its_steps():
    two, four = (host_us({"collective_us": 0}, topology={"pp": 1, "cp": cp}) for cp in (2, 4))
    assert four - two == plan({}).model.num_layers * 2 * CONTEXT_LAUNCHES * 50


def test_a_fused_loss_over_tensor_parallel_ranks_starts_fewer_operations():
    for phase in (Phase.FORWARD, Phase.INPUT):
        several, fused, alone = (
            host_us({"collective_us": 0}, phase, topology={"pp": 1, "tp": tp}, memory={"cross_entropy": loss})
            for tp, loss in ((2, "in_place"), (2, "fused"), (1, "in_place"))
        )
        assert several - fused == LOSS_LAUNCHES * 50
        assert fused == alone


def test_the_host_starts_collectives_and_fills_tensors():
    mesh = {"topology": {"pp": 1, "tp": 2}}
    num_layers = plan({}).model.num_layers
    assert host_us({"collective_us": 150}, **mesh) - host_us(**mesh) == (2 * num_layers + 1 + 3) * 100
    assert host_us({"fill_us": 0}) == host_us() < host_us({"fill_us": 10})
    assert host_us({"fill_us": 10}) - host_us() == (host_us({"fill_us": 30}) - host_us()) / 3
    graph = {"execution": "graph", "collective_us": 150, "fill_us": 10}
    assert stages(plan(graph, model=SMALL, **mesh))[0][Phase.FORWARD].host_us == 0


def test_input_is_read_on_the_first_stage_before_each_forward():
    without, with_it = (stages(plan({"host_us": 50, **more}, model=SMALL)) for more in ({}, {"input_us": 10**6}))
    assert with_it[0][Phase.FORWARD].us - without[0][Phase.FORWARD].us == 10**6
    assert with_it[0][Phase.INPUT] == without[0][Phase.INPUT]
    assert with_it[1:] == without[1:]


def test_the_time_of_a_step_outside_of_its_pipeline_counts_once_for_a_rank():
    schedule = {"kind": "interleaved", "num_chunks": 2, "num_micro_batches": 4}
    without, with_it = (resolved_cost(plan(more, schedule=schedule)) for more in ({}, {"step_us": 1000}))
    more = [with_it.optimizer_of(stage) - without.optimizer_of(stage) for stage in range(4)]
    assert more == [500] * 4


def test_pipelined_collectives_hide_all_but_their_first_part():
    mesh = {"pp": 1, "tp": 4, "sequence_parallel": True}
    alone, pipelined = (stages(plan(more, topology=mesh))[0] for more in ({}, {"overlap": ["tp"]}))
    for phase in (Phase.FORWARD, Phase.INPUT):
        assert alone[phase].links_us / 4 < pipelined[phase].links_us < alone[phase].links_us / 2
        assert pipelined[phase].device_us > alone[phase].device_us - alone[phase].links_us
    assert pipelined[Phase.WEIGHT] == alone[Phase.WEIGHT]


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_products_hide_collectives_of_their_backward(sequence_parallel):
    """Each gather again and each sum is shorter than the product next to it, and holds 16 of 132 processors."""
    mesh, lost = {"pp": 1, "tp": 2, "sequence_parallel": sequence_parallel}, Fraction(16, 132)
    memory = {"sequence_parallel_activations": "regather"} if sequence_parallel else {}
    alone, hidden = (
        stages(plan({"memory_efficiency": 1, **more}, topology=mesh, memory=memory))[0]
        for more in ({}, {"overlap": ["tp_backward"]})
    )
    assert hidden[Phase.FORWARD] == alone[Phase.FORWARD]
    assert hidden[Phase.WEIGHT].links_us == lost * alone[Phase.WEIGHT].links_us
    left = hidden[Phase.INPUT].links_us / alone[Phase.INPUT].links_us
    if sequence_parallel:  # the gathers of gradients remain, which nothing hides
        assert 0.5 < left < 0.62
    else:
        assert left == lost
    for phase in (Phase.INPUT, Phase.WEIGHT):
        assert (hidden[phase].host_us, hidden[phase].compute_us) == (alone[phase].host_us, alone[phase].compute_us)


def test_casts_to_fewer_bits_pass_through_memory():
    half, eight = (stages(plan(more, topology={"pp": 1}))[0] for more in ({}, {"matmul_dtype": "float8"}))
    elements = 4 * 2 * 4096 * (3 * 4096 + 14336)  # of four blocks: the inputs of their four products
    assert eight[Phase.FORWARD].num_bytes - half[Phase.FORWARD].num_bytes == 4 * elements
    assert eight[Phase.WEIGHT].num_bytes == half[Phase.WEIGHT].num_bytes
    assert eight[Phase.FORWARD].compute_us < half[Phase.FORWARD].compute_us


def test_a_token_goes_once_to_each_node_of_its_experts():
    device, ranks = DEVICES["h100"], Shape.of(list(range(32)), 8, 1)
    network = Network.of_device(AnalyticSpec(device="h100"), device)
    moe = MoeSpec(num_experts=64, top_k=8, ffn_size=64)
    direct, by_node = network.routed(moe), network.routed(moe, by_node=True)
    size = Fraction(2**30)
    assert direct == network
    across = [net.collective_us(OpKind.ALL_TO_ALL, ranks, size) - net.launch_us for net in (direct, by_node)]
    reached = 4 * (1 - Fraction(3, 4) ** 8)  # of four nodes by eight experts
    assert float(across[1] / across[0]) == pytest.approx(float(reached / 8), rel=1e-3)
    inside = Shape.of(list(range(8)), 8, 1)
    curves = TABLES["h100"].collectives
    near = [Network.of_device(AnalyticSpec(device="h100"), device, None, curves).routed(moe, by_node=by)
            for by in (False, True)]  # fmt: skip
    assert near[1].collective_us(OpKind.ALL_TO_ALL, inside, size) < near[0].collective_us(
        OpKind.ALL_TO_ALL, inside, size
    )


def test_a_ring_across_nodes_uses_the_cards_of_all_its_members():
    device = DEVICES["h100"]
    network = Network.of_device(AnalyticSpec(device="h100"), device)
    flat = Network.of_device(AnalyticSpec(device="h100", link_efficiency=0.75), device)
    size = Fraction(2**30)
    whole, single = Shape.of(list(range(16)), 8, 1), Shape.of(list(range(0, 128, 8)), 8, 1)
    times = [net.collective_us(OpKind.ALL_REDUCE, group, size) for net in (network, flat) for group in (whole, single)]
    assert times[1] == times[2] == times[3] > 7 * times[0]


def test_a_pair_lacks_the_processors_that_its_collectives_hold():
    model = {"hidden_size": 4096, "num_heads": 32, "ffn_size": 8192, "vocab_size": 32000, "seq_length": 4096,
             "moe": {"num_experts": 16, "top_k": 4, "ffn_size": 2048}}  # fmt: skip
    schedule = {"kind": "dualpipe", "num_micro_batches": 8, "micro_batch_size": 1}
    for more in ({"host_us": 0}, FLAT):
        spec = plan(more, model=model, topology={"pp": 4, "ep": 8}, schedule=schedule)
        costs = AnalyticCosts(spec, spec.cost.analytic)
        both = sum(costs.stages[2].values(), costs.stages[1][Phase.FORWARD])
        both = PhaseTime(*(getattr(both, name) - getattr(costs.stages[2][Phase.FORWARD], name)
                           for name in PhaseTime.__slots__))  # fmt: skip
        computing = both.compute_us + both.memory_us
        assert both.links_us > 0
        if more is FLAT:
            assert costs.overlapped[1] == max(computing, both.links_us)
        else:
            assert computing < costs.overlapped[1] < computing + both.links_us


def test_a_table_of_ones_own_takes_the_place_of_the_known_one():
    table = TABLES["h100"].model_dump(mode="json") | {"source": "mine", "memory_efficiency": 0.25, "host_us": 0.0}
    own, known = plan({"table": table}), plan()
    assert plan_from_dict(own.model_dump(mode="json")).spec == own
    ours, theirs = stages(own)[0][Phase.FORWARD], stages(known)[0][Phase.FORWARD]
    assert ours.compute_us == theirs.compute_us
    assert ours.memory_us > 2 * theirs.memory_us


def test_only_products_for_gradients_lack_fast_accumulation():
    table = TABLES["h100"]
    curve = next(curve for curve in table.products if curve.dtype == "float8")
    slowed, fast = (
        plan(
            {
                "matmul_dtype": "float8",
                "table": table.model_copy(
                    update={"products": (curve.model_copy(update={"gradient_slowdown": share}),)}
                ).model_dump(mode="json"),
            }
        )
        for share in (0.25, 0)
    )
    for work in layer_work(fast, "layer.0", AnalyticCosts(fast, fast.cost.analytic).size, 2):
        if work.narrow:
            ours, theirs = (AnalyticCosts(spec, spec.cost.analytic).work(work).compute_us for spec in (slowed, fast))
            assert ours == theirs * (1 if work.phase is Phase.FORWARD else Fraction(5, 4))
    assert {name: [curve.gradient_slowdown for curve in of.products] for name, of in TABLES.items() if name in
            ("h100", "b200")} == {"h100": [0, 0.05, 0], "b200": [0, 0, 0, 0]}  # fmt: skip


def test_operations_other_than_products_take_their_start_for_each_kernel():
    """Kernels of a block: 7 in F and in I, 2 in W; with a share of bandwidth in the plan, no start is added."""
    known = TABLES["h100"].model_dump(mode="json")
    first, more = (plan({"table": known | {"elementwise_us": us}}) for us in (0.0, 10.0))
    layer = next(layer for layer in describe_gpt(first, AnalyticCosts(first, first.cost.analytic).size)
                 if layer.name == "layer.0")  # fmt: skip
    before, after = (AnalyticCosts(spec, spec.cost.analytic).layer(layer) for spec in (first, more))
    works = [work for work in layer_work(first, "layer.0", AnalyticCosts(first, first.cost.analytic).size, 2)
             if work.unit is not ComputeUnit.MATMUL]  # fmt: skip
    for phase in Phase:
        kernels = sum(work.launches for work in works if work.phase is phase)
        assert after[phase].device_us - before[phase].device_us == 10 * kernels
    # F and I: two norms, q and k turned, attention, SwiGLU, two additions; W: the weights of two norms
    assert [sum(work.launches for work in works if work.phase is phase) for phase in Phase] == [7, 7, 2]
    flat, also_flat = (plan({"table": known | {"elementwise_us": us}, "memory_efficiency": 0.6}) for us in (0.0, 10.0))
    assert stages(flat) == stages(also_flat)


fractions = st.builds(Fraction, st.integers(0, 10**9), st.integers(1, 10**6))


@given(tf=fractions.filter(bool), tb=fractions, c=fractions)
def test_ticks_are_the_times_scaled_by_one_integer(make_plan, tf, tb, c):
    plan = make_plan(p=2, m=1)
    cost = CostSpec(forward_us=tf, backward_us=tb, p2p_latency_us=c)
    graph, durations = plan.graph, durations_of(replace(plan, spec=plan.spec.model_copy(update={"cost": cost})))
    scale = durations.ticks_per_us
    assert durations.latency_ticks == c * scale
    for op, ticks in zip(graph.ops, durations.ticks, strict=True):
        assert ticks == {OpKind.FORWARD: tf, OpKind.BACKWARD: tb}.get(op.kind, 0) * scale


def test_a_list_is_by_stage():
    cost = CostSpec(forward_us=(Fraction(1), Fraction(2)), backward_us=(Fraction(3), Fraction(4)))
    assert [work_us(parse_op(text), cost) for text in ("0F0", "1F5", "0B0", "1B1")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("cost", "parts"),
    [
        (CostSpec(backward_us=Fraction(3)), (Fraction(3, 2), Fraction(3, 2))),
        (CostSpec(backward_input_us=Fraction(1), backward_weight_us=Fraction(5)), (1, 5)),
        (CostSpec(backward_input_us=(Fraction(7), Fraction(1)), backward_weight_us=Fraction(5)), (1, 5)),
    ],
)
def test_parts_of_a_backward_are_those_given_or_its_halves(cost, parts):
    kinds = (OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT)
    assert tuple(work_us(Op(kind, 1, 0), cost) for kind in kinds) == parts
    assert work_us(Op(OpKind.BACKWARD, 1, 0), cost) == sum(parts)
