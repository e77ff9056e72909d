"""The model of DeepSeek-V4's ``config.json``, as released and as transformers writes it."""

import json

import pytest

from pipeproof.interop import Flags
from pipeproof.interop.importers.model_sizes import assume_model
from pipeproof.interop.importers.plan_builder import PlanBuilder
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.stages.describe.gpt import describe_gpt
from tests.interop.importing import imported, refusal
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
OF_PADDLE = {
    "csa_compress_ratios": [0, 0, 4, 128, 0],
    "csa_compress_rotary_base": 160000.0,
    "csa_window_size": 4,
    "moe_n_hash_layers": 3,
    "num_residual_streams": 4,
    "mhc_sinkhorn_iterations": 20,
    "v_head_dim": 16,
    "dsa_index_n_heads": 4,
    "dsa_index_head_dim": 8,
    "dsa_index_topk": 2,
    "mtp_num_layers": 1,
    "activation_func_clamp_value": 10.0,
    "qk_rope_head_dim": 4,
    "rope_type": "yarn",
    "rotary_scaling_factor": 16,
    "original_max_position_embeddings": 65536,
    "csa_dense_mode": False,
}
"""Settings of PaddleFormers' configuration, by its own names."""
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
    return of_config(config)


def of_config(config):
    plan = PlanBuilder("model config", Flags(model_config=config))
    assume_model(plan, 1)
    made = plan.imported("", ())
    model = made.plan["model"] | {"seq_length": 256}
    return plan_from_dict(plan_dict() | {"model": model, "topology": {}}).spec, made.ignored


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
    assert (attention.layer_types, attention.qk_rope_head_dim, attention.compress_rope_theta) == (
        (*TYPES, "sliding_attention"), 4, 160000.0,
    )  # fmt: skip
    assert attention.rope_scaling.model_dump() == YARN
    assert (model.mtp.num_modules, model.mtp.magic_send, model.mtp.reads, model.head_size) == (1, True, "streams", 16)
    assert {layer.name for layer in describe_gpt(spec)} >= {"layer.3", "mtp.0"}


def test_names_of_paddleformers_are_those_of_the_release(tmp_path):
    of_release = {
        "compress_ratios", "compress_rope_theta", "sliding_window", "num_hash_layers", "hc_mult", "hc_sinkhorn_iters",
        "head_dim", "index_n_heads", "index_head_dim", "index_topk", "num_nextn_predict_layers", "swiglu_limit",
    }  # fmt: skip
    shared = {name: value for name, value in SIZES.items() if name not in of_release}
    assert set(SIZES) - set(shared) <= of_release
    (tmp_path / "a").mkdir()
    ours, ignored = model_of(tmp_path / "a", RELEASED)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(shared | OF_PADDLE), encoding="utf-8")
    spec, ignored = of_config(config)
    assert (spec.gpt, ignored) == (ours.gpt, ())
    config.write_text(json.dumps(shared | OF_PADDLE | {"csa_dense_mode": True, "use_moh": True}), encoding="utf-8")
    assert [one.name for one in of_config(config)[1]] == ["csa_dense_mode", "use_moh"]


@pytest.mark.parametrize("change", [{"type": "linear"}, {"attention_factor": 1.2}, {"truncate": False}])
def test_another_scaling_is_named(tmp_path, change):
    spec, ignored = model_of(tmp_path, {**RELEASED, "rope_scaling": {"type": "yarn", **YARN, **change}})
    assert [one.name for one in ignored] == ["rope_scaling"]
    assert spec.gpt.compressed_attention.rope_scaling is None


MEGATRON = (
    "run --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 256 --vocab-size 96 --swiglu "
    "--make-vocab-size-divisible-by 1 --micro-batch-size 1 --global-batch-size 8 --bf16 "
)
VARIANT = "--experimental-attention-variant dsv4_hybrid "
EXPERTS = (
    "--num-experts 8 --moe-router-topk 2 --moe-router-score-function sqrtsoftplus --moe-router-enable-expert-bias "
    "--moe-token-dispatcher-type alltoall "
)


def of_megatron(tmp_path, flags, keys=RELEASED):
    (tmp_path / "config.json").write_text(json.dumps(SIZES | keys), encoding="utf-8")
    return imported("megatron", tmp_path, MEGATRON + flags, name="run.sh", model_config=tmp_path / "config.json")


@pytest.mark.parametrize(
    "flags", ["", VARIANT + EXPERTS + "--mhc-num-residual-streams 4 --v-head-dim 16 --mtp-num-layers 1"]
)
def test_megatron_takes_the_whole_configuration(tmp_path, flags):
    plan = of_megatron(tmp_path, flags)
    spec = plan_from_dict(plan.plan).spec.gpt
    model = model_of(tmp_path, RELEASED)[0].gpt
    assert not any(finding.code == "PP177" for finding in plan.findings)
    for part in (
        "compressed_attention",
        "hyper_connections",
        "head_size",
        "ffn_size",
        "swiglu_limit",
        "swiglu_formula",
    ):
        assert getattr(spec, part) == getattr(model, part), part
    own = {"expert_bias_rate": None, "dispatcher": "all_to_all", "combine": "choice"}
    assert spec.moe.model_copy(update=own) == model.moe
    assert spec.moe.combine == ("expert" if flags else "choice")
    assert (spec.moe.expert_bias_rate is None) == (not flags)
    assert (spec.mtp.num_modules, spec.mtp.magic_send, spec.num_token_ids) == (1, True, 96)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--num-experts 16", "--num-experts is 16, and the model's configuration has 8"),
        ("--moe-router-score-function sigmoid", "configuration has sqrtsoftplus"),
        ("--moe-router-topk-scaling-factor 2.5", "configuration has 1.5"),
        ("--mhc-num-residual-streams 2", "configuration has 4"),
        ("--v-head-dim 32", "configuration has 16"),
        ("--kv-lora-rank 8", "not for the attention of DeepSeek-V4"),
    ],
)
def test_megatron_refuses_a_flag_with_another_value(tmp_path, flags, words):
    assert words in refusal(of_megatron, tmp_path, flags).message


def test_other_attention_leaves_the_verdict_open_without_a_configuration(tmp_path):
    made = imported("megatron", tmp_path, MEGATRON + VARIANT, name="run.sh")
    assert [finding.code for finding in made.findings] == ["PP177"]


def test_megatrons_streams(tmp_path):
    flags = "--enable-mhc-connections --mhc-num-residual-streams 2 --hidden-dropout 0 --attention-dropout 0"
    made = imported("megatron", tmp_path, MEGATRON + flags, name="run.sh")
    streams = plan_from_dict(made.plan).spec.gpt.hyper_connections
    assert (streams.streams, streams.sinkhorn_iterations, streams.transposed) == (2, 20, False)
    text = MEGATRON + flags + " --pipeline-model-parallel-size 2"
    assert "stages exchange one stream" in refusal(imported, "megatron", tmp_path, text, name="run.sh").message
