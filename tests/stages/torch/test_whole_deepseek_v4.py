"""A whole DeepSeek-V4 with our weights in transformers' model, in float64: logits, loss and every gradient.

Blocks of all three types of attention, experts by token id and by scores, residual streams and their contraction.
"""

import numpy as np
import pytest
import torch

from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.synthetic import IGNORED, Batch, hash_table
from pipeproof.stages.reference import torch_model
from pipeproof.stages.reference.torch_model import TorchUnpartitionedModel
from tests.plans import plan_dict
from tests.stages.torch.test_compressed_attention import NAMES, SIZES, TYPES, as_theirs, oracle_

__all__ = ["oracle_"]

pytestmark = [pytest.mark.needs_torch, pytest.mark.needs("transformers")]

ROUNDING = 1e-12
"""Bound of the largest difference, in units of the largest element of a weight's gradient; 4.1e-14 was the most."""
BLOCKS = 4


def plan_of(size, seed):
    model, spec = SIZES[size]
    draw = np.random.default_rng(seed).integers
    experts = int(draw(4, 9))
    return plan_from_dict(
        plan_dict(
            model={
                **model, "num_layers": BLOCKS, "vocab_size": 32, "activation_order": "bsh",
                "compressed_attention": {**spec, "layer_types": [TYPES[i % 3] for i in range(BLOCKS)]},
                "moe": {
                    "num_experts": experts, "top_k": int(draw(2, experts)), "ffn_size": int(draw(4, 10)),
                    "num_shared_experts": 1, "score": "sqrtsoftplus", "routed_scale": 1.5, "hash_layers": 2,
                    "expert_bias_rate": 0.1,
                },
                "swiglu_limit": 1.0, "swiglu_formula": "silu",
                "hyper_connections": {
                    "streams": int(draw(2, 5)), "sinkhorn_iterations": int(draw(2, 6)), "sinkhorn": "softmax",
                    "epsilon": 1e-6, "transposed": True, "contraction": "learned",
                },
            },
            topology={"pp": 1}, run={"dtype": "float64"},
        )
    ).spec  # fmt: skip


def model_of(plan, seed):
    draw, weights = np.random.default_rng(seed + 50).standard_normal, {}
    for parameter in (p for layer in describe_gpt(plan) for p in layer.parameters):
        scale = 1.0 if "sinks" in parameter.name or "positions" in parameter.name else 0.4
        weights[parameter.name] = draw(parameter.shape) * scale + ("norm" in parameter.name)
    weights |= {f"bias/layer.{i}.mlp": draw(plan.gpt.moe.num_experts) for i in range(2, BLOCKS)}
    model = TorchUnpartitionedModel(plan, weights)
    model.weights.begin_step()
    return model


def oracle_of(oracle, plan):
    gpt, spec, moe, streams = plan.gpt, plan.gpt.compressed_attention, plan.gpt.moe, plan.gpt.hyper_connections
    keys = spec.model_dump(exclude={"qk_rope_head_dim", "layer_types"})
    config = oracle.DeepseekV4Config(
        num_hidden_layers=BLOCKS, layer_types=[spec.type_of(i) for i in range(BLOCKS)], hidden_size=gpt.hidden_size,
        vocab_size=gpt.vocab_size, num_attention_heads=gpt.num_heads, head_dim=gpt.head_size,
        attn_implementation="eager", partial_rotary_factor=spec.qk_rope_head_dim / gpt.head_size, **keys,
        moe_intermediate_size=moe.ffn_size, n_routed_experts=moe.num_experts, num_experts_per_tok=moe.top_k,
        n_shared_experts=1, scoring_func=moe.score, routed_scaling_factor=moe.routed_scale,
        mlp_layer_types=["hash_moe"] * moe.hash_layers + ["moe"] * (BLOCKS - moe.hash_layers),
        swiglu_limit=gpt.swiglu_limit, hc_mult=streams.streams, hc_eps=streams.epsilon,
        hc_sinkhorn_iters=streams.sinkhorn_iterations, rms_norm_eps=1e-6,
        experts_implementation="eager",
    )  # fmt: skip
    return oracle.DeepseekV4ForCausalLM(config).double()


def transposed(tensor):
    return tensor.T if tensor.dim() == 2 else tensor


def named(plan, tensors):
    """Tensors of our weights, or of their gradients, under transformers' names and in its shapes."""
    found = {
        "model.embed_tokens.weight": tensors["embed.weight"], "model.norm.weight": tensors["norm.weight"],
        "lm_head.weight": tensors["head.weight"].T,
    }  # fmt: skip
    streams = {"weight": "fn", "scale": "scale", "bias": "base"}
    for block in range(BLOCKS):
        ours, theirs = f"layer.{block}.", f"model.layers.{block}."
        for name, value in tensors.items():
            part = name.removeprefix(f"{ours}attn.")
            if part != name:
                found[f"{theirs}self_attn.{NAMES[part]}"] = as_theirs(part, value)
        for sub_layer, norm, hc in (("attn", "input", "attn"), ("mlp", "post_attention", "ffn")):
            found[f"{theirs}{norm}_layernorm.weight"] = tensors[f"{ours}{sub_layer}_norm.weight"]
            for end, there in streams.items():
                found[f"{theirs}{hc}_hc.{there}"] = transposed(tensors[f"{ours}{sub_layer}_streams.{end}"])
        router = "hash_router" if plan.gpt.routes_by_token(block) else "router"
        found[f"{theirs}mlp.gate.weight"] = tensors[f"{ours}mlp.{router}.weight"].T
        gate, up, down = (tensors[f"{ours}mlp.experts.{part}.weight"].mT for part in ("gate", "up", "down"))
        found[f"{theirs}mlp.experts.gate_up_proj"] = torch.cat([gate, up], 1)
        found[f"{theirs}mlp.experts.down_proj"] = down
        for part in ("gate", "up", "down"):
            found[f"{theirs}mlp.shared_experts.{part}_proj.weight"] = tensors[f"{ours}mlp.shared.{part}.weight"].T
    for end, there in streams.items():
        found[f"model.hc_head.hc_{there}"] = transposed(tensors[f"layer.{BLOCKS - 1}.out_streams.{end}"])
    return found


