"""Computed costs: FLOPs against hand-computed numbers and rules of thumb, bounds, links, exactness."""

from __future__ import annotations

from fractions import Fraction

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.analysis.tune.frameworks import every_schedule
from pipeproof.analysis.tune.layouts import Layout
from pipeproof.analysis.tune.plan_layouts import PlanLayouts
from pipeproof.comm.generated_schedule import stage_costs
from pipeproof.comm.lower import lower, mesh_of
from pipeproof.cost.analytic_links import Links
from pipeproof.cost.analytic_times import AnalyticCosts, PhaseTime
from pipeproof.cost.devices import DEVICES, model_flops_utilization, peak_tflops
from pipeproof.cost.network_times import Link, Network
from pipeproof.cost.plan_times import resolved_cost, with_times
from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.diagnostics.units import time_text
from pipeproof.schedule.ops import Op, OpKind, parse_op
from pipeproof.sim.op_durations import work_us
from pipeproof.sim.simulate import simulate
from pipeproof.specs.cost import AnalyticSpec
from pipeproof.specs.exact_times import GRID_US
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.specs.plan import PlanSpec, plan_json_schema
from pipeproof.specs.plan_sections import TopologySpec
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.layer import Collective, CollectiveKind
from pipeproof.stages.describe.op_work import ComputeUnit, Phase, Work, layer_work
from pipeproof.stages.describe.stage_memory import copied_bytes
from tests.cli.commands import invoke
from tests.plans import FLAT, plan_dict, plan_spec

MODEL = {"hidden_size": 4096, "num_heads": 32, "ffn_size": 14336, "vocab_size": 32000, "seq_length": 4096}


def plan(analytic=None, **sections):
    cost = {"analytic": {"device": "h200", "dtype": "bfloat16", **(analytic or {})}}
    sections = {"model": MODEL, "topology": {"pp": 1}, **sections}
    return plan_spec(cost=cost, **sections)


def costs(spec):
    return AnalyticCosts(spec, spec.cost.analytic)


def works(spec, layer="layer.0", *, flash=True):
    return layer_work(spec, layer, costs(spec).size, 2, flash=flash)


def flops(spec, layer="layer.0", phase=None, unit=None, *, flash=True):
    chosen = (w for w in works(spec, layer, flash=flash) if phase in (None, w.phase) and unit in (None, w.unit))
    return sum(w.flops for w in chosen)


def one(spec, name, phase, *, flash=True):
    (found,) = (w for w in works(spec, flash=flash) if (w.name, w.phase) == (name, phase))
    return found


# FLOPs and bytes


def test_a_small_block_by_hand():
    """2 sequences of 8 tokens, hidden 16, 4 heads of 4, ffn 32: every product written out."""
    spec = plan(model={})
    tokens, pairs = 16, 2 * 36  # 8 * 9 / 2 pairs up to the diagonal, in each of two rows
    by_hand = {
        "attn.qkv": 2 * tokens * 16 * 48,
        "attn.out": 2 * tokens * 16 * 16,
        "mlp.gate_up": 2 * tokens * 16 * 64,
        "mlp.down": 2 * tokens * 32 * 16,
    }
    for name, product in by_hand.items():
        assert [one(spec, name, phase).flops for phase in Phase] == [product] * 3
    assert one(spec, "attn.core", Phase.FORWARD).flops == 2 * (2 * pairs * 16)
    assert one(spec, "attn.core", Phase.INPUT).flops == 5 * (2 * pairs * 16)
    assert flops(spec, "head", Phase.FORWARD, ComputeUnit.MATMUL) == 2 * tokens * 16 * 32
    assert one(spec, "attn.out", Phase.FORWARD).num_bytes == 2 * (16 * 16 + 16 * 16 + 16 * 16)
    assert one(spec, "attn.out", Phase.WEIGHT).num_bytes == 2 * (16 * 16 + 16 * 16) + 8 * 16 * 16
    assert one(spec, "attn.core", Phase.FORWARD).num_bytes == 2 * 4 * 16 * 16
    assert one(spec, "mlp.add", Phase.FORWARD) == Work(
        "mlp.add", Phase.FORWARD, ComputeUnit.VECTOR, 16 * 16, 2 * 3 * 16 * 16
    )


