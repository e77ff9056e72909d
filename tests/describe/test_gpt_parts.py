"""LayerNorm, QK-norm, learned positions, GELU and biases: parameters with their layouts, work, and stored activations.

Their collectives and gradients are compared with the types of their operations in ``test_model_parts``.
"""

from __future__ import annotations

import pytest

from pipeproof.specs.axis_layout import INVARIANT, sharded
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.stages.describe.boundary import MicroBatchSize
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.gradient_facts import loss_weights, router_losses, routers, work_item_weight
from pipeproof.stages.describe.model_family import stored_activations
from pipeproof.stages.describe.op_work import Phase, layer_work
from pipeproof.stages.describe.stage_memory import Lifetime
from pipeproof.stages.describe.synthetic import initial_weight
from tests.plans import plan_dict, plan_spec

MOE = {"num_experts": 12, "top_k": 3, "ffn_size": 8, "dense_layers": 1}
TOKENS = 2 * 8


def balanced(memory=(), **moe):
    return plan_spec(model={"moe": {**MOE, **moe}}, topology={"pp": 1}, memory=dict(memory))


def held(plan):
    names = [
        one for one in stored_activations(plan, describe_gpt(plan), MicroBatchSize(8, 2)) if one.name == "mlp.balance"
    ]
    return {one.lifetime: one.num_bytes for one in names}


def flops(plan, phase):
    works = layer_work(plan, "layer.1", MicroBatchSize(8, 2), 4)
    return sum(work.flops for work in works if work.name == "mlp.balance" and work.phase is phase)


def test_the_gradient_of_a_routers_losses_is_kept_once_for_all_of_them():
    blocks = 3
    for losses in ({"aux_loss": 0.1}, {"z_loss": 0.1}, {"aux_loss": 0.1, "z_loss": 0.1}):
        assert held(balanced(**losses)) == {Lifetime.TO_INPUT: blocks * 4 * TOKENS * 12}
    assert held(balanced(expert_bias_rate=0.1)) == {}
    assert held(balanced({"recompute": "full"}, aux_loss=0.1)) == {Lifetime.IN_INPUT: 4 * TOKENS * 12}


def test_each_loss_is_computed_with_its_gradient_and_the_way_back_adds_it():
    one, two = balanced(aux_loss=0.1), balanced(aux_loss=0.1, z_loss=0.1)
    assert flops(two, Phase.FORWARD) == 2 * flops(one, Phase.FORWARD) > 0
    assert flops(two, Phase.INPUT) == flops(one, Phase.INPUT) == TOKENS * 12
    assert flops(balanced(), Phase.FORWARD) == 0


def test_names_and_factors():
    plan = balanced(aux_loss=0.1)
    assert routers(describe_gpt(plan)) == ("layer.1.mlp", "layer.2.mlp", "layer.3.mlp")
    assert router_losses(plan.model.moe) == {"aux": 0.1}
    assert router_losses(None) == {}
    assert work_item_weight(plan) == 1 / 4
    assert loss_weights(plan) == {"aux": pytest.approx(0.025, rel=1e-15)}


SIZE = MicroBatchSize(8, 2)
TOKENS, HIDDEN, FFN, HEADS = 16, 16, 32, 4
ALL = {"norm": "layer", "qk_norm": True, "biases": "all"}


def spec_of(model, **topology):
    return plan_spec(model=model, topology={"pp": 1, **topology})


def parameters(model, layer, **topology):
    described = {one.name: one for one in describe_gpt(spec_of(model, **topology))}[layer]
    return {weight.name.removeprefix(f"{layer}."): weight for weight in described.parameters}


def works(model, layer, **topology):
    listed = layer_work(spec_of(model, **topology), layer, SIZE, 2)
    return {(work.name, work.phase): (work.flops, work.num_bytes) for work in listed}


def stored(model, layer, **topology):
    plan = plan_dict(model=model, topology={"pp": 1, **topology}, memory={"dtype": "float64"})
    spec = plan_from_dict(plan).spec
    layers = [one for one in describe_gpt(spec) if one.name == layer]
    return {held.name: held.num_bytes / 8 for held in stored_activations(spec, layers, SIZE)}


def test_the_order_of_parameters_in_a_block():
    norms = ("weight", "bias")
    assert list(parameters(ALL, "layer.0")) == [
        *(f"attn_norm.{end}" for end in norms),
        "attn.qkv.weight", "attn.qkv.bias",
        *(f"attn.{head}_head_norm.{end}" for head in "qk" for end in norms),
        "attn.out.weight", "attn.out.bias",
        *(f"mlp_norm.{end}" for end in norms),
        "mlp.gate.weight", "mlp.gate.bias", "mlp.up.weight", "mlp.up.bias", "mlp.down.weight", "mlp.down.bias",
    ]  # fmt: skip
    gelu = parameters({**ALL, "mlp": "gelu"}, "layer.0")
    assert list(gelu)[-4:] == ["mlp.up.weight", "mlp.up.bias", "mlp.down.weight", "mlp.down.bias"]
    assert list(parameters({"norm": "layer"}, "norm")) == ["weight", "bias"]
    assert list(parameters({"biases": "qkv"}, "layer.0")) == [
        "attn_norm.weight", "attn.qkv.weight", "attn.qkv.bias", "attn.out.weight",
        "mlp_norm.weight", "mlp.gate.weight", "mlp.up.weight", "mlp.down.weight",
    ]  # fmt: skip


