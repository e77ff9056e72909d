"""Computed costs of grouped-query and latent attention and of experts, and of all-to-alls, by hand."""

from fractions import Fraction
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.cost.analytic_times import AnalyticCosts
from pipeproof.cost.devices import DEVICES
from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.specs.cost import NO_MATMUL
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.layer import Collective, CollectiveKind
from pipeproof.stages.describe.op_work import ComputeUnit, Phase, Work, layer_work
from tests.plans import FLAT, plan_dict

MOE = {"num_experts": 8, "top_k": 3, "ffn_size": 24, "num_shared_experts": 2, "dense_layers": 1}
MLA = {"q_rank": 10, "kv_rank": 6, "nope_head_size": 4, "rope_head_size": 2, "value_head_size": 3}
TOKENS, PAIRS = 16, 2 * 36  # of the base plan: 2 rows of 8, with 8 * 9 / 2 pairs up to the diagonal


def plan(model=None, topology=None, analytic=None, **sections):
    cost = {"analytic": {"device": "h200", "dtype": "bfloat16", **(analytic or {})}}
    data = plan_dict(model=model or {}, topology={"pp": 1, **(topology or {})}, cost=cost, **sections)
    return plan_from_dict(data).spec


def costs(spec):
    return AnalyticCosts(spec, spec.cost.analytic)


def works(spec, layer="layer.1", *, flash=True):
    return layer_work(spec, layer, costs(spec).size, 2, flash=flash)


def one(spec, name, phase=Phase.FORWARD, *, flash=True):
    (found,) = (w for w in works(spec, flash=flash) if (w.name, w.phase) == (name, phase))
    return found


def flops(spec, layer, unit, *, flash=True):
    return sum(w.flops for w in works(spec, layer, flash=flash) if w.unit is unit and w.phase is Phase.FORWARD)


def test_grouped_queries_have_narrower_keys_and_values():
    spec = plan({"num_kv_heads": 2, "head_size": 6})  # q of 24, k and v of 12 each
    assert one(spec, "attn.qkv").flops == 2 * TOKENS * 16 * 48
    assert one(spec, "attn.out").flops == 2 * TOKENS * 24 * 16
    assert one(spec, "attn.rotary").flops == 3 * TOKENS * 36
    assert one(spec, "attn.core").flops == 2 * (2 * PAIRS * 24)  # every query meets its group's keys
    assert one(spec, "attn.core").num_bytes == 2 * TOKENS * (24 + 24 + 12 + 12)
    assert one(spec, "attn.scores", flash=False).num_bytes == 2 * (TOKENS * 24 + TOKENS * 12 + 2 * 8 * 8 * 4)


def test_latent_attention_by_hand():
    spec = plan({"mla": MLA})
    products = {
        "attn.q_down": 16 * 10,
        "attn.q_up": 10 * 4 * 6,
        "attn.kv_down": 16 * (6 + 2),
        "attn.kv_up": 6 * 4 * (4 + 3),
        "attn.out": 4 * 3 * 16,
    }
    for name, size in products.items():
        assert [one(spec, name, phase).flops for phase in Phase] == [2 * TOKENS * size] * 3
    assert one(spec, "attn.core").flops == 2 * PAIRS * 4 * (6 + 3)
    assert one(spec, "attn.core", Phase.INPUT).flops == 2 * PAIRS * 4 * (3 * 6 + 2 * 3)
    assert one(spec, "attn.core").num_bytes == 2 * TOKENS * 4 * (6 + 6 + 3 + 3)
    assert one(spec, "attn.rotary").flops == 3 * TOKENS * (4 + 1) * 2
    assert one(spec, "attn.kv_norm").flops == 4 * TOKENS * 6
    plain = plan({"mla": {**MLA, "q_rank": None}})
    assert one(plain, "attn.q").flops == 2 * TOKENS * 16 * 4 * 6
    assert not any(w.name.startswith("attn.q_") for w in works(plain))