def test_unfused_attention_computes_and_stores_all_scores():
    spec = plan(model={})
    scores = 2 * 8 * 8 * 4
    assert one(spec, "attn.scores", Phase.FORWARD, flash=False).flops == 2 * scores * 4
    assert one(spec, "attn.mix", Phase.INPUT, flash=False).flops == 4 * scores * 4
    assert one(spec, "attn.softmax", Phase.FORWARD, flash=False).num_bytes == 2 * 2 * scores
    assert one(spec, "attn.scores", Phase.FORWARD, flash=False).num_bytes == 2 * (scores + 2 * 16 * 16)
    # 8 * 8 of 8 * 9 / 2 pairs, the products of the forward twice as many in the backward without the scores again
    assert flops(spec, unit=ComputeUnit.ATTENTION) * Fraction(64, 36) * Fraction(6, 7) == sum(
        one(spec, name, phase, flash=False).flops
        for name in ("attn.scores", "attn.mix")
        for phase in (Phase.FORWARD, Phase.INPUT)
    )


def test_six_flops_per_weight_and_token_but_for_attention():
    """6 N T (arXiv:2001.08361): N the weights of products, T the tokens; attention comes on top."""
    spec = plan(schedule={"micro_batch_size": 3})
    tokens = 3 * 4096
    layers = {layer.name: layer for layer in describe_gpt(spec)}
    for name in ("layer.0", "head"):
        weights = sum(p.shape[0] * p.shape[1] for p in layers[name].parameters if len(p.shape) == 2)
        assert flops(spec, name, unit=ComputeUnit.MATMUL) == 6 * weights * tokens
    core = flops(spec, unit=ComputeUnit.ATTENTION)
    assert core == Fraction(7, 6) * 6 * (4096 + 1) * 4096 * tokens  # 7 products where 6 are counted
    assert 0 < flops(spec, unit=ComputeUnit.VECTOR) < Fraction(2, 1000) * flops(spec)


@settings(deadline=None, max_examples=30)
@given(tp=st.sampled_from([1, 2, 4, 8]), sequence_parallel=st.booleans(), rows=st.integers(1, 4))
def test_tensor_parallelism_shares_products_and_more_tokens_are_more(tp, sequence_parallel, rows):
    topology = {"tp": tp, "sequence_parallel": sequence_parallel}
    whole, cut = plan(schedule={"micro_batch_size": rows}), plan(topology=topology, schedule={"micro_batch_size": rows})
    double = plan(topology=topology, schedule={"micro_batch_size": 2 * rows})
    for layer in ("embed", "layer.0", "norm", "head"):
        for unit in (ComputeUnit.MATMUL, ComputeUnit.ATTENTION):
            assert flops(cut, layer, unit=unit) * tp == flops(whole, layer, unit=unit)
        assert flops(double, layer) == 2 * flops(cut, layer)
    norm = one(cut, "mlp_norm", Phase.FORWARD).flops
    assert norm * (tp if sequence_parallel else 1) == one(whole, "mlp_norm", Phase.FORWARD).flops


def test_weight_gradients_are_accumulated_in_the_type_that_they_have_in_memory():
    """A product reads and writes its weight gradient: 4 bytes an element twice, or 2."""
    whole, half = plan(), plan(memory={"gradient_dtype": "bfloat16"})
    for name, elements in (("mlp.down", 14336 * 4096), ("attn.out", 4096 * 4096)):
        wide, narrow = one(whole, name, Phase.WEIGHT), one(half, name, Phase.WEIGHT)
        assert (wide.accumulated, narrow.accumulated) == (8 * elements, 4 * elements)
        assert wide.num_bytes - narrow.num_bytes == 4 * elements
    (looked_up,) = (w for w in works(half, "embed") if w.phase is Phase.WEIGHT)
    tokens = costs(half).size.num_tokens
    assert looked_up.num_bytes == (2 + 4) * tokens * 4096


@pytest.mark.parametrize(
    ("kind", "forward", "backward"), [("separate", 22, 22), ("in_place", 38, 14), ("compiled", 26, 6), ("fused", 6, 4)]
)
def test_a_loss_reads_and_writes_logits_as_its_implementation_does(kind, forward, backward):
    """In bfloat16 a cast to float32, or back, moves 6 bytes an element, and each further read or write 4."""
    spec = plan(memory={"cross_entropy": kind})
    found = {work.phase: work for work in works(spec, "head") if work.name == "head.loss"}
    elements = costs(spec).size.num_tokens * spec.model.vocab_size
    assert found[Phase.FORWARD].num_bytes == forward * elements
    assert found[Phase.INPUT].num_bytes == backward * elements


