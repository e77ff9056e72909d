"""Everything that a GPT's plan may have beyond the plain one, each part by itself, for tests that mix them."""

import copy

from pipeproof.schedule.kinds import SCHEDULE_KINDS
from tests.plans import plan_dict

_MOE = {"num_experts": 12, "top_k": 3, "ffn_size": 8, "num_shared_experts": 1, "dense_layers": 1}
_MLA = {"q_rank": 12, "kv_rank": 8, "nope_head_size": 6, "rope_head_size": 4, "value_head_size": 8}
_COMPRESSED = {
    "layer_types": ["compressed_sparse_attention", "sliding_attention", "heavily_compressed_attention"],
    "q_lora_rank": 6, "qk_rope_head_dim": 2, "sliding_window": 3, "o_groups": 2, "o_lora_rank": 5,
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 3},
    "index_n_heads": 3, "index_head_dim": 4, "index_topk": 2,
}  # fmt: skip
"""In sequences of eight tokens, the last two are in no window of three."""
QWEN3 = {"qk_norm": True, "num_kv_heads": 2, "head_size": 6}
"""The parts of a Qwen3: each query and key is normed, and heads are larger than the hidden size."""
GPT3 = {"norm": "layer", "positions": "learned", "mlp": "gelu", "biases": "all", "tied_embedding": True}
"""The parts of a GPT-3."""
_WORDS = [
    {"name": "tokens", "dims": "bs", "dtype": "int64"},
    {"name": "labels", "dims": "sb", "dtype": "int32"},
    {"name": "mask", "dims": "bs", "dtype": "bool"},
]

