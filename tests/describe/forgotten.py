"""Checks that name the place which lacks a part of the model, or a parameter.

The description of layers (``stages/describe/layers``) is the list of parameters with which all others are compared.
"""

from __future__ import annotations

import numpy as np

from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.specs.model import model_content
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.layer import layer_kind
from pipeproof.stages.describe.layers.layer_operations import layer_operations
from pipeproof.stages.describe.typed_gpt import typed_gpt
from pipeproof.state.names.convention_maps import map_from_own_names
from pipeproof.state.names.part_tables import config_of
from pipeproof.state.state_codes import NoNamesError
from tests.interop.importing import imported
from tests.plans import plan_dict

MOE = {"num_experts": 4, "top_k": 2, "ffn_size": 8, "num_shared_experts": 1, "dense_layers": 1}
MLA = {"kv_rank": 6, "nope_head_size": 4, "rope_head_size": 4, "value_head_size": 3, "q_rank": 5}
MODELS = {
    "Llama": {"num_kv_heads": 2},
    "experts": {"moe": MOE},
    "latent attention, MTP": {"mla": MLA, "mtp": {"num_modules": 1}},
    "streams": {"hyper_connections": {"streams": 2}},
    "GPT-3": {"norm": "layer", "positions": "learned", "mlp": "gelu_tanh", "biases": "all"},
    "biases, QK-norm": {"norm": "layer", "qk_norm": True, "biases": "all"},
    "Qwen": {"qk_norm": True, "biases": "qkv", "moe": MOE},
}


PARTS = ("qk_norm", "mlp", "biases", "norm", "positions")
WITH_PART = {part: {part: MODELS["GPT-3"].get(part, True)} for part in PARTS}
"""A Llama with only this part."""
_BLOCK = {"attn_norm.weight", "attn.qkv.weight", "attn.out.weight", "mlp_norm.weight"} | {
    f"mlp.{factor}.weight" for factor in ("gate", "up", "down")
}
PARAMETERS = {"embed": {"weight"}, "layer.0": _BLOCK, "layer.1": _BLOCK, "norm": {"weight"}, "head": {"weight"}}
"""The parameters of a Llama by layer, without the layer's name."""
_OF_BLOCKS = {
    "qk_norm": {"attn.q_head_norm.weight", "attn.k_head_norm.weight"},
    "mlp": {"mlp.gate.weight"},
    "biases": {f"{product}.bias" for product in ("attn.qkv", "attn.out", "mlp.gate", "mlp.up", "mlp.down")},
    "norm": {"attn_norm.bias", "mlp_norm.bias"},
    "positions": set(),
}
CHANGED = {part: {"layer.0": names, "layer.1": names} for part, names in _OF_BLOCKS.items()}
CHANGED["norm"]["norm"] = {"bias"}
CHANGED["positions"]["embed"] = {"positions.weight"}
"""By part and layer, the parameters that a part adds, or removes from a Llama."""


def spec_of(model, **topology):
    plan = plan_dict(
        model={"num_layers": 2, **model},
        topology={"pp": 1, **topology},
        schedule={"kind": "gpipe", "num_micro_batches": 3},
        run={"dtype": "float64", "steps": 1, "optimizer": "sgd"},
    )
    return plan_from_dict(plan).spec


def forgotten(place, names):
    """Fail with the place that lacks names."""
    assert not names, f"forgotten in {place}: {sorted(names)}"


def check_digest(part):
    """A plan without the part keeps its digest: the part is not in its content."""
    forgotten("specs/model.py", {part} & model_content(spec_of({}).model).keys())


def check_parameters(part):
    """The description and the typed programs of a Llama with one part have the parameters that are written here."""
    spec = spec_of(WITH_PART[part])
    typed = typed_gpt(spec)
    for layer in describe_gpt(spec):
        expected = PARAMETERS[layer.name] ^ CHANGED[part].get(layer.name, set())
        own = {weight.name.removeprefix(f"{layer.name}.") for weight in layer.parameters}
        for name in sorted(expected ^ own):
            forgotten(f"stages/describe/layers/{_described_in(layer.name, name)}, {layer.name}", [name])
        listed = {parameter.value.name for parameter in typed[layer_kind(spec.model, layer.name)].program.parameters}
        forgotten(f"stages/describe/typed_gpt.py, {layer.name}", expected ^ listed)


