"""Small models of every family that has names elsewhere; no two sizes are equal, and there are more than ten
experts."""

from pipeproof.specs.load_plan import plan_from_dict
from tests.plans import plan_dict

MLA = {"kv_rank": 10, "nope_head_size": 6, "rope_head_size": 4, "value_head_size": 5}
MOE = {"num_experts": 12, "top_k": 3, "ffn_size": 7}
SIGMOID = {"score": "sigmoid", "expert_bias_rate": 0.01}

MODELS = {
    "dense with grouped queries": {"num_kv_heads": 3},
    "dense, a head of another size": {"head_size": 6, "num_kv_heads": 2},
    "tied": {"tied_embedding": True},
    "tied with modules": {"tied_embedding": True, "num_kv_heads": 2, "mtp": {"num_modules": 2}},
    "experts as Mixtral": {"num_kv_heads": 2, "moe": MOE},
    "experts, some shared": {"moe": MOE | {"num_shared_experts": 2, "dense_layers": 1, "normalize": False}},
    "experts with biases": {
        "num_kv_heads": 3,
        "moe": MOE | SIGMOID | {"dense_layers": 1, "num_shared_experts": 1},
        "mtp": {"num_modules": 1},
    },
    "latent, dense": {"mla": MLA},
    "latent, experts": {"mla": MLA, "moe": MOE | {"num_shared_experts": 1}},
    "latent with modules": {
        "mla": MLA | {"q_rank": 9},
        "moe": MOE | SIGMOID | {"dense_layers": 1, "num_shared_experts": 1},
        "mtp": {"num_modules": 2},
    },
}

ALL = ("huggingface", "megatron", "paddleformers", "paddleformers-unfused", "paddlefleet")
GPT2 = {"norm": "layer", "positions": "learned", "mlp": "gelu_tanh", "biases": "all"}
PARTS = {
    "Qwen2": ({"num_kv_heads": 3, "biases": "qkv"}, ALL),
    "Qwen3": ({"num_kv_heads": 2, "head_size": 6, "qk_norm": True, "tied_embedding": True}, ALL),
    "Llama with all biases": ({"num_kv_heads": 2, "biases": "all"}, (*ALL[:2], "paddleformers-unfused")),
    "GPT-2": (GPT2 | {"tied_embedding": True}, ALL[:2]),
    "GPT-2 with a head, exact": (GPT2 | {"mlp": "gelu"}, ALL[:2]),
    "StarCoder2": ({"norm": "layer", "mlp": "gelu_tanh", "biases": "all", "num_kv_heads": 3}, ALL[:2]),
    "StableLM": ({"norm": "layer", "biases": "qkv", "num_kv_heads": 3}, ALL[:2]),
    "GPT-3 with grouped queries": (GPT2 | {"num_kv_heads": 2, "head_size": 6}, ALL[1:2]),
    "LayerNorm everywhere": ({"norm": "layer", "qk_norm": True, "mlp": "gelu", "num_kv_heads": 3}, ALL[1:2]),
}
"""Models with other parts than a Llama's, and the conventions that have names for them."""

PARTS_AND_MORE = PARTS | {
    "Qwen3 with experts": ({"num_kv_heads": 2, "qk_norm": True, "moe": MOE | {"dense_layers": 1}}, ALL),
    "GLM-4 with experts": (
        {"num_kv_heads": 3, "qk_norm": True, "biases": "qkv", "moe": MOE | SIGMOID, "mtp": {"num_modules": 1}},
        ALL,
    ),
    "LayerNorm, latent, a module": (
        {"norm": "layer", "mla": MLA | {"q_rank": 9}, "mlp": "gelu", "mtp": {"num_modules": 1}},
        ALL[1:2],
    ),
}
PHI3, ERNIE = "huggingface-phi3", "huggingface-ernie4_5"
ONE_CLASS = {
    "Phi-3": (MODELS["dense with grouped queries"], ("huggingface", "megatron", "paddleformers", PHI3)),
    "Phi-3 without grouped queries": ({"head_size": 6}, ("huggingface", "megatron", PHI3)),
    "ERNIE 4.5": (MODELS["dense, a head of another size"] | {"tied_embedding": True}, ("huggingface", PHI3, ERNIE)),
    "ERNIE 4.5 with experts": (
        {"num_kv_heads": 3, "moe": MOE | SIGMOID | {"score": "softmax", "dense_layers": 1, "num_shared_experts": 2}},
        (ERNIE,),
    ),
}
"""Models that are computed by a class with a convention of its own."""

PARTS_AND_MORE |= ONE_CLASS
NAMED = [(kind, model, convention) for kind, model in MODELS.items() for convention in ("pipeproof", *ALL)]
NAMED += [
    (kind, model, convention) for kind, (model, found) in PARTS_AND_MORE.items() for convention in ("pipeproof", *found)
]
"""Every model with every convention that has names for it."""

DEEPSEEK_V4 = {
    "head_size": 4,
    "ffn_size": 6,
    "num_layers": 4,
    "compressed_attention": {
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "q_lora_rank": 5, "qk_rope_head_dim": 2, "sliding_window": 3, "o_groups": 2, "o_lora_rank": 3,
        "index_n_heads": 5, "index_head_dim": 6, "index_topk": 2,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 3},
    },
    "moe": {
        "num_experts": 12, "top_k": 3, "ffn_size": 6, "num_shared_experts": 1, "score": "sqrtsoftplus",
        "routed_scale": 1.5, "hash_layers": 2, "expert_bias_rate": 0.01,
    },
    "swiglu_limit": 7.0,
    "swiglu_formula": "silu",
    "hyper_connections": {
        "streams": 2, "sinkhorn_iterations": 3, "sinkhorn": "softmax", "epsilon": 1e-6, "transposed": True,
        "contraction": "learned",
    },
}  # fmt: skip


def plan_of(**model):
    """A plan with such a model, in float64."""
    sizes = {"num_layers": 2, "hidden_size": 24, "num_heads": 6, "ffn_size": 20, "vocab_size": 31, "seq_length": 7}
    return plan_from_dict(
        plan_dict(
            model=sizes | model,
            topology={"pp": 1},
            schedule={"kind": "1f1b", "num_micro_batches": 2, "micro_batch_size": 2},
            run={"dtype": "float64", "backend": "paddle"},
        )
    ).spec