@pytest.mark.parametrize("sp", [False, True])
def test_layouts(sp):
    block = parameters({**ALL, "num_kv_heads": 2}, "layer.0", tp=2, cp=2, sequence_parallel=sp)
    between = ("tp", "cp") if sp else ("cp",)
    for name, shape, tp, partial_over in (
        ("attn_norm.bias", (HIDDEN,), INVARIANT, between),
        ("attn.qkv.bias", (HIDDEN + 2 * 8,), sharded(0), ("cp",)),
        ("attn.q_head_norm.weight", (HIDDEN // HEADS,), INVARIANT, ("tp", "cp")),
        ("attn.k_head_norm.bias", (HIDDEN // HEADS,), INVARIANT, ("tp", "cp")),
        ("attn.out.bias", (HIDDEN,), INVARIANT, between),
        ("mlp.gate.bias", (FFN,), sharded(0), ("cp",)),
        ("mlp.up.bias", (FFN,), sharded(0), ("cp",)),
        ("mlp.down.bias", (HIDDEN,), INVARIANT, between),
    ):
        weight = block[name]
        assert (weight.shape, weight.tp, weight.partial_over) == (shape, tp, partial_over), name
    embed = parameters({"positions": "learned"}, "embed", tp=2, cp=2, sequence_parallel=sp)
    assert list(embed) == ["weight", "positions.weight"]
    positions = embed["positions.weight"]
    assert (positions.shape, positions.tp, positions.partial_over) == ((8, HIDDEN), INVARIANT, between)


def test_biases_start_as_zero_and_norms_as_one():
    block = parameters(ALL, "layer.0")
    for name, weight in block.items():
        values = initial_weight(weight, 0, "float64")
        if name.endswith(".bias"):
            assert not values.any(), name
        elif name.endswith("_norm.weight"):
            assert (values == 1).all(), name
    positions = parameters({"positions": "learned"}, "embed")["positions.weight"]
    assert initial_weight(positions, 0, "float64").std() == pytest.approx(0.02, rel=0.2)


def test_work():
    every = works({**ALL, "num_kv_heads": 2}, "layer.0", tp=2)
    numel = TOKENS * HIDDEN
    assert every["attn_norm", Phase.FORWARD] == (7 * numel, 2 * 2 * numel)
    assert every["attn.q_head_norm", Phase.FORWARD] == (7 * numel / 2, 2 * 2 * numel / 2)  # half of the heads
    assert every["attn.k_head_norm", Phase.WEIGHT] == (3 * numel / 4, 2 * 2 * numel / 4)  # half as many heads
    assert every["attn.qkv.bias", Phase.FORWARD] == (TOKENS * (HIDDEN + 16) / 2, 0)
    assert every["mlp.gate_up.bias", Phase.WEIGHT] == (TOKENS * FFN, 2 * TOKENS * FFN)
    assert every["attn.out.bias", Phase.WEIGHT] == (numel, 2 * numel)
    assert ("attn.out.bias", Phase.INPUT) not in every
    assert ("attn.rotary", Phase.FORWARD) in every
    learned = works({"positions": "learned", "mlp": "gelu_tanh"}, "layer.0")
    assert ("attn.rotary", Phase.FORWARD) not in learned
    assert learned["mlp.up", Phase.FORWARD][0] == 2 * TOKENS * HIDDEN * FFN
    assert learned["mlp.gelu", Phase.FORWARD] == (9 * TOKENS * FFN, 2 * 2 * TOKENS * FFN)
    assert works({"positions": "learned"}, "embed")["embed.positions", Phase.FORWARD][0] == numel


def test_stored_activations():
    """In elements of 8 bytes; factors and means have 4."""
    numel = TOKENS * HIDDEN
    one = stored({**ALL, "mlp": "gelu"}, "layer.0")
    assert one["attn_norm.factor"] == TOKENS  # a factor and a mean
    assert one["attn.q_head_norm"] == one["attn.k_head_norm"] == one["attn.k_head_norm.grad"] == numel
    assert one["attn.q_head_norm.factor"] == TOKENS * HEADS
    assert one["mlp.up"] == one["mlp_norm"] == numel
    assert one["mlp.gelu"] == one["mlp.down"] == TOKENS * FFN
    assert "attn.out.bias.grad" not in one  # the gradient of the product before it
    split = stored(ALL, "layer.0", tp=2, sequence_parallel=True)
    assert split["attn.out.bias.grad"] == numel / 2
    assert split["attn.q_head_norm"] == numel / 2
    assert stored({"norm": "rms"}, "layer.0")["attn_norm.factor"] == TOKENS / 2