def test_experts_by_hand():
    spec = plan({"moe": MOE}, {"ep": 2})
    visits = 3 * TOKENS
    assert one(spec, "mlp.router").flops == 2 * TOKENS * 16 * 8
    assert one(spec, "mlp.experts.gate_up").flops == 2 * visits * 16 * 48
    assert one(spec, "mlp.experts.down").flops == 2 * visits * 24 * 16
    own = 8 // 2 * 24 * 16  # the weights of half of the experts
    assert one(spec, "mlp.experts.down").num_bytes == 2 * (visits * (24 + 16) + own)
    assert one(spec, "mlp.experts.down", Phase.WEIGHT).num_bytes == 2 * visits * (24 + 16) + 8 * own
    assert one(spec, "mlp.shared.down").flops == 2 * TOKENS * 2 * 24 * 16
    assert one(spec, "mlp.permute").num_bytes == 2 * 2 * visits * 16
    assert {w.name for w in works(spec, "layer.0") if w.name.startswith("mlp.")} == {
        "mlp.gate_up", "mlp.swiglu", "mlp.down", "mlp.add",
    }  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    parts=st.sampled_from([{"moe": MOE}, {"mla": MLA}, {"moe": MOE, "mla": MLA}, {"num_kv_heads": 4, "head_size": 2}]),
    tp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    ep=st.sampled_from([1, 2, 4]),
)
def test_the_ranks_of_a_mesh_do_the_work_of_one(parts, tp, cp, ep):
    """But for the work that all TP ranks repeat: routing, and compressing without sequence parallelism."""
    whole = plan(parts)
    cut = plan(parts, {"tp": tp, "cp": cp, "ep": ep, "sequence_parallel": True})
    for layer in ("layer.0", "layer.1"):
        assert flops(cut, layer, ComputeUnit.ATTENTION) * tp * cp == flops(whole, layer, ComputeUnit.ATTENTION)
        routed = sum(w.flops for w in works(cut, layer) if w.name == "mlp.router" and w.phase is Phase.FORWARD)
        own = flops(cut, layer, ComputeUnit.MATMUL) * tp * cp - (tp - 1) * cp * routed
        assert own == flops(whole, layer, ComputeUnit.MATMUL)  # EP ranks have tokens of their own, and as many visits


@settings(max_examples=60, deadline=None)
@given(
    parts=st.sampled_from([{"moe": MOE}, {"mla": MLA}, {"moe": MOE, "mla": MLA}, {"num_kv_heads": 2, "head_size": 6}]),
    tp=st.sampled_from([1, 2]),
    ep=st.sampled_from([1, 2, 4]),
)
def test_products_read_the_weights_that_the_description_has(parts, tp, ep):
    spec = plan(parts, {"tp": tp, "ep": ep})
    for layer in describe_gpt(spec)[1:3]:
        described = sum(prod(p.local_shape({"tp": tp, "ep": ep})) for p in layer.parameters if len(p.shape) > 1)
        products = [w for w in works(spec, layer.name) if w.unit is ComputeUnit.MATMUL and w.phase is Phase.WEIGHT]
        through = [w for w in works(spec, layer.name) if w.unit is ComputeUnit.MATMUL and w.phase is Phase.FORWARD]
        # reading once in two bytes going forward, reading and writing in four bytes each for the gradient
        assert sum(w.num_bytes for w in products) - sum(w.num_bytes for w in through) == (8 - 2) * described


# All-to-alls


@pytest.mark.parametrize(
    ("topology", "ranks_per_node", "time"),
    [
        ({"ep": 4}, 4, 20 + 1 + 300),  # 3/4 of 180 MB at 450 GB/s
        ({"ep": 4}, 2, 20 + 5 + 1800),  # half of it goes to the other node, at 50 GB/s
        ({"ep": 4, "tp": 2}, 4, 20 + 5 + 1800),  # two members of a group on each node
        ({"ep": 4, "tp": 2}, 2, 20 + 5 + 2700),  # each member on a node of its own
        ({"ep": 4, "tp": 2, "order": ["ep", "tp", "cp", "dp", "pp"]}, 4, 20 + 1 + 300),
    ],
)
def test_an_all_to_all_by_hand(topology, ranks_per_node, time):
    spec = plan({"moe": MOE}, topology, {"link_efficiency": 1, "ranks_per_node": ranks_per_node})
    links = costs(spec).links
    exchange = Collective(CollectiveKind.ALL_TO_ALL, "ep", 90 * 10**6, "x")
    assert links.collective_us(exchange, 2) == time
    assert links.collective_bytes(exchange, 2) == 135 * 10**6


def test_stages_pay_for_exchanges_both_ways():
    spec = plan({"moe": MOE, "num_layers": 2}, {"ep": 2})
    (stage,) = costs(spec).stages
    visits = 2 * TOKENS * 3 * 16 * 2 / 2  # there and back, 2 bytes an element, one half to the other rank
    counts = MOE["num_experts"] * 8 / 2  # forward alone
    assert (stage[Phase.FORWARD].link_bytes, stage[Phase.INPUT].link_bytes) == (visits + counts, visits)
    assert stage[Phase.WEIGHT].link_bytes == 0


def test_dense_blocks_and_blocks_with_experts_have_times_of_their_own():
    model = {"moe": {**MOE, "ffn_size": 4096, "dense_layers": 2}, "num_layers": 4}
    stages = [["embed"], ["layer.0"], ["layer.1"], ["layer.2"], ["layer.3"], ["norm", "head"]]
    times = costs(plan(model, {"pp": 6}, stages=stages)).stages
    assert times[1] == times[2] != times[3] == times[4]


# Side by side


