"""Experts, routers and residual streams of DeepSeek-V4 compared with the modules of transformers, in float64.

Random small configurations: outputs, and the gradients of inputs and weights, differ by rounding alone. The bound is
``parallel_bound`` of the plan with its sums in another order.
"""

import numpy as np
import pytest
import torch
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as oracle

from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.layers.layer_operations import ENDS
from pipeproof.stages.describe.synthetic import hash_tables
from pipeproof.stages.reference.bound import parallel_bound
from pipeproof.stages.reference.torch_model import TorchUnpartitionedModel, gated_sum, read
from pipeproof.stages.reference.torch_reference_weights import WholeWeights
from tests.plans import plan_spec

pytestmark = [pytest.mark.needs_torch, pytest.mark.needs("transformers")]

LIMIT = 0.4
"""A limit that clamps many of the elements."""


def drawn_plan(seed):
    """A plan of two blocks with experts, the first one with a table, in sizes that the seed draws."""
    draw = np.random.default_rng(seed).integers
    experts = int(draw(4, 10))
    moe = {
        "num_experts": experts, "top_k": int(draw(2, experts)), "ffn_size": int(draw(3, 9)), "num_shared_experts": 1,
        "score": ["sqrtsoftplus", "sigmoid"][seed % 2], "routed_scale": 1.5, "hash_layers": 1,
        "expert_bias_rate": 0.1,
    }  # fmt: skip
    model = {
        "num_layers": 2, "hidden_size": 8 * int(draw(1, 4)), "vocab_size": 32, "activation_order": "bsh", "moe": moe,
        "swiglu_limit": LIMIT, "swiglu_formula": "silu",
    }  # fmt: skip
    return plan_spec(model=model, topology={"pp": 1}, run={"dtype": "float64"})


def model_of(plan, seed):
    """The unpartitioned model with weights, and biases of routers, of order one."""
    draw = np.random.default_rng(seed + 100).standard_normal
    weights = {p.name: draw(p.shape) for layer in describe_gpt(plan) for p in layer.parameters}
    weights["bias/layer.1.mlp"] = draw(plan.gpt.moe.num_experts)
    model = TorchUnpartitionedModel(plan, weights)
    model.weights.begin_step()
    return model


def config_of(plan):
    moe = plan.gpt.moe
    return oracle.DeepseekV4Config(
        vocab_size=plan.gpt.vocab_size, hidden_size=plan.gpt.hidden_size, num_hidden_layers=2,
        moe_intermediate_size=moe.ffn_size, n_routed_experts=moe.num_experts, num_experts_per_tok=moe.top_k,
        n_shared_experts=moe.num_shared_experts, scoring_func=moe.score, routed_scaling_factor=moe.routed_scale,
        swiglu_limit=LIMIT, mlp_layer_types=["hash_moe", "moe"], layer_types=["sliding_attention"] * 2,
    )  # fmt: skip


def experts_of(plan, model, block):
    """Transformers' router and experts of a block with our weights."""
    name = f"layer.{block}.mlp"
    module = oracle.DeepseekV4SparseMoeBlock(config_of(plan), block).double()

    def own(part):
        return model.weights.main[f"{name}.{part}.weight"].detach()

    router = "hash_router" if block == 0 else "router"
    pairs = {
        "gate.weight": own(router).T,
        "experts.gate_up_proj": torch.cat([own("experts.gate"), own("experts.up")], -1).mT,
        "experts.down_proj": own("experts.down").mT,
        **{f"shared_experts.{part}_proj.weight": own(f"shared.{part}").T for part in ("gate", "up", "down")},
    }
    if block == 0:
        pairs["gate.tid2eid"] = torch.tensor(hash_tables(plan)[name])
    else:
        pairs["gate.e_score_correction_bias"] = model.routers.biases[name]
    module.load_state_dict(pairs)
    return module


def gradients_of_experts(module):
    """The gradients of transformers' weights, as our weights have them."""
    gate, up = module.experts.gate_up_proj.grad.mT.chunk(2, -1)
    shared = {
        f"shared.{part}": getattr(module.shared_experts, f"{part}_proj").weight.grad.T
        for part in ("gate", "up", "down")
    }
    return {
        "router": module.gate.weight.grad.T,
        "experts.gate": gate,
        "experts.up": up,
        "experts.down": module.experts.down_proj.grad.mT,
        **shared,
    }


def distance(ours, theirs):
    """The largest difference in units of the largest element."""
    assert ours.shape == theirs.shape
    return float((ours - theirs).detach().abs().max() / theirs.detach().abs().max())


@pytest.mark.parametrize("block", [0, 1], ids=["by token id", "by scores"])
@pytest.mark.parametrize("seed", range(6))
def test_experts_are_those_of_transformers(seed, block):
    plan = drawn_plan(seed)
    model, bound = model_of(plan, seed), parallel_bound(with_other_sums(plan))
    assert bound < 1e-13
    module, name = experts_of(plan, model, block), f"layer.{block}.mlp"
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(2, 8, plan.gpt.hidden_size, dtype=torch.float64, generator=generator) for _ in range(2))
    model.token_ids = torch.randint(plan.gpt.vocab_size, (2, 8), generator=generator)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    ours, theirs = model.experts(inputs[0], name), module(inputs[1], input_ids=model.token_ids)
    assert distance(ours, theirs) < bound
    ours.backward(y)
    theirs.backward(y)
    assert distance(inputs[0].grad, inputs[1].grad) < bound
    for part, gradient in gradients_of_experts(module).items():
        router = "hash_router" if part == "router" and block == 0 else part
        assert distance(model.weights.main[f"{name}.{router}.weight"].grad, gradient) < bound, part