def _described_in(layer, name):
    if "norm.bias" in name or name == "bias":
        return "operations.py"
    if name.endswith(".bias"):
        return "layer_operations.py"
    return "layer_operations.py" if layer == "embed" else "attention.py" if name.startswith("attn.") else "mlp.py"


def check_rotation(part):
    """The description rotates heads if and only if the typed programs do."""
    spec = spec_of(WITH_PART[part])
    described = any(operation.name == "attn.rotary" for operation in layer_operations(spec.model, "layer.0"))
    typed = typed_gpt(spec)[layer_kind(spec.model, "layer.0")]
    rotated = any(".rotated" in operation.name for operation in typed.program.ops)
    forgotten("stages/describe/layers/attention.py", ["attn.rotary"] if described != rotated else [])


def check_types(name):
    spec = spec_of(MODELS[name])
    typed = typed_gpt(spec)
    for layer in describe_gpt(spec):
        own = {weight.name.removeprefix(f"{layer.name}.") for weight in (*layer.parameters, *layer.borrowed)}
        listed = {parameter.value.name for parameter in typed[layer_kind(spec.model, layer.name)].program.parameters}
        forgotten(f"stages/describe/typed_gpt.py, {layer.name}", own - listed)
        forgotten(f"stages/describe/layers/, {layer.name}", listed - own)


# Tools: names, configurations, importers. The tables here state their parts.

NAMED = {
    "Qwen2": ({"num_kv_heads": 2, "biases": "qkv"}, ("huggingface", "megatron", "paddleformers", "paddlefleet")),
    "Qwen3": ({"num_kv_heads": 2, "qk_norm": True}, ("huggingface", "megatron", "paddleformers", "paddlefleet")),
    "Qwen3 with experts": (
        {"num_kv_heads": 2, "qk_norm": True, "moe": {**MOE, "num_shared_experts": 0}}, ("huggingface", "megatron"),
    ),
    "GLM-4": (
        {"qk_norm": True, "biases": "qkv", "moe": {**MOE, "score": "sigmoid"}}, ("huggingface", "paddleformers"),
    ),
    "Llama with biases": ({"biases": "all"}, ("huggingface", "megatron", "paddleformers-unfused")),
    "GPT-2": (MODELS["GPT-3"], ("huggingface", "megatron")),
    "StarCoder2": ({"norm": "layer", "mlp": "gelu", "biases": "all"}, ("huggingface", "megatron")),
    "StableLM": ({"norm": "layer", "biases": "qkv"}, ("huggingface", "megatron")),
}  # fmt: skip
"""Models of other tools, and conventions that have names for them."""

GELU_TANH = "gelu_pytorch_tanh"
SETTINGS = {
    "Qwen2": {"model_type": "qwen2", "hidden_act": "silu"},
    "Qwen3": {"model_type": "qwen3", "attention_bias": False},
    "Qwen3 with experts": {"model_type": "qwen3_moe"},
    "GLM-4": {"model_type": "glm4_moe", "use_qk_norm": True, "attention_bias": True},
    "Llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "GPT-2": {"model_type": "gpt2", "activation_function": GELU_TANH, "layer_norm_epsilon": 1e-6},
    "StarCoder2": {"model_type": "starcoder2", "hidden_act": "gelu", "use_bias": True, "norm_epsilon": 1e-6},
    "StableLM": {"model_type": "stablelm", "use_qkv_bias": True, "layer_norm_eps": 1e-6},
}
"""Settings in ``config.json`` from which a reader knows the parts."""

MEGATRON = {
    "a GPT-3": ("", MODELS["GPT-3"]),
    "without the fusion": ("--no-bias-gelu-fusion", {"mlp": "gelu"}),
    "norms of heads": ("--qk-layernorm", {"qk_norm": True}),
    "biases of queries, keys and values": ("--disable-bias-linear --add-qkv-bias", {"biases": "qkv"}),
}
"""Flags of Megatron-LM, and parts that they mean."""


def check_names(kind):
    """Every parameter has a name in the conventions of the model."""
    model, conventions = NAMED[kind]
    spec = spec_of(model)
    own = {weight.name for layer in describe_gpt(spec) for weight in layer.parameters}
    for convention in conventions:
        place = f"state/names/part_tables.py, {convention}"
        try:
            named = map_from_own_names(convention, spec.model, "float32")
        except (NoNamesError, KeyError) as error:
            forgotten(place, [str(error)])
        forgotten(place, own - {copy.source for entry in named.tensors.values() for copy in entry.copies})


