"""Costs and names of router losses."""

import pytest

from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.stages.describe.boundary import MicroBatchSize
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.gradient_facts import loss_weights, router_losses, routers, work_item_weight
from pipeproof.stages.describe.model_family import stored_activations
from pipeproof.stages.describe.op_work import Phase, layer_work
from pipeproof.stages.describe.stage_memory import Lifetime
from tests.plans import plan_dict

MOE = {"num_experts": 12, "top_k": 3, "ffn_size": 8, "dense_layers": 1}
TOKENS = 2 * 8


def balanced(memory=(), **moe):
    return plan_from_dict(plan_dict(model={"moe": {**MOE, **moe}}, topology={"pp": 1}, memory=dict(memory))).spec


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
