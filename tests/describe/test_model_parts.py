"""Grouped-query attention, latent attention and experts: the hand-written description against types and numbers."""

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.specs.axis_layout import INVARIANT, sharded
from pipeproof.stages.describe.boundary import MicroBatchSize
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.layer import CollectiveKind, layer_kind
from pipeproof.stages.describe.typed_gpt import typed_gpt
from pipeproof.stages.describe.typed_ops import PARTIAL, REPLICATED, cut
from tests.plans import plan_spec

MLA = {"kv_rank": 6, "nope_head_size": 4, "rope_head_size": 2, "value_head_size": 3}
MOE = {"num_experts": 8, "top_k": 3, "ffn_size": 8}

attentions = st.one_of(
    st.just({}),
    st.sampled_from([{"num_kv_heads": 4, "head_size": 6}, {"num_kv_heads": 4, "num_heads": 8}]),
    st.sampled_from([{"mla": MLA}, {"mla": {**MLA, "q_rank": 10}}]),
)
feed_forwards = st.sampled_from(
    [
        {},
        {"moe": MOE},
        {"moe": {**MOE, "num_shared_experts": 2}},
        {"moe": {**MOE, "dense_layers": 2, "top_k": 8}},
        {"moe": {**MOE, "dense_layers": 1, "hash_layers": 2, "num_shared_experts": 1, "score": "sqrtsoftplus"}},
        {"moe": {**MOE, "num_shared_experts": 1, "dispatcher": "all_gather"}},
    ]
)
gpt_parts = st.fixed_dictionaries(
    {
        "norm": st.sampled_from(["rms", "layer"]),
        "qk_norm": st.booleans(),
        "positions": st.sampled_from(["rotary", "learned"]),
        "mlp": st.sampled_from(["swiglu", "gelu", "gelu_tanh"]),
        "biases": st.sampled_from(["none", "qkv", "all"]),
    }
)
"""Parts that fit every model of the tests below without latent attention and experts."""


def spec_of(model, **topology):
    return plan_spec(model={"seq_length": 16, **model}, topology={"pp": 2, **topology})


@settings(max_examples=200, deadline=None)
@given(
    model=st.one_of(
        st.builds(
            lambda a, f, norm: {**a, **f, "norm": norm}, attentions, feed_forwards, st.sampled_from(["rms", "layer"])
        ),
        st.builds(
            lambda parts, heads: {**parts, **heads},
            gpt_parts,
            st.sampled_from([{}, {"num_kv_heads": 4, "num_heads": 8}]),
        ),
    ),
    tp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    ep=st.sampled_from([1, 2, 4]),
    sp=st.booleans(),
    size=st.sampled_from([None, MicroBatchSize(32, 1), MicroBatchSize(8, 3)]),
)
def test_the_description_by_hand_is_what_the_types_say(model, tp, cp, ep, sp, size):
    assert_described_as_typed(spec_of(model, tp=tp, cp=cp, ep=ep, sequence_parallel=sp), size)


def assert_described_as_typed(spec, size):
    """The types give the same collectives, and the same parameters with their shards and addends."""
    degrees = {axis: getattr(spec.topology, axis) for axis in ("tp", "cp", "ep")}
    typed, layers = typed_gpt(spec, size), describe_gpt(spec, size)
    assert {layer_kind(spec.model, layer.name) for layer in layers} == set(typed)
    for layer in layers:
        needed = typed[layer_kind(spec.model, layer.name)]
        assert needed.problems == ()
        for listed, wanted in (
            (layer.forward_collectives, needed.forward),
            (layer.backward_collectives, needed.backward),
        ):
            assert [(c.kind, c.axis, c.numel, c.label.removeprefix(f"{layer.name}.")) for c in listed] == [
                (c.kind, c.axis, c.numel, c.label) for c in wanted
            ]
        used = (*layer.parameters, *layer.borrowed)
        assert {p.name.removeprefix(f"{layer.name}.") for p in used} == set(needed.partial_over)
        for parameter in layer.parameters:
            name = parameter.name.removeprefix(f"{layer.name}.")
            has_addends = needed.values[name].differentiable and "ep" not in parameter.sharded_over
            of_data = ("ep",) if degrees["ep"] > 1 and has_addends else ()
            assert needed.partial_over[name] == parameter.partial_over + of_data
            assert needed.values[name].local_numel(needed.program.sizes, degrees) == prod(
                parameter.local_shape({"tp": degrees["tp"], "ep": degrees["ep"]})
            )


def test_what_the_types_of_experts_mean():
    spec = spec_of({"moe": {**MOE, "num_shared_experts": 1}}, tp=2, cp=2, ep=2, sequence_parallel=True)
    block = typed_gpt(spec)["moe_block"]
    assert block.values["slots"].types == {"tp": REPLICATED, "cp": cut("u"), "ep": cut("b")}
    assert block.values["mlp.dispatch"].types == {"tp": REPLICATED, "cp": cut("u"), "ep": cut("x")}
    assert block.values["expert.addends"].types == {"tp": PARTIAL, "cp": cut("u"), "ep": cut("x")}
    assert block.values["mlp.addends"].types == {"tp": PARTIAL, "cp": cut("s"), "ep": cut("b")}
    assert block.partial_over["mlp.router.weight"] == ("tp", "cp", "ep")
    assert block.partial_over["mlp.experts.up.weight"] == ("cp",)  # not over ep: it got the tokens of all ranks there
    assert block.partial_over["mlp.shared.up.weight"] == ("cp", "ep")


