"""Norms, positions, activation and biases, from a model's configuration and from training files."""

import json

import pytest

from pipeproof.interop.importers.imported import Flags
from pipeproof.interop.importers.model_sizes import read_model_config
from pipeproof.interop.importers.plan_builder import PlanBuilder
from tests.interop.importing import imported

GPT = {"norm": "layer", "positions": "learned", "biases": "all", "tied_embedding": True}
KEYS = ("norm", "qk_norm", "positions", "mlp", "biases", "tied_embedding")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LATENT = {"kv_lora_rank": 8}


def read(path, config):
    (path / "config.json").write_text(json.dumps(config))
    plan = PlanBuilder("model config", Flags())
    read_model_config(plan, path / "config.json")
    made = plan.imported("", ())
    parts = {key: made.plan["model"][key] for key in KEYS if key in made.plan.get("model", {})}
    return made, parts


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"model_type": "llama", "attention_bias": False}, {}),
        ({"model_type": "llama", "attention_bias": True, "mlp_bias": True}, {"biases": "all"}),
        ({"model_type": "qwen2"}, {"biases": "qkv"}),
        ({"model_type": "qwen3"}, {"qk_norm": True}),
        ({"model_type": "glm4_moe", "attention_bias": True, "use_qk_norm": True} | EXPERTS,
         {"qk_norm": True, "biases": "qkv"}),
        ({"model_type": "gpt2"}, GPT | {"mlp": "gelu_tanh"}),
        ({"model_type": "gpt2", "activation_function": "gelu"}, GPT | {"mlp": "gelu"}),
        ({"model_type": "gpt2", "tie_word_embeddings": False},
         {"norm": "layer", "positions": "learned", "biases": "all", "mlp": "gelu_tanh"}),
        ({"model_type": "gpt", "hidden_act": "gelu"}, GPT | {"mlp": "gelu_tanh"}),
        ({"model_type": "starcoder2", "hidden_act": "gelu_pytorch_tanh", "use_bias": True},
         {"norm": "layer", "mlp": "gelu_tanh", "biases": "all"}),
        ({"model_type": "stablelm", "use_qkv_bias": True}, {"norm": "layer", "biases": "qkv"}),
        ({"model_type": "ernie4_5", "use_bias": True}, {"biases": "all", "tied_embedding": True}),
        ({"model_type": "phi3", "rope_scaling": None, "sliding_window": 64, "max_position_embeddings": 64}, {}),
        ({"model_type": "phi3", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, {}),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False}, {"biases": "qkv"}),
        ({"model_type": "ernie4_5_moe", "num_hidden_layers": 3, "moe_layer_end_index": 2, "moe_layer_interval": 1},
         {"tied_embedding": True}),
    ],
)  # fmt: skip
def test_a_configuration_names_its_parts(tmp_path, config, parts):
    made, found = read(tmp_path, config)
    assert found == parts
    assert not made.ignored


@pytest.mark.parametrize(
    ("config", "name", "parts"),
    [
        ({"model_type": "llama", "attention_bias": True}, "attention_bias", {"biases": "qkv"}),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias", {}),
        (
            {"model_type": "ernie4_5_moe", "use_bias": True, "tie_word_embeddings": False} | EXPERTS,
            "use_bias",
            {"biases": "qkv"},
        ),
        ({"model_type": "ernie4_5", "rope_theta": 500000.0}, "rope_theta", {"tied_embedding": True}),
        (
            {"model_type": "ernie4_5_moe", "moe_layer_interval": 2} | EXPERTS,
            "moe_layer_interval",
            {"tied_embedding": True},
        ),
        (
            {"model_type": "ernie4_5_moe", "num_hidden_layers": 4, "moe_layer_end_index": 2} | EXPERTS,
            "moe_layer_end_index",
            {"tied_embedding": True},
        ),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "rope_scaling", {}),
        ({"model_type": "phi3", "rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_parameters", {}),
        ({"model_type": "phi3", "partial_rotary_factor": 0.75}, "partial_rotary_factor", {}),
        ({"model_type": "phi3", "rope_parameters": {"partial_rotary_factor": 0.75}}, "partial_rotary_factor", {}),
        ({"model_type": "phi3", "sliding_window": 2047, "max_position_embeddings": 4096}, "sliding_window", {}),
        ({"model_type": "deepseek_v3", "attention_bias": True} | LATENT, "attention_bias", {}),
        ({"model_type": "deepseek_v3", "use_qk_norm": True} | LATENT, "use_qk_norm", {}),
        ({"model_type": "gpt2", "activation_function": "relu"}, "activation_function", GPT | {"mlp": "gelu_tanh"}),
        ({"model_type": "gpt2", "activation_function": ["gelu"]}, "activation_function", GPT | {"mlp": "gelu_tanh"}),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [1]} | EXPERTS, "mlp_only_layers", {"qk_norm": True}),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 1} | EXPERTS, "mlp_only_layers", {"qk_norm": True}),
    ],
)
def test_parts_that_a_plan_does_not_have_are_named(tmp_path, config, name, parts):
    made, found = read(tmp_path, config)
    assert found == parts
    assert [setting.name for setting in made.ignored] == [name]


def test_gpt2_has_names_of_its_own_for_sizes(tmp_path):
    made, _ = read(tmp_path, {"model_type": "gpt2", "n_layer": 3, "n_embd": 32, "n_head": 4, "n_inner": None})
    model = made.plan["model"]
    assert (model["num_layers"], model["hidden_size"], model["num_heads"], model["ffn_size"]) == (3, 32, 4, 128)


def test_a_training_file_of_paddle_can_have_them(tmp_path):
    job = {"pipeline_model_parallel_size": 2, "gradient_accumulation_steps": 4, "model_type": "qwen3"}
    assert imported("paddleformers", tmp_path, job).plan["model"]["qk_norm"] is True


def test_torchtitan_names_the_model(tmp_path):
    text = '[model]\nname = "qwen3"\n[parallelism]\npipeline_parallel_degree = 2\n'
    assert imported("torchtitan", tmp_path, text, name="job.toml").plan["model"]["qk_norm"] is True