def buffers(plan, model):
    """Tables of experts by token id, and biases of routers."""
    tables = {i: f"layer.{i}.mlp" for i in range(BLOCKS) if plan.gpt.routes_by_token(i)}
    made = {f"model.layers.{i}.mlp.gate.tid2eid": torch.tensor(hash_table(plan, name)) for i, name in tables.items()}
    for name, bias in model.routers.biases.items():
        made[f"model.layers.{name.split('.')[1]}.mlp.gate.e_score_correction_bias"] = bias
    return made


def both(oracle, size, seed):
    """Our model and transformers' with its weights, tables and biases."""
    plan = plan_of(size, seed)
    model, other = model_of(plan, seed), oracle_of(oracle, plan)
    main = {name: weight.detach() for name, weight in model.weights.main.items()}
    shapes = {name: tensor.shape for name, tensor in other.state_dict().items()}
    state = {name: tensor.reshape(shapes[name]) for name, tensor in (named(plan, main) | buffers(plan, model)).items()}
    missing, unexpected = other.load_state_dict(state, strict=False)
    assert unexpected == []
    assert [name for name in missing if "inv_freq" not in name] == []
    return plan, model, other


def batch_of(plan, seed):
    ids = torch.randint(plan.gpt.vocab_size, (2, plan.gpt.seq_length), generator=torch.Generator().manual_seed(seed))
    return ids, torch.cat([ids[:, 1:], torch.full((2, 1), IGNORED)], 1)


@pytest.mark.parametrize(("size", "seed"), list(zip(SIZES, range(3), strict=True)))
def test_logits_loss_and_all_gradients_are_those_of_transformers(oracle, size, seed):
    plan, model, other = both(oracle, size, seed)
    (ids, labels), seen = batch_of(plan, seed), {}
    hook = lambda layer, side, x: seen.update({(layer, side): x.detach()})  # noqa: E731 - one line
    (total,) = model.losses(Batch(ids.numpy(), labels.numpy()), hook)
    loss = total / (labels != IGNORED).sum()
    loss.backward()
    result = other(input_ids=ids, labels=ids)
    result.loss.backward()
    logits = seen["head", "input"] @ model.weights.main["head.weight"].detach()
    assert float((logits - result.logits.detach()).abs().max() / logits.abs().max()) < ROUNDING
    assert float(abs(loss.detach() - result.loss.detach()) / loss.detach()) < ROUNDING
    ours = named(plan, {name: weight.grad for name, weight in model.weights.main.items()})
    theirs = dict(other.named_parameters())
    assert ours.keys() == theirs.keys()
    units: dict[str, float] = {}
    for name, weight in theirs.items():
        largest = 0.0 if weight.grad is None else float(weight.grad.abs().max())
        units[kind_of(name)] = max(units.get(kind_of(name), 0.0), largest)
    for name, weight in theirs.items():
        if ".indexer." in name:
            assert weight.grad is None
            assert not ours[name].any()
            continue
        difference = float((ours[name].reshape(weight.shape) - weight.grad).abs().max())
        assert difference <= ROUNDING * units[kind_of(name)], name


FAULTS = {
    "untransposed residual matrix": {"hyper_connections": {"transposed": False}},
    "routed scale applied twice": {"moe": {"routed_scale": 1.5**2}},
    "hash table off by one": {},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_far_off(oracle, fault, monkeypatch):
    plan, model, other = both(oracle, "small", 0)
    (ids, labels), keys = batch_of(plan, 0), FAULTS[fault]
    sections = {name: getattr(plan.gpt, name).model_copy(update=update) for name, update in keys.items()}
    model.plan = model.routers._plan = plan.model_copy(update={"model": plan.gpt.model_copy(update=sections)})
    if not keys:
        monkeypatch.setattr(torch_model, "hash_table", lambda *given: np.roll(hash_table(*given), 1, axis=0))
    (total,) = model.losses(Batch(ids.numpy(), labels.numpy()))
    expected = float(other(input_ids=ids, labels=ids).loss)
    assert abs(float(total / (labels != IGNORED).sum()) / expected - 1) > 1e-4


def kind_of(name):
    """All weights of a sub-layer's streams are measured in the same unit, as in a run."""
    return name.rpartition("_hc.")[0] or name.rpartition(".hc_")[0] or name