FEATURES = {
    "norms of heads": {"model": {"qk_norm": True}},
    "LayerNorm": {"model": {"norm": "layer"}},
    "learned positions": {"model": {"positions": "learned"}},
    "GELU": {"model": {"mlp": "gelu"}},
    "GELU with tanh": {"model": {"mlp": "gelu_tanh"}},
    "biases of queries, keys and values": {"model": {"biases": "qkv"}},
    "biases": {"model": {"biases": "all"}},
    "grouped queries": {"model": {"num_kv_heads": 2}},
    "head size": {"model": {"head_size": 6}},
    "latent attention": {"model": {"mla": _MLA}},
    "compressed attention": {"model": {"compressed_attention": _COMPRESSED}},
    "packed documents": {
        "model": {
            "compressed_attention": {
                **_COMPRESSED,
                "documents": [4, 1, 3],
                "qk_rope_head_dim": 4,
                "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 4096, "beta_slow": 4.0},
            }
        }
    },
    "experts": {"model": {"moe": _MOE}},
    "losses of routers": {"model": {"moe": {**_MOE, "score": "sigmoid", "aux_loss": 0.1, "z_loss": 0.01}}},
    "router in float64": {
        "model": {"moe": {**_MOE, "aux_loss": 0.1, "expert_bias_rate": 0.003, "router_dtype": "float64"}}
    },
    "biases of experts": {"model": {"moe": {**_MOE, "expert_bias_rate": 0.003}}},
    "experts by all-gather": {"model": {"moe": {**_MOE, "dispatcher": "all_gather"}}},
    "experts by token id": {
        "model": {
            "moe": {
                **_MOE,
                "score": "sqrtsoftplus",
                "hash_layers": 1,
                "routed_scale": 1.5,
                "expert_bias_rate": 0.003,
                "combine": "expert",
            },
            "swiglu_limit": 0.05,
            "swiglu_formula": "silu",
        },
    },
    "hyper-connections": {"model": {"hyper_connections": {"streams": 2}}},
    "hyper-connections of DeepSeek-V4": {
        "model": {
            "hyper_connections": {
                "streams": 2,
                "sinkhorn_iterations": 3,
                "sinkhorn": "softmax",
                "epsilon": 1e-6,
                "transposed": True,
                "contraction": "learned",
            }
        }
    },
    "MTP": {"model": {"mtp": {"num_modules": 2}}},
    "MTP after the norm": {"model": {"mtp": {"num_modules": 2, "reads": "after_norm"}}},
    "MTP, own embeddings": {"model": {"mtp": {"num_modules": 1, "embedding": "own"}}},
    "MTP, magic send": {"model": {"mtp": {"num_modules": 1, "magic_send": True}}},
    "padding of the vocabulary": {"model": {"unpadded_vocab_size": 29}},
    "tied embedding": {"model": {"tied_embedding": True}},
    "dropout": {"model": {"dropout": 0.1}},
    "clamped SwiGLU": {"model": {"swiglu_limit": 0.05}},
    "bsh": {"model": {"activation_order": "bsh"}},
    "empty layers": {"model": {"empty_layers": {"head": 1, "tail": 2}}},
    "norm before the tail": {
        "model": {"empty_layers": {"head": 1, "tail": 3}, "final_norm": "before_tail_empty"},
        "stages": "layer:TransformerLayer|EmptyLayer",
    },
    "clipping": {"run": {"clip_norm": 0.05}},
    "main gradients": {"run": {"main_grad_dtype": "float64"}},
    "SGD": {"run": {"optimizer": "sgd"}},
    "sharded optimizer": {"memory": {"shard_optimizer": "dp"}},
    "sharded gradients": {"memory": {"shard_optimizer": "dp", "shard_gradients": "dp"}},
    "sharded weights": {"memory": {"shard_optimizer": "dp", "shard_gradients": "dp", "shard_weights": "dp"}},
    "sums when ready": {"schedule": {"reduce_gradients": "when_ready"}},
    "gathered again": {"memory": {"sequence_parallel_activations": "regather"}},
    "selective recomputation": {"memory": {"recompute": "selective"}},
    "recomputed MLPs": {"memory": {"recompute": "selective", "recompute_modules": ["core_attn", "mlp"]}},
    "recomputed experts": {"model": {"moe": _MOE}, "memory": {"recompute": "selective", "recompute_modules": ["moe"]}},
    "full recomputation": {"memory": {"recompute": "full"}},
    "words that cross": {"boundaries": [{"name": "hidden", "dims": "sbh"}, *_WORDS]},
    "words in one message": {
        "boundaries": [{"name": "hidden", "dims": "sbh"}, *_WORDS],
        "transport": {"messages": "packed"},
    },
    "partial": {"transport": "partial"},
    "receives early": {"transport": {"recv_order": "prefetch_one"}},
    "slots": {"buffers": {"receive_slots": 4, "send_slots": 4}},
    "outputs released": {"buffers": {"free_output": "after_send_done"}},
    "a small last micro-batch": {"schedule": {"last_micro_batch_size": 1}},
    "lengths": {"schedule": {"seq_lengths": [8, 4, 8, 4]}},
    "mean of micro-batches": {"loss": {"normalization": "mean_of_micro_batches"}},
}
"""Sections of a plan by the name of the feature."""

TOPOLOGIES = {
    "pp 2": {"pp": 2},
    "tp 2": {"pp": 2, "tp": 2},
    "tp 2, SP": {"pp": 2, "tp": 2, "sequence_parallel": True},
    "dp 2": {"pp": 2, "dp": 2},
    "ep 2": {"pp": 2, "ep": 2},
    "cp 2": {"pp": 2, "cp": 2},
}
"""Two pipeline ranks, and axes that may be added to them."""


def schedule_of(kind):
    """The keys of ``schedule`` for a kind on two ranks."""
    facts = SCHEDULE_KINDS[kind]
    chunks = 2 if kind in {"looped_bfs", "optimal"} else facts.min_chunks
    return {
        "kind": kind,
        **({"num_chunks": chunks} if chunks > 1 else {}),
        **({"num_sequence_splits": 2} if facts.splits_sequences else {}),
    }


def merged(plan, sections):
    """A plan with further keys; mappings are merged key by key."""
    plan = copy.deepcopy(plan)
    for name, value in sections.items():
        both = isinstance(value, dict) and isinstance(plan.get(name), dict)
        plan[name] = merged(plan[name], value) if both else copy.deepcopy(value)
    return plan


def mixed(features, topology="pp 2", kind="1f1b", **sections):
    """The small plan of ``tests.plans`` with all these features, as a dict; ``sections`` have the last word."""
    plan = plan_dict(topology=TOPOLOGIES[topology], schedule=schedule_of(kind))
    for name in features:
        plan = merged(plan, FEATURES[name])
    return merged(plan, sections)