def test_what_runs_side_by_side_shares_the_chip_and_the_links():
    schedule = {"kind": "dualpipe", "num_micro_batches": 8}
    spec = plan({"moe": {**MOE, "dense_layers": 0}}, {"pp": 4, "ep": 2}, FLAT, schedule=schedule)
    of = costs(spec)
    stages = of.stages
    assert stages[0] != stages[1]
    for stage, time in enumerate(of.overlapped):
        forward, backward = stages[stage], stages[3 - stage]
        parts = forward[Phase.FORWARD], backward[Phase.INPUT], backward[Phase.WEIGHT]
        links = sum(part.links_us for part in parts)
        chip = sum(part.compute_us + part.memory_us for part in parts)
        assert links > chip > 0
        assert time == max(links, backward[Phase.INPUT].us + backward[Phase.WEIGHT].us)
    cost = of.resolved("async")
    assert cost.overlapped_of(1, 2) == round(of.overlapped[1] * 1000) / Fraction(1000)
    assert cost.overlapped_of(1, 2) < cost.forward_of(1) + cost.backward_of(2)


def test_where_nothing_runs_side_by_side_no_such_time_is_computed():
    assert costs(plan()).overlapped is None
    assert costs(plan()).resolved("async").overlapped_us is None


def test_in_an_order_of_ones_own_any_two_stages_may_meet():
    programs = [["0F0", "0B0"], ["1F0", "1B0"]]
    custom = {"kind": "custom", "num_micro_batches": 1, "programs": programs}
    of = costs(plan({"moe": MOE}, {"pp": 2, "ep": 2}, schedule=custom))
    longest = max(s[Phase.INPUT].us + s[Phase.WEIGHT].us for s in of.stages)
    assert min(of.overlapped) >= longest


# Eight-bit products


def test_narrow_products_run_at_their_own_peak():
    wide, narrow = (plan({"moe": MOE}, {}, {"matmul_dtype": dtype}) for dtype in (None, "float8"))
    product = Work("x", Phase.FORWARD, ComputeUnit.MATMUL, Fraction(10**12), Fraction(1), narrow=True)
    assert costs(wide).work(product).us / costs(narrow).work(product).us == Fraction(1979, 989)
    for name in ("mlp.router", "attn.core"):
        assert not one(narrow, name).narrow
    assert not any(w.narrow for w in works(narrow, "head"))
    assert all(one(narrow, name).narrow for name in ("attn.qkv", "mlp.experts.down", "mlp.shared.gate_up"))


def test_devices_without_eight_bits_say_so():
    assert {name for name, device in DEVICES.items() if device.float8 is None} == NO_MATMUL["float8"]
    assert NO_MATMUL["float8_block"] == NO_MATMUL["float8"]
    assert {name for name, device in DEVICES.items() if device.float4 is None} == NO_MATMUL["float4"]
    with pytest.raises(BadPlanError) as caught:
        plan({}, {}, {"device": "a100", "matmul_dtype": "float8"})
    (finding,) = caught.value.findings
    assert finding.code == "PP106"
    assert "in which a100 computes no products" in finding.message
    assert "h100, h200, h800, b200, gb200, b300, gb300 or mi300x" in finding.help


VISITS = TOKENS * MOE["top_k"]


@pytest.mark.parametrize(
    ("moe", "ep", "analytic", "regroups"),
    [
        ({}, 2, {}, True), ({}, 1, {}, False), ({"dispatcher": "all_gather"}, 2, {}, False),
        ({}, 8, {}, False), ({}, 2, {"exchange": "by_node"}, False), ({"nodes_per_token": 1}, 2, {}, False),
    ],
    ids=["several experts of a rank", "one rank", "gathered", "one expert of a rank", "by node", "nodes_per_token"],
)  # fmt: skip
def test_visits_of_an_all_to_all_are_grouped_again_by_the_experts_of_a_rank(moe, ep, analytic, regroups):
    spec = plan({"moe": {**MOE, **moe}}, {"ep": ep}, analytic)
    chunks = [work for work in works(spec) if work.name.endswith(".chunks")]
    expected = [
        (f"mlp.{way}.chunks", phase, 2 * 2 * VISITS * 16)  # 16 of hidden, each read and written
        for way in ("permute", "unpermute") for phase in (Phase.FORWARD, Phase.INPUT)
    ]  # fmt: skip
    assert [(work.name, work.phase, work.num_bytes) for work in chunks] == (expected if regroups else [])


def test_biases_of_experts_outputs_by_hand():
    spec, without = (plan({"moe": MOE}, {}, {"expert_biases": given}) for given in (True, False))
    added = [work for work in works(spec) if work not in works(without)]
    assert [(work.name, work.phase) for work in added] == [
        ("mlp.experts.bias", Phase.FORWARD), ("mlp.experts.bias", Phase.INPUT)
    ]  # fmt: skip
    assert [work.num_bytes for work in added] == [6 * 2 * VISITS * 16, 8 * 2 * VISITS * 16]