@pytest.fixture
def wide_oracle(monkeypatch):
    """Transformers computes the gates of streams in float32; here in float64, as all else."""
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor)


def streams_plan(seed, **more):
    draw = np.random.default_rng(seed).integers
    spec = {
        "streams": int(draw(2, 6)), "sinkhorn_iterations": int(draw(1, 8)), "sinkhorn": "softmax", "epsilon": 1e-3,
        "transposed": True, "contraction": "learned", **more,
    }  # fmt: skip
    model = {"num_layers": 1, "hidden_size": 8 * int(draw(1, 4)), "activation_order": "bsh", "hyper_connections": spec}
    return plan_spec(model=model, topology={"pp": 1}, run={"dtype": "float64"})


def oracle_of_streams(plan, module_type, weights):
    """Transformers' module with our weight, scale and bias, in the order of its own."""
    spec = plan.gpt.hyper_connections
    config = oracle.DeepseekV4Config(
        hidden_size=plan.gpt.hidden_size, num_hidden_layers=1, hc_mult=spec.streams, hc_eps=spec.epsilon,
        hc_sinkhorn_iters=spec.sinkhorn_iterations, rms_norm_eps=1e-6,
    )  # fmt: skip
    module = module_type(config).double()
    names = ("hc_fn", "hc_scale", "hc_base") if module_type is oracle.DeepseekV4HyperHead else ("fn", "scale", "base")
    module.load_state_dict(dict(zip(names, (weights[0].T, *weights[1:]), strict=True)))
    return module, [getattr(module, name) for name in names]


def with_gradients(plan, name, compute):
    """The result of ``compute`` for drawn streams, and the gradients of the streams and of the weights of that name."""
    draw = np.random.default_rng(7).standard_normal
    drawn = {p.name: draw(p.shape) for layer in describe_gpt(plan) for p in layer.parameters}
    weights = WholeWeights(drawn, torch.float64, torch.float64, torch.device("cpu"))
    weights.begin_step()
    x = torch.tensor(draw((2, 5, plan.gpt.num_streams * plan.gpt.hidden_size)), requires_grad=True)
    own = [weights.main[f"layer.0.{name}_streams.{end}"] for end in ENDS]
    result, others = compute(x, weights, own)
    result.backward(torch.tensor(draw(result.shape)))
    return [
        result.detach(),
        x.grad,
        *([w.grad for w in own] if others is None else [others[0].grad.T, *(w.grad for w in others[1:])]),
    ]


def ours_around(plan):
    spec = plan.gpt.hyper_connections

    def compute(x, weights, own):
        taken, update = read(x, weights, "layer.0.attn", spec)
        return update(torch.tanh(taken)), None

    return with_gradients(plan, "attn", compute)


def theirs_around(plan):
    def compute(x, weights, own):
        module, others = oracle_of_streams(plan, oracle.DeepseekV4HyperConnection, [w.detach() for w in own])
        streams = x.unflatten(-1, (plan.gpt.num_streams, -1))
        post, comb, taken = module(streams)
        result = post.unsqueeze(-1) * torch.tanh(taken).unsqueeze(-2) + comb.mT @ streams
        return result.flatten(-2), others

    return with_gradients(plan, "attn", compute)


def assert_near(ours, theirs, bound):
    """Gradients of weights are measured in the largest element of all three, as a run does (``measured_with``)."""
    unit = max(float(gradient.abs().max()) for gradient in theirs[2:])
    for one, other, scale in zip(ours, theirs, [None, None, *[unit] * 3], strict=True):
        assert float((one - other).abs().max()) < bound * (scale or float(other.abs().max()))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.usefixtures("wide_oracle")
def test_streams_around_a_sub_layer_are_those_of_transformers(seed):
    plan = streams_plan(seed)
    bound = parallel_bound(with_other_sums(plan))
    assert bound < 2e-13
    assert_near(ours_around(plan), theirs_around(plan), bound)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.usefixtures("wide_oracle")
def test_the_learned_contraction_is_that_of_transformers(seed):
    plan = streams_plan(seed)
    spec = plan.gpt.hyper_connections

    def theirs(x, weights, own):
        module, others = oracle_of_streams(plan, oracle.DeepseekV4HyperHead, [w.detach() for w in own])
        return module(x.unflatten(-1, (spec.streams, -1))), others

    ours = with_gradients(plan, "out", lambda x, weights, own: (gated_sum(x, weights, "layer.0.out", spec), None))
    assert_near(ours, with_gradients(plan, "out", theirs), parallel_bound(with_other_sums(plan)))


def with_other_sums(plan):
    return plan.model_copy(update={"topology": plan.topology.model_copy(update={"ep": 2})})