def test_what_the_types_of_gathered_experts_mean():
    """Each rank has an addend of the results for the tokens of all EP ranks."""
    model = {"moe": {**MOE, "num_shared_experts": 1, "dispatcher": "all_gather"}}
    block = typed_gpt(spec_of(model, tp=2, cp=2, ep=2, sequence_parallel=True))["moe_block"]
    assert block.values["slots"].types == {"tp": REPLICATED, "cp": cut("u"), "ep": REPLICATED}
    assert block.values["own.slots"].types == {"tp": REPLICATED, "cp": cut("u"), "ep": cut("x")}
    assert block.values["routed"].types == {"tp": PARTIAL, "cp": cut("s"), "ep": PARTIAL}
    assert block.values["mlp.addends"].types == {"tp": PARTIAL, "cp": cut("s"), "ep": cut("b")}
    assert block.partial_over["mlp.router.weight"] == ("tp", "cp", "ep")
    assert block.partial_over["mlp.experts.up.weight"] == ("cp",)
    assert block.partial_over["mlp.shared.up.weight"] == ("cp", "ep")


def test_a_block_with_gathered_experts_by_hand():
    """16 tokens in 2 rows, hidden 16, 8 experts, cut over 2 EP ranks: each puts in its own tokens."""
    spec = spec_of({"moe": {**MOE, "dispatcher": "all_gather"}}, ep=2)
    (block, *_) = (layer for layer in describe_gpt(spec) if layer.name == "layer.0")
    tokens = 16 * 2
    assert [(str(c.kind), c.numel, c.label) for c in block.forward_collectives] == [
        ("all_gather", tokens * 8, "layer.0.mlp.route"), ("all_gather", tokens * 16, "layer.0.mlp.tokens"),
        ("reduce_scatter", 2 * tokens * 16, "layer.0.mlp.sum"),
    ]  # fmt: skip
    assert [(str(c.kind), c.numel, c.label) for c in block.backward_collectives] == [
        ("all_gather", tokens * 16, "layer.0.mlp.sum.grad"),
        ("reduce_scatter", 2 * tokens * 16, "layer.0.mlp.tokens.grad"),
        ("reduce_scatter", 2 * tokens * 8, "layer.0.mlp.route.grad"),
    ]  # fmt: skip


def test_a_block_with_experts_by_hand():
    """16 tokens in 2 rows, hidden 16, 8 experts, 3 for a token, cut over 2 EP and 2 TP ranks."""
    spec = spec_of({"moe": {**MOE, "num_shared_experts": 2, "dense_layers": 1}}, tp=2, ep=2)
    layers = {layer.name: layer for layer in describe_gpt(spec)}
    assert not any(c.axis == "ep" for c in layers["layer.0"].forward_collectives)
    block = layers["layer.1"]
    tokens = 16 * 2
    assert [(str(c.kind), c.numel) for c in block.forward_collectives] == [
        ("all_reduce", tokens * 16), ("all_to_all", 8), ("all_to_all", tokens * 3 * 16),
        ("all_to_all", tokens * 3 * 16), ("all_reduce", tokens * 16),
    ]  # fmt: skip
    assert [(c.dtype, c.per_token) for c in block.forward_collectives[1:3]] == [("int64", False), (None, True)]
    assert [c.label for c in block.backward_collectives] == [
        "layer.1.mlp.combine.grad", "layer.1.mlp.dispatch.grad", "layer.1.mlp.in.grad", "layer.1.attn.in.grad",
    ]  # fmt: skip
    parameters = {p.name.removeprefix("layer.1.mlp."): p for p in block.parameters}
    experts = parameters["experts.down.weight"]
    assert (experts.shape, experts.tp, experts.ep) == ((8, 8, 16), sharded(1), sharded(0))
    assert experts.local_shape({"tp": 2, "ep": 2}) == (4, 4, 16)
    assert parameters["router.weight"].shape == (16, 8)
    assert (parameters["router.weight"].tp, parameters["router.weight"].partial_over) == (INVARIANT, ("tp",))
    assert parameters["shared.up.weight"].shape == (16, 2 * 8)


def test_grouped_queries_share_keys_and_values():
    spec = spec_of({"num_heads": 8, "num_kv_heads": 2, "head_size": 4}, tp=2, cp=2)
    block = describe_gpt(spec)[1]
    shapes = {p.name: p.shape for p in block.parameters}
    assert shapes["layer.0.attn.qkv.weight"] == (16, (8 + 2 * 2) * 4)
    assert shapes["layer.0.attn.out.weight"] == (8 * 4, 16)
    (keys,) = (c for c in block.forward_collectives if c.axis == "cp")
    assert (keys.kind, keys.numel) == (CollectiveKind.ALL_GATHER, 8 * 2 * 2 * 4)  # 8 tokens, 2 rows, k and v of a head


@pytest.mark.parametrize("sp", [False, True])
def test_latent_attention_compresses_between_blocks_and_cuts_what_leads_back(sp):
    spec = spec_of({"mla": {**MLA, "q_rank": 10}}, tp=2, sequence_parallel=sp)
    block = describe_gpt(spec)[1]
    parameters = {p.name.removeprefix("layer.0.attn."): p for p in block.parameters}
    assert parameters["kv_down.weight"].shape == (16, 6 + 2)
    assert parameters["kv_down.weight"].partial_over == (("tp",) if sp else ())
    assert parameters["kv_norm.weight"].shape == (6,)
    assert (parameters["q_up.weight"].shape, parameters["q_up.weight"].tp) == ((10, 4 * 6), sharded(1))
    assert parameters["kv_up.weight"].shape == (6, 4 * 7)
    assert parameters["out.weight"].shape == (4 * 3, 16)
    entered = block.forward_collectives[:3] if sp else block.backward_collectives[-3:][::-1]
    tokens = 16 * 2 // (2 if sp else 1)
    assert [c.numel for c in entered] == [tokens * 10, tokens * 6, tokens * 2]
