"""The model of DeepSeek-V4's ``config.json``, as released and as transformers writes it."""

import json

import pytest

from pipeproof.interop import Flags
from pipeproof.interop.importers.draft import Draft
from pipeproof.interop.importers.model_sizes import Needs, assume_model
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.stages.describe.gpt import describe_gpt
from tests.plans import plan_dict

SIZES = {
    "model_type": "deepseek_v4", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 1, "vocab_size": 96, "q_lora_rank": 8, "sliding_window": 4, "o_groups": 2, "o_lora_rank": 6,
    "index_n_heads": 4, "index_head_dim": 8, "index_topk": 2, "rope_theta": 10000, "compress_rope_theta": 160000,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0,
    "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
}  # fmt: skip
TYPES = ("sliding_attention", "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
YARN = {"factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
RELEASED = {
    "compress_ratios": [0, 0, 4, 128, 0], "num_hash_layers": 3, "qk_rope_head_dim": 4,
    "rope_scaling": {"type": "yarn", **YARN},
}  # fmt: skip
WRITTEN = {
    "layer_types": list(TYPES), "mlp_layer_types": ["hash_moe"] * 3 + ["moe"], "partial_rotary_factor": 0.25,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "rope_parameters": {
        "main": {"rope_type": "default"}, "compress": {"rope_type": "yarn", "attention_factor": 1.0, **YARN},
    },
}  # fmt: skip


def model_of(tmp_path, keys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SIZES | keys), encoding="utf-8")
    draft = Draft("model config", Flags(model_config=config))
    assume_model(draft, Needs(1))
    imported = draft.imported("", ())
    model = imported.plan["model"] | {"seq_length": 256}
    return plan_from_dict(plan_dict() | {"model": model, "topology": {}}).spec, imported.ignored


@pytest.mark.parametrize("keys", [RELEASED, WRITTEN], ids=["released", "written by transformers"])
def test_the_model_of_a_configuration(tmp_path, keys):
    spec, ignored = model_of(tmp_path, keys)
    assert not ignored
    model = spec.gpt
    assert (model.moe.score, model.moe.routed_scale, model.moe.hash_layers) == ("sqrtsoftplus", 1.5, 3)
    assert (model.swiglu_limit, model.swiglu_formula) == (10.0, "silu")
    streams = model.hyper_connections
    assert (streams.streams, streams.sinkhorn, streams.epsilon) == (4, "softmax", 1e-6)
    assert (streams.transposed, streams.contraction) == (True, "learned")
    attention = model.compressed_attention
    assert (attention.layer_types, attention.qk_rope_head_dim, attention.compress_rope_theta) == (TYPES, 4, 160000.0)
    assert attention.rope_scaling.model_dump() == YARN
    assert (model.mtp.num_modules, model.mtp.magic_send, model.head_size) == (1, True, 16)
    assert {layer.name for layer in describe_gpt(spec)} >= {"layer.3", "mtp.0"}


@pytest.mark.parametrize("change", [{"type": "linear"}, {"attention_factor": 1.2}, {"truncate": False}])
def test_another_scaling_is_named(tmp_path, change):
    spec, ignored = model_of(tmp_path, {**RELEASED, "rope_scaling": {"type": "yarn", **YARN, **change}})
    assert [one.name for one in ignored] == ["rope_scaling"]
    assert spec.gpt.compressed_attention.rope_scaling is None