def test_a_loss_is_hidden_on_a_rank_that_the_host_bounds():
    """The host runs ahead during the loss; on a rank that the device bounds it has to wait."""
    small = {"hidden_size": 512, "num_heads": 8, "ffn_size": 2048, "vocab_size": 65536, "seq_length": 4096}
    by_host, by_device = (costs(plan({"host_us": us}, model=small | {"num_layers": 2})).stages[0] for us in (160, 60))
    assert sum(time.host_us for time in by_host.values()) > sum(time.device_us for time in by_device.values())
    assert by_host[Phase.FORWARD].us == by_host[Phase.FORWARD].host_us < by_device[Phase.FORWARD].us
    assert by_device[Phase.FORWARD].us == by_device[Phase.FORWARD].device_us


def test_the_results_of_a_ring_of_cp_are_added_step_by_step():
    """Two reads and a write: all of the tokens in the first step, 3/4 of them in each further one."""
    model = MODEL | {"num_kv_heads": 8}
    assert not [w for w in works(plan(model=model)) if w.name == "attn.merge"]
    for cp in (2, 4):
        ring = plan(model=model, topology={"pp": 1, "cp": cp, "tp": 2})
        tokens, rows = costs(ring).size.num_tokens // cp, Fraction(1 + 3 * cp, 4)
        outputs, inputs = 4096 // 2, (4096 + 2 * 1024) // 2
        assert one(ring, "attn.merge", Phase.FORWARD).num_bytes == 2 * 3 * tokens * outputs * rows
        assert one(ring, "attn.merge", Phase.INPUT).num_bytes == 2 * 3 * tokens * inputs * rows


def test_context_parallelism_shares_everything_but_the_keys():
    whole, cut = plan(), plan(topology={"pp": 1, "cp": 4})
    assert flops(cut) * 4 == flops(whole)
    core, core_cut = (one(spec, "attn.core", Phase.FORWARD) for spec in (whole, cut))
    assert core.num_bytes == 2 * 4 * (2 * 4096) * 4096  # q, k, v and o of two rows, 2 bytes an element
    assert core_cut.num_bytes == 2 * (2 * 1024 + 2 * 4096) * 2 * 4096


@pytest.mark.parametrize("num_splits", [2, 4])
def test_splits_do_the_work_of_the_whole_and_read_weights_again(num_splits):
    whole = costs(plan()).stages[0]
    cut = costs(plan(schedule={"kind": "seq1f1b", "num_sequence_splits": num_splits})).stages[0]
    weights = 4 * (4 * 4096**2 + 3 * 4096 * 14336) + 32000 * 4096
    keys = 4 * 2 * 2 * 4096 * 4096  # of four blocks; all splits together read (n + 1) / 2 of them
    for phase in Phase:
        assert cut[phase].flops == whole[phase].flops
    more = cut[Phase.FORWARD].num_bytes - whole[Phase.FORWARD].num_bytes
    assert more == (num_splits - 1) * 2 * weights + keys * Fraction(num_splits - 1, 2) * 2


# Roofline


def test_an_operation_takes_the_longer_of_compute_and_memory():
    of = costs(plan({"matmul_efficiency": 0.5, "memory_efficiency": 0.25, "host_us": 0}))
    product = Work("x", Phase.FORWARD, ComputeUnit.MATMUL, Fraction(989 * 10**6), Fraction(1))
    copy = Work("x", Phase.FORWARD, ComputeUnit.VECTOR, Fraction(1), Fraction(4_800_000))
    assert of.work(product) == PhaseTime(product.flops, product.num_bytes, compute_us=Fraction(2))
    assert of.work(copy) == PhaseTime(copy.flops, copy.num_bytes, memory_us=Fraction(4))


def test_large_products_are_bound_by_compute_and_small_ones_and_norms_by_memory():
    of = costs(plan())
    assert of.work(one(plan(), "mlp.down", Phase.FORWARD)).memory_us == 0
    assert of.work(one(plan(), "mlp_norm", Phase.FORWARD)).compute_us == 0
    tiny = plan(model={**MODEL, "seq_length": 16})
    assert costs(tiny).work(one(tiny, "mlp.down", Phase.FORWARD)).compute_us == 0


