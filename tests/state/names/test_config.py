"""The configuration next to Hugging Face's names states the sizes of the model, and the class that computes it."""

import json

import pytest

from pipeproof.interop.importers.imported import Flags
from pipeproof.interop.importers.model_sizes import read_model_config
from pipeproof.interop.importers.plan_builder import PlanBuilder
from pipeproof.specs.model import ModelSpec
from pipeproof.state.names.convention_maps import map_from_own_names
from pipeproof.state.names.part_tables import config_of
from tests.state.names.models import ERNIE, NAMED, ONE_CLASS, PHI3, plan_of

CLASSES = {
    "dense with grouped queries": "LlamaForCausalLM",
    "dense, a head of another size": "LlamaForCausalLM",
    "tied": "LlamaForCausalLM",
    "tied with modules": "LlamaForCausalLM",
    "experts as Mixtral": "MixtralForCausalLM",
    "experts, some shared": "DeepseekForCausalLM",
    "experts with biases": "Glm4MoeForCausalLM",
    "latent, dense": "DeepseekV3ForCausalLM",
    "latent, experts": "DeepseekV2ForCausalLM",
    "latent with modules": "DeepseekV3ForCausalLM",
    "Qwen2": "Qwen2ForCausalLM",
    "Qwen3": "Qwen3ForCausalLM",
    "Llama with all biases": "LlamaForCausalLM",
    "GPT-2": "GPT2LMHeadModel",
    "GPT-2 with a head, exact": "GPT2LMHeadModel",
    "StarCoder2": "Starcoder2ForCausalLM",
    "StableLM": "StableLmForCausalLM",
    "Qwen3 with experts": "Qwen3MoeForCausalLM",
    "GLM-4 with experts": "Glm4MoeForCausalLM",
}
OTHER_CLASSES = {PHI3: "Phi3ForCausalLM", ERNIE: "Ernie4_5ForCausalLM"}
MODELS = {kind: model for kind, model, convention in NAMED if convention == "huggingface" and kind in CLASSES}
OTHERS = [(kind, convention) for kind, _, convention in NAMED if convention in OTHER_CLASSES]
CASES = [*((kind, "huggingface") for kind in MODELS), *OTHERS]
SIZES = ("num_layers", "hidden_size", "num_heads", "vocab_size", "tied_embedding")


@pytest.mark.parametrize(("kind", "convention"), CASES)
def test_the_importers_read_the_models_sizes_out_of_it(tmp_path, kind, convention):
    model = plan_of(**(ONE_CLASS[kind][0] if convention in OTHER_CLASSES else MODELS[kind])).model
    config = config_of(model, "float64", convention)
    expected = OTHER_CLASSES.get(convention) or CLASSES[kind]
    assert config["architectures"] == [
        expected.replace("For", "_MoeFor") if model.moe and convention == ERNIE else expected
    ]
    assert config["pad_token_id"] is None  # PaddleFormers' Llama takes 0 where it is left out: no embedding for id 0
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = PlanBuilder("model config", Flags())
    read_model_config(plan, tmp_path / "config.json")
    assert not plan.imported("", ()).ignored
    for key in SIZES:
        assert plan.get("model", key, default=False) == getattr(model, key), key
    assert plan.get("model", "ffn_size") == (model.moe.ffn_size if "Mixtral" in kind else model.ffn_size)
    for section, keys in {
        "moe": ("num_experts", "top_k", "num_shared_experts", "dense_layers"),
        "mla": ("q_rank", "kv_rank", "nope_head_size", "rope_head_size", "value_head_size"),
        "mtp": ("num_modules",),
    }.items():
        part = getattr(model, section)
        for key in keys if part is not None else ():
            assert plan.get("model", section, key) == (getattr(part, key) or None), key
    if model.mla is None:
        assert plan.get("model", "num_kv_heads", default=model.num_heads) == model.kv_heads
        assert plan.get("model", "head_size", default=model.hidden_size // model.num_heads) == model.size_of_head
    for key in ("norm", "qk_norm", "positions", "mlp", "biases"):
        assert plan.get("model", key, default=ModelSpec.model_fields[key].default) == getattr(model, key), key


@pytest.mark.parametrize("kind", [kind for kind in MODELS if "GPT-2" not in kind])
def test_shapes_of_tensors_follow_from_it(kind):
    model = plan_of(**MODELS[kind], unpadded_vocab_size=29).model
    config, theirs = config_of(model, "float64"), map_from_own_names("huggingface", model, "float64").tensors
    assert theirs["model.embed_tokens.weight"].shape == (config["vocab_size"], config["hidden_size"])
    mlp = theirs.get("model.layers.0.mlp.gate_proj.weight", None)
    assert mlp is None or mlp.shape == (config["intermediate_size"], config["hidden_size"])
    attention = {name.rpartition(".layers.0.self_attn.")[2]: one.shape for name, one in theirs.items()}
    if model.mla is None:
        assert attention["q_proj.weight"][0] == config["num_attention_heads"] * config["head_dim"]
        assert attention["v_proj.weight"][0] == config["num_key_value_heads"] * config["head_dim"]
    else:
        assert attention["kv_a_proj_with_mqa.weight"][0] == config["kv_lora_rank"] + config["qk_rope_head_dim"]
        assert attention["o_proj.weight"][1] == config["num_attention_heads"] * config["v_head_dim"]
    experts = [name for name in theirs if ".layers.1." in name and "down_proj" in name and ".experts." in name]
    assert len(experts) == (config.get("n_routed_experts") or config.get("num_experts") or 0)