def check_settings(kind):
    """The configuration of a model has the settings of its parts."""
    try:
        config = config_of(spec_of(NAMED[kind][0]).model, "float32")
    except AssertionError as error:
        forgotten("state/names/part_tables.py", [str(error)])
    forgotten("state/names/part_tables.py", [k for k, v in SETTINGS[kind].items() if config.get(k) != v])


def check_importers(path):
    """Configurations of transformers, flags of Megatron-LM and jobs of torchtitan give the parts of their models."""
    for kind, (model, _) in NAMED.items():
        sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8} if "moe" in model else {}
        job = {"pipeline_model_parallel_size": 2, "gradient_accumulation_steps": 4, **sizes, **SETTINGS[kind]}
        _check_imported(kind, imported("paddleformers", path, job, name="job.json"), model)
    for kind, (flags, parts) in MEGATRON.items():
        sizes = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
        script = f"torchrun pretrain_gpt.py --micro-batch-size 1 --global-batch-size 8 {sizes} {flags}\n"
        _check_imported(f"Megatron-LM, {kind}", imported("megatron", path, script, name="train.sh"), parts)
    job = '[model]\nname = "qwen3"\n[parallelism]\npipeline_parallel_degree = 2\n'
    _check_imported("torchtitan", imported("torchtitan", path, job, name="job.toml"), {"qk_norm": True})


def _check_imported(kind, found, model):
    read = found.plan["model"]
    parts = {key: model[key] for key in ("norm", "qk_norm", "positions", "mlp", "biases") if key in model}
    missing = [key for key, value in parts.items() if read.get(key) != value]
    forgotten(f"interop/importers/model_parts.py, {kind}", missing)


# Computations: gradients of every parameter, by place.


def in_torch_stage(spec):
    from tests.stages.torch.staged_run import StagedRun

    return next(StagedRun(spec).steps()).gradients


def in_torch_reference(spec):
    from pipeproof.stages.reference.torch_unpartitioned import run_unpartitioned

    return next(run_unpartitioned(spec)).gradients


def in_paddle_stage(spec):
    from pipeproof.comm.lower import lower
    from tests.exec.in_memory import run_all

    return run_all(lower(spec))[0][0][0].gradients


def in_ordered_reference(spec):
    from tests.stages.references import run_in_order

    return next(iter(run_in_order(spec))).gradients


STAGES = {
    "stages/torch/ (functional.py, weights.py)": in_torch_stage,
    "stages/paddle/ (functional.py, weights.py)": in_paddle_stage,
}
ON_PADDLE = {
    "stages/reference/ (ordered.py, ordered_layers.py, layer_math.py)": in_ordered_reference,
}
ON_TORCH = {"stages/reference/ (torch_model.py, torch_reference_weights.py)": in_torch_reference}
COMPUTED = {**STAGES, **ON_PADDLE, **ON_TORCH}
"""Places that compute a model: its gradients by parameter."""

SHARED = {
    frozenset(STAGES): "stages/common/ (stage.py, embedding_and_head.py)",
}
"""The file that is wrong, where all these places are wrong together."""


def check_gradients(place, name):
    """A parameter that is not used keeps the zeros with which its gradient begins."""
    spec = spec_of(MODELS[name])
    gradients = COMPUTED[place](spec)
    listed = {weight.name for layer in describe_gpt(spec) for weight in layer.parameters}
    forgotten(place, {name for name in listed if name not in gradients or not gradients[name].any()})


def check_values(part):
    """All computations of a Llama with one part have the same gradients, up to rounding.

    If two agree that share nothing, they are right.
    """
    spec = spec_of(WITH_PART[part])
    found = {place: _gradients(run, spec) for place, run in COMPUTED.items()}
    pairs = [(next(iter(ON_PADDLE)), *ON_TORCH), tuple(STAGES)]
    right = next(found[one] for one, other in pairs if _agree(found[one], found[other]))
    wrong = frozenset(place for place in found if not _agree(right, found[place]))
    forgotten(SHARED.get(wrong, ", ".join(sorted(wrong))), ["other gradients"] if wrong else [])


def _gradients(run, spec):
    """Gradients by name, or none if a place cannot compute the model at all."""
    try:
        return run(spec)
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError):
        return {}


def _agree(ours, theirs):
    if not ours or ours.keys() != theirs.keys():
        return False
    scale = max(abs(array).max() for array in theirs.values())
    return all(np.allclose(array, theirs[name], rtol=1e-9, atol=1e-12 * scale) for name, array in ours.items())