def test_copies_to_host_memory_run_next_to_computations():
    """A stage takes the longer one of its computations and its copies: the bytes of its first blocks at 1 GB/s."""
    sizes = {**MODEL, "num_layers": 4}
    memory = {"dtype": "bfloat16", "offload_blocks": 2}

    def stage(memory, **cost):
        cost = {"analytic": {"device": "h200", "dtype": "bfloat16"}, **cost}
        sections = {"model": sizes, "topology": {"pp": 2}, "memory": memory, "cost": cost}
        spec = plan_spec(**sections)
        return spec, costs(spec).stages[0]

    spec, slow = stage(memory, host_bandwidth=1)
    _, fast = stage(memory, host_bandwidth=10**6)
    _, without = stage({"dtype": "bfloat16"})
    us = sum(copied_bytes(spec, f"layer.{index}", costs(spec).size) for index in range(2)) / 1000
    for phase in (Phase.FORWARD, Phase.INPUT):
        assert slow[phase].us == us > without[phase].us == fast[phase].us
    assert slow[Phase.WEIGHT] == without[Phase.WEIGHT]


def test_float32_uses_its_own_peak_and_size():
    fused = {"cross_entropy": "fused"}  # others convert logits to float32
    half, single = (
        costs(plan({"dtype": dtype}, memory=fused)).stages[0][Phase.FORWARD] for dtype in ("bfloat16", "float32")
    )
    assert (single.flops, single.num_bytes) == (half.flops, 2 * half.num_bytes)
    assert single.compute_us > 989 / 67 * Fraction(99, 100) * half.compute_us
    assert costs(plan({"dtype": None})).stages == costs(plan({"dtype": "float32"})).stages


# Links


def test_a_ring_by_hand():
    spec = plan({"launch_us": 10, "node_step_us": 0.5, "link_efficiency": 1}, topology={"pp": 1, "tp": 4})
    links = Links(spec, Network.of_device(spec.cost.analytic, DEVICES["h200"]))
    numel = 45 * 10**6  # 90 MB in bfloat16
    expected = {
        CollectiveKind.ALL_REDUCE: (135, 10 + 6 * Fraction(1, 2) + 300),  # 2 * 3/4 of 90 MB at 450 GB/s
        CollectiveKind.REDUCE_SCATTER: (Fraction(135, 2), 10 + 3 * Fraction(1, 2) + 150),
        CollectiveKind.ALL_GATHER: (270, 10 + 3 * Fraction(1, 2) + 600),  # each rank brings 90 MB
    }
    for kind, (megabytes, time) in expected.items():
        collective = Collective(kind, "tp", numel, "x")
        assert links.collective_bytes(collective, 2) == megabytes * 10**6
        assert links.collective_us(collective, 2) == time


def test_stages_pay_for_the_collectives_that_their_layers_issue():
    alone, cut = costs(plan()).stages[0], costs(plan(topology={"pp": 1, "tp": 2, "sequence_parallel": True})).stages[0]
    assert all(alone[phase].links_us == 0 for phase in Phase)
    activation = 2 * 4096 * 4096 * 2  # 2 rows of 4096 tokens, 4096 elements of 2 bytes, twice: base plan has 2 rows
    # forward: embed 1, a block 4 (gather and scatter around attention and MLP), head 1; half of each crosses
    scalars = 3 * 2 * 4096 * 4  # three all-reduces of a float32 number per token: losses are not added in 16 bits
    assert cut[Phase.FORWARD].link_bytes == 18 * activation / 2 + scalars
    assert cut[Phase.INPUT].link_bytes == 18 * activation / 2
    assert cut[Phase.WEIGHT].links_us == 0