def test_fused_experts_have_no_activation_and_no_casts_next_to_it():
    spec, without = (
        plan({"moe": MOE}, {}, {"matmul_dtype": "float8", "fused_experts": given}) for given in (True, False)
    )
    gone = {(work.name, work.phase) for work in works(without)} - {(work.name, work.phase) for work in works(spec)}
    assert gone == {("mlp.experts.swiglu", Phase.FORWARD), ("mlp.experts.swiglu", Phase.INPUT)}
    casts = {
        (work.name, work.phase): (one(without, work.name, work.phase).cast, work.cast)
        for work in works(spec) if work.name.startswith("mlp.experts") and work.phase is not Phase.WEIGHT
    }  # fmt: skip
    assert casts == {
        ("mlp.experts.gate_up", Phase.FORWARD): (16 * VISITS, 16 * VISITS),
        ("mlp.experts.gate_up", Phase.INPUT): (2 * 24 * VISITS, 0),
        ("mlp.experts.down", Phase.FORWARD): (24 * VISITS, 0),
        ("mlp.experts.down", Phase.INPUT): (16 * VISITS, 16 * VISITS),
    }
    dense = list(works(spec, "layer.0"))
    assert dense == list(works(without, "layer.0"))


def test_rotary_positions_step_by_step_by_hand():
    fused, steps = (plan({"num_kv_heads": 2, "head_size": 6}, {}, {"fused_rotary": given}) for given in (True, False))
    rotated = 2 * TOKENS * 36  # bytes of queries and keys
    found = [one(spec, "attn.rotary", phase) for phase in (Phase.FORWARD, Phase.INPUT) for spec in (fused, steps)]
    assert [work.num_bytes / rotated for work in found] == [2, 12, 2, 14]
    assert [work.launches for work in found] == [1, 24, 1, 14]
    assert [work for work in works(fused) if work.name != "attn.rotary"] == [
        work for work in works(steps) if work.name != "attn.rotary"
    ]


def test_a_fused_residual_by_hand():
    """Bias, dropout and addition read the sum over tp and the residual, and write the result and a byte of the mask."""
    model = {"biases": "all", "mlp": "gelu", "dropout": 0.1}
    steps, fused = (plan(model, {}, {"fused_residual": given}) for given in (False, True))
    element = 2 * TOKENS * 16
    for part, bias in (("attn", "attn.out.bias"), ("mlp", "mlp.down.bias")):
        names = bias, f"{part}.dropout", f"{part}.add"
        moved = [[one(spec, name, Phase.FORWARD).num_bytes / element for name in names] for spec in (steps, fused)]
        assert moved == [[2, Fraction(5, 2), 3], [0, Fraction(1, 2), 3]]
        assert [one(fused, name, Phase.FORWARD).launches for name in names] == [0, 0, 1]
    backward = [[work for work in works(spec) if work.phase is not Phase.FORWARD] for spec in (steps, fused)]
    assert backward[0] == backward[1]


def test_a_fused_softmax_by_hand():
    """Half of the scores is read, and all of the result written; backward reads halves of two operands."""
    spec = plan({}, {}, {"attention": "unfused", "fused_softmax": True})
    scores = 2 * 2 * 8 * 8 * 4  # bytes of two rows of four heads
    for phase, halves in ((Phase.FORWARD, 1), (Phase.INPUT, 2)):
        assert one(spec, "attn.softmax", phase, flash=False).num_bytes == scores * (1 + Fraction(halves, 2))


@pytest.mark.parametrize(("replayed", "names"), [
    (["attention"], ("attn_norm", "attn.")), (["router"], ("mlp_norm", "mlp.router", "mlp.scores", "mlp.shared.")),
])  # fmt: skip
def test_a_part_that_is_replayed_takes_the_host_one_operation_each_way(replayed, names):
    alone, spec = (
        plan({"moe": MOE}, {}, {"host_us": 100, "replayed": parts, "fill_us": 7}) for parts in ([], replayed)
    )
    blocks = {layer.name: layer for layer in describe_gpt(spec)}
    for layer in ("layer.0", "layer.1"):  # dense, and with experts
        before, after = (costs(each).layer(blocks[layer]) for each in (alone, spec))
        is_there = layer == "layer.1" or replayed == ["attention"]
        for phase in Phase:
            gone = [w for w in works(spec, layer) if w.phase is phase and w.name.startswith(names)]
            starts = 100 * sum(w.launches for w in gone) + 7 * sum(w.launches > 0 for w in gone)
            replays = 100 * (is_there and phase is not Phase.WEIGHT)
            assert before[phase].host_us - after[phase].host_us == starts - replays
            assert before[phase].device_us == after[phase].device_us
