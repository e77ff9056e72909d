"""A whole DeepSeek-V4 with our weights in transformers' model, in float64: logits, loss and every gradient.

Blocks of all three types of attention, experts by token id and by scores, residual streams and their contraction.
"""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.gradient_facts import bias_name
from pipeproof.stages.describe.synthetic import IGNORED, Batch
from pipeproof.stages.reference.torch_model import TorchUnpartitionedModel
from pipeproof.state.names.convention_maps import map_from_own_names
from pipeproof.state.names.deepseek_v4 import tables_of
from pipeproof.state.names.part_tables import config_of
from tests.plans import plan_dict
from tests.stages.torch.test_compressed_attention import SIZES, TYPES, oracle_
from tests.state.names.apply_map import apply_map

__all__ = ["oracle_"]

pytestmark = [pytest.mark.needs_torch, pytest.mark.needs("transformers")]

ROUNDING = 1e-12
"""Bound of the largest difference, in units of the largest element of a weight's gradient; 4.1e-14 was the most."""
BLOCKS = 4


def plan_of(size, seed, *, mtp=None):
    model, spec = SIZES[size]
    types = [TYPES[i % 3] for i in range(BLOCKS)] + ["sliding_attention"] * (mtp is not None)
    draw = np.random.default_rng(seed).integers
    experts = int(draw(4, 9))
    return plan_from_dict(
        plan_dict(
            model={
                **model, "num_layers": BLOCKS, "vocab_size": 32, "activation_order": "bsh",
                "mtp": mtp, "compressed_attention": {**spec, "layer_types": types, "documents": None},
                "moe": {
                    "num_experts": experts, "top_k": int(draw(2, experts)), "ffn_size": int(draw(4, 10)),
                    "num_shared_experts": 1, "score": ["sqrtsoftplus", "sigmoid"][seed % 2], "routed_scale": 1.5,
                    "hash_layers": 2, "expert_bias_rate": 0.1,
                },
                "swiglu_limit": 0.4, "swiglu_formula": "silu",
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
    routed = [*(f"layer.{i}" for i in range(2, BLOCKS)), *["mtp.0"] * (plan.gpt.mtp is not None)]
    weights |= {f"bias/{name}.mlp": draw(plan.gpt.moe.num_experts) for name in routed}
    model = TorchUnpartitionedModel(plan, weights)
    model.weights.begin_step()
    return model


def loaded(plan, tensors, directory, of_module=None):
    """transformers' model of files with the convention's names, loaded strictly.

    The model of the module has its block after the others, and its contraction and norm at the end.
    """
    from transformers import AutoModelForCausalLM

    theirs = apply_map(map_from_own_names("huggingface", plan.gpt, "float64"), tensors) | tables_of(plan)
    config = config_of(plan.gpt, "float64")
    if of_module is not None:
        ends = ("hc_head_", "norm.")
        module = {name.removeprefix("mtp.0."): array for name, array in theirs.items() if name.startswith("mtp.0.")}
        of_module |= {name: torch.tensor(module.pop(f"{name}.weight")).requires_grad_() for name in MODULE}
        theirs |= {name if name.startswith(ends) else f"layers.{BLOCKS}.{name}": one for name, one in module.items()}
        config |= {"num_hidden_layers": BLOCKS + 1, "layer_types": [*config["layer_types"], "sliding_attention"]}
    theirs = {name: array for name, array in theirs.items() if not name.startswith("mtp.")}
    directory.mkdir()
    files = {name: np.ascontiguousarray(array) for name, array in theirs.items()}
    save_file(files, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    network, loading = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager",
        output_loading_info=True,
    )  # fmt: skip
    assert not any(loading[keys] for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return network


MODULE = ("enorm", "e_proj", "hnorm", "h_proj")


def both(size, seed, directory):
    """Our model and transformers' with its weights, tables and biases."""
    plan = plan_of(size, seed)
    model = model_of(plan, seed)
    return plan, model, loaded(plan, with_biases(model, lambda weight: weight.detach()), directory / "weights")


def with_biases(model, of):
    """An array of each weight, and the biases of routers."""
    arrays = {name: of(weight).numpy() for name, weight in model.weights.main.items()}
    return arrays | {bias_name(name): bias.numpy() for name, bias in model.routers.biases.items()}


def batch_of(plan, seed):
    ids = torch.randint(plan.gpt.vocab_size, (2, plan.gpt.seq_length), generator=torch.Generator().manual_seed(seed))
    return ids, torch.cat([ids[:, 1:], torch.full((2, 1), IGNORED)], 1)


@pytest.mark.parametrize(("size", "seed"), list(zip(SIZES, range(4), strict=True)))
@pytest.mark.usefixtures("oracle")
def test_logits_loss_and_all_gradients_are_those_of_transformers(size, seed, tmp_path):
    plan, model, other = both(size, seed, tmp_path)
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
    ours = dict(loaded(plan, with_biases(model, lambda weight: weight.grad), tmp_path / "grads").named_parameters())
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
        difference = float((ours[name].detach() - weight.grad).abs().max())
        assert difference <= ROUNDING * units[kind_of(name)], name


def kind_of(name):
    """All weights of a sub-layer's streams are measured in the same unit, as in a run."""
    return name.rpartition("_hc.")[0] or name.rpartition(".hc_")[0] or name


def rms(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


@pytest.mark.usefixtures("oracle")
def test_the_module_reads_all_streams_as_released(tmp_path):
    """The released module: e_proj of the embedding's norm plus h_proj of each stream's, a block, a contraction."""
    plan = plan_of(next(iter(SIZES)), 5, mtp={"num_modules": 1, "reads": "streams", "magic_send": True})
    model, module = model_of(plan, 5), {}
    other = loaded(plan, with_biases(model, lambda weight: weight.detach()), tmp_path / "weights", module)
    (ids, labels), seen = batch_of(plan, 5), {}
    hook = lambda layer, side, x: seen.update({(layer, side): x})  # noqa: E731 - one line
    main, loss = model.losses(Batch(ids.numpy(), labels.numpy()), hook)
    tokens = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], 1)

    def join(_, given, kwargs):
        embedded = rms(other.model.embed_tokens(tokens), module["enorm"]) @ module["e_proj"].T
        streams = rms(given[0], module["hnorm"]) @ module["h_proj"].T
        return (streams + embedded.unsqueeze(2), *given[1:]), kwargs

    other.model.layers[BLOCKS].register_forward_pre_hook(join, with_kwargs=True)
    logits = other(input_ids=ids).logits
    ours = seen["mtp.0", "output"] @ model.weights.main["head.weight"]
    assert float((ours - logits).detach().abs().max() / logits.detach().abs().max()) < ROUNDING
    of_module = torch.cat([labels[:, 1:], torch.full((2, 1), IGNORED)], 1)
    theirs = torch.nn.functional.cross_entropy(logits.flatten(0, 1), of_module.flatten(), reduction="sum")
    theirs.backward()
    (loss + 0 * main).backward()
    model.weights.end_backward()
    found = {}
    of_ours = loaded(plan, with_biases(model, lambda weight: weight.grad), tmp_path / "grads", found)
    grads = [(name, found[name].detach(), module[name].grad) for name in MODULE]
    ours = dict(of_ours.named_parameters())
    grads += [(name, ours[name].detach(), one.grad) for name, one in other.named_parameters() if one.grad is not None]
    units: dict[str, float] = {}
    for name, _, grad in grads:
        units[kind_of(name)] = max(units.get(kind_of(name), 0.0), float(grad.abs().max()))
    assert len(grads) > 100
    for name, one, grad in grads:
        assert float((one - grad).abs().max()) <= ROUNDING * units[kind_of(name)], name