@settings(deadline=None, max_examples=200)
@given(
    sizes=st.fixed_dictionaries({axis: st.integers(1, 4) for axis in ("tp", "cp", "ep", "dp", "pp")}),
    order=st.permutations(["tp", "cp", "ep", "dp", "pp"]),
    ranks_per_node=st.integers(1, 24),
)
def test_an_axis_crosses_nodes_where_one_of_its_groups_does(sizes, order, ranks_per_node):
    topology = TopologySpec(**sizes, order=tuple(order))
    plan = PlanSpec.model_construct(topology=topology)
    mesh, link = mesh_of(plan), Link(Fraction(1), Fraction(1))
    links = Links(plan, Network(ranks_per_node, link, link, link))
    for axis in order:
        nodes = [{rank // ranks_per_node for rank in group.ranks} for group in mesh.groups(axis)]
        assert links.crosses(axis) == any(len(of_group) > 1 for of_group in nodes)


@pytest.mark.parametrize(
    ("topology", "transport", "time"),
    [
        ({"pp": 2}, "full", 21 + 64),  # 2 x 4096 x 4096 elements of 2 bytes at 1048.576 GB/s
        ({"pp": 2, "tp": 2}, "full", 21 + 64),
        ({"pp": 2, "tp": 2, "sequence_parallel": True}, "full", 21 + 32),
        ({"pp": 2, "tp": 2}, "partial", 21 + 32 + 21 + 32),  # a half, and the gather of the other
    ],
)
def test_messages_by_hand(topology, transport, time):
    spec = plan({"link_efficiency": 1}, topology=topology, transport=transport)
    device = costs(spec).device
    of = costs(spec)
    fast = type(device)(
        **{name: getattr(device, name) for name in ("bfloat16", "float32", "memory", "network", "ranks_per_node")},
        host=device.host, memory_gib=device.memory_gib,
        float8=None, link=1048.576, peer=1048.576, source="",
    )  # fmt: skip
    of.links = Links(of.links.plan, Network.of_device(of.analytic, fast))
    assert of.links.messages() == (time,)


def test_between_nodes_messages_use_the_network():
    inside, across = (costs(plan({"ranks_per_node": n}, topology={"pp": 4})) for n in (4, 2))
    assert all(slow > fast for slow, fast in zip(across.links.messages(), inside.links.messages(), strict=True))
    num_bytes = 2 * 4096 * 4096 * 2
    assert across.links.messages()[0] == 20 + 5 + Fraction(num_bytes, 50 * 1000) / Fraction(3, 4)


def test_a_pair_of_mi300x_has_one_link_and_a_ring_all_of_them():
    of = costs(plan({"device": "mi300x"}, topology={"pp": 2}))
    assert of.links.messages()[0] == 21 + Fraction(2 * 4096 * 4096 * 2, 64 * 1000) / Fraction(3, 4)


def test_declared_boundaries_count_with_their_own_types_and_layouts():
    entries = [
        {"name": "x", "dims": "sbh", "tp": "sharded(s)", "receiver_tp": "sharded(b)"},
        {"name": "ids", "dims": "sb", "dtype": "int64"},
    ]
    of = costs(plan(topology={"pp": 2, "tp": 2}, boundaries=entries))
    bandwidth = 450 * 1000 * Fraction(3, 4)
    assert of.links.messages() == (42 + (4096 * 2 * 4096 // 2 * 2 + 4096 * 2 * 8) / bandwidth,)


# Times of a plan


def test_times_are_on_the_grid_and_near_what_they_stand_for():
    spec = plan(topology={"pp": 4, "tp": 2})
    cost, of = resolved_cost(spec), costs(spec)
    for stage, phases in enumerate(of.stages):
        parts = (cost.forward_of(stage), cost.backward_input_of(stage), cost.backward_weight_of(stage))
        for time, phase in zip(parts, Phase, strict=True):
            assert isinstance(time, Fraction)
            assert (time / GRID_US).denominator == 1
            assert abs(time - phases[phase].us) <= GRID_US / 2
        assert cost.backward_of(stage) == parts[1] + parts[2]
    assert abs(cost.p2p_latency_us - max(of.links.messages())) <= GRID_US / 2
    assert resolved_cost(spec) == cost


def test_given_times_stay_as_they_are():
    spec = plan_spec(cost={"forward_us": 5})
    assert with_times(spec) is spec


def test_a_stage_without_layers_takes_a_little():
    stages = [["embed", "layer.0", "layer.1", "layer.2", "layer.3", "norm", "head"], []]
    spec = plan(topology={"pp": 2}, stages=stages)
    cost = resolved_cost(spec)
    assert (cost.forward_of(1), cost.backward_of(1)) == (GRID_US, 0)


def test_the_largest_micro_batch_counts():
    schedule = {"micro_batch_size": 1, "seq_lengths": [1024, 4096, 2048, 512]}
    assert resolved_cost(plan(schedule=schedule)) == resolved_cost(plan(schedule={"micro_batch_size": 1}))


@pytest.mark.parametrize("kind", ["1f1b", "zb_h1", "seq1f1b", "optimal"])
def test_simulator_and_schedules_take_the_computed_times(kind):
    schedule = {"kind": kind, **({"num_sequence_splits": 2} if kind == "seq1f1b" else {})}
    spec = plan(topology={"pp": 2, "tp": 2}, schedule=schedule)
    given_times = spec.model_copy(update={"cost": resolved_cost(spec)})
    lowered = lower(spec)
    computed, durations = simulate(lowered), dict[tuple[OpKind, int], set[Fraction]]()
    for rank in range(lowered.graph.num_ranks):
        for span, op_kind in computed.timeline.compute_spans(rank):
            durations.setdefault((op_kind, parse_op(span.op).stage), set()).add(span.end - span.start)
    share = spec.schedule.num_sequence_splits
    for (op_kind, stage), times in durations.items():  # collectives, which are shown inside, included
        assert times == {work_us(Op(op_kind, stage), resolved_cost(spec)) / share}
    assert computed.makespan > 4 * sum(stage_costs(spec).forward)
    assert stage_costs(spec) == stage_costs(given_times)


def test_rendezvous_stays_rendezvous():
    data = plan_dict(topology={"pp": 2}, cost={"analytic": "h200", "p2p": "rendezvous"})
    assert resolved_cost(plan_from_dict(data).spec).p2p == "rendezvous"


def test_tune_computes_the_times_of_each_layout():
    data = plan_dict(model=MODEL, topology={"pp": 2}, cost={"analytic": {"device": "h100", "dtype": "bfloat16"}})
    loaded = plan_from_dict(data)
    layout = Layout(2, 1, 1, 1, 1, 1, 1, 8, "1f1b", None, "even", "none", "none")
    half = plan_from_dict(PlanLayouts(loaded, every_schedule(), {}).plan_of(layout)).spec
    assert half.cost.analytic == loaded.spec.cost.analytic
    ratio = resolved_cost(half).forward_of(0) / resolved_cost(loaded.spec).forward_of(0)
    assert Fraction(1, 2) < ratio < Fraction(51, 100)  # weights are read for half the tokens


def test_tune_assumes_no_proportions_of_computed_times(shown):
    cost = {"analytic": {"device": "h200", "dtype": "bfloat16"}}
    data = plan_dict(model=MODEL, topology={"pp": 2}, cost=cost, schedule={"micro_batch_size": 1, "kind": "gpipe"})
    output = shown(data, "tune").output
    assert "MBS" in output
    assert "proportion" not in output


# Plans


def test_the_plain_string_is_the_device():
    short, long = (plan_spec(cost={"analytic": a}) for a in ("a100", {"device": "a100"}))
    assert short == long
    for spec in (short, long):  # as workers are sent it
        assert plan_from_dict(spec.model_dump(mode="json")).spec == spec
    validator = jsonschema.Draft202012Validator(plan_json_schema())
    for analytic, is_valid in (("a100", True), ({"device": "a100"}, True), ("a10", False), ({"devise": "a100"}, False)):
        assert validator.is_valid(plan_dict(cost={"analytic": analytic})) == is_valid


def test_times_beyond_all_bounds_are_refused():
    spec = plan(model={**MODEL, "seq_length": 2**26}, schedule={"micro_batch_size": 10**6})
    with pytest.raises(BadPlanError, match="more than 1000000000000 us"):
        resolved_cost(spec)


def test_data_sheets_are_whole_and_in_the_order_of_their_years():
    assert {*DEVICES} == {"a100", "h100", "h200", "h800", "b200", "gb200", "b300", "gb300", "mi300x"}
    for device in DEVICES.values():
        assert device.bfloat16 > device.float32 > 10
        assert device.memory > device.link >= device.peer > device.network
        assert len(device.source) > 20
    for more in ({}, FLAT):
        bound = {name: resolved_cost(plan({"device": name, **more})).forward_of(0) for name in DEVICES}
        assert bound["a100"] > bound["h100"] >= bound["h800"] > bound["b200"] > bound["gb200"] >= bound["gb300"]


# Output


@pytest.fixture
def shown(tmp_path):
    def show(data, command="show"):
        path = tmp_path / "plan.yaml"
        path.write_text(yaml.safe_dump(data))
        return invoke(command, path, *(["--costs"] if command == "show" else []))

    return show


def test_the_table_has_stages_shares_and_assumptions(shown):
    cost = {"analytic": {"device": "h200", "dtype": "bfloat16"}}
    spec = plan(model={**MODEL, "num_layers": 8}, topology={"pp": 4, "tp": 2})
    result = shown(plan_dict(model={**MODEL, "num_layers": 8}, topology={"pp": 4, "tp": 2}, cost=cost))
    assert result.exit_code == 0
    rows = [line.split() for line in result.output.splitlines()]
    assert [row[0] for row in rows if row[1:2] == ["F"]] == ["0", "1-2", "3"]
    (middle,) = (row for row in rows if row[:2] == ["1-2", "F"])
    time = costs(spec).stages[1][Phase.FORWARD]
    assert " ".join(middle[2:4]) == time_text(time.us)
    assert sum(int(share) for share in middle[8::2]) in (98, 99, 100, 101, 102)
    assert (
        "h200 in bfloat16, eager: measured curves of products, flash attention, measured shares of it" in result.output
    )
    flat = shown(plan_dict(topology={"pp": 1}, cost={"analytic": cost["analytic"] | FLAT})).output
    assert "0.7 of peak in products, flash attention, 0.5 of peak in it, 0.8 of memory bandwidth" in flat
    assert "inside a node; schedules count it for every edge" in " ".join(result.output.split())


def test_a_plan_whose_costs_cannot_be_shown_is_refused(shown):
    result = shown(plan_dict(cost={"analytic": "h200"}, stages=[["embed", "layr.0"], ["head"]]))
    assert result.exit_code == 2
    assert "PP111" in result.output


HIDDEN, LAYERS, TOKENS, VOCAB = 4096, 8, 16, 64
PEAK = 989.4e12
"""FLOP/s of an H100 in bfloat16, by its data sheet."""


def plan_of(*, tp=1, pp=2, micro_batches=4, **cost):
    return plan_from_dict(
        {
            "pipeproof": 1,
            "model": {
                "kind": "gpt",
                "num_layers": LAYERS,
                "hidden_size": HIDDEN,
                "num_heads": 32,
                "ffn_size": 4 * HIDDEN,
                "vocab_size": VOCAB,
                "seq_length": TOKENS,
            },
            "topology": {"pp": pp, "tp": tp},
            "schedule": {"kind": "1f1b", "num_micro_batches": micro_batches, "micro_batch_size": 1},
            "cost": cost or {"analytic": {"device": "h100", "dtype": "bfloat16"}},
        }
    ).spec


@pytest.mark.parametrize(("tp", "pp", "micro_batches"), [(1, 1, 1), (1, 2, 4), (4, 2, 4), (2, 4, 8)])
def test_six_flops_for_each_weight_and_token_where_attention_is_small(tp, pp, micro_batches):
    makespan_us = Fraction(1000)
    weights = LAYERS * (4 + 3 * 4) * HIDDEN**2 + VOCAB * HIDDEN
    flops = 6 * weights * TOKENS * micro_batches
    expected = flops / (PEAK * float(makespan_us) * 1e-6 * tp * pp)
    mfu = model_flops_utilization(plan_of(tp=tp, pp=pp, micro_batches=micro_batches), makespan_us)
    assert mfu == pytest.approx(expected, rel=5e-3)


def test_products_in_eight_bits_are_compared_with_their_own_peak():
    plain = model_flops_utilization(plan_of(), Fraction(1000))
    cost = {"analytic": {"device": "h100", "dtype": "bfloat16", "matmul_dtype": "float8"}}
    assert model_flops_utilization(plan_of(**cost), Fraction(1000)) == pytest.approx(plain / 2, rel=1e-3)


def test_without_a_device_there_is_no_peak():
    assert model_flops_utilization(plan_of(forward_us=100), Fraction(1000)) is None


@pytest.mark.parametrize(
    ("keys", "run_dtype", "peak"),
    [
        ({}, "bfloat16", 989.4), ({}, "float32", 66.9), ({"dtype": "bfloat16"}, "float32", 989.4),
        ({"dtype": "float32"}, "bfloat16", 66.9), ({"matmul_dtype": "float8"}, "float32", 1978.9),
    ],
)  # fmt: skip
def test_the_peak_is_that_of_the_type_of_products(keys, run_dtype, peak):
    """`tune` and the step's MFU have one function."""
    assert peak_tflops(AnalyticSpec(device="h100", **keys), run_dtype) == peak
