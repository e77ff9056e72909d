"""Features of models, as sections of small plans, and the kept results of a run of each, for comparing frameworks.

No framework is imported here: Paddle's files are read in environments without Paddle.
"""

import hashlib
from pathlib import Path

import numpy as np

from tests.features import FEATURES as OTHER_FEATURES
from tests.features import GPT3, QWEN3
from tests.plans import plan_spec

MOE = {"num_experts": 6, "top_k": 2, "ffn_size": 8, "num_shared_experts": 1, "dense_layers": 1}
EVEN = {"aux_loss": 0.5, "z_loss": 0.1, "expert_bias_rate": 0.02}
BY_TOKEN = {
    "moe": {**MOE, **EVEN, "dense_layers": 0, "score": "sqrtsoftplus", "hash_layers": 1, "routed_scale": 1.5,
            "combine": "expert", "router_dtype": "float32"},
    "swiglu_limit": 0.05, "swiglu_formula": "silu",
}  # fmt: skip
STREAMS_V4 = {
    "streams": 3,
    "sinkhorn_iterations": 3,
    "sinkhorn": "softmax",
    "epsilon": 1e-6,
    "transposed": True,
    "contraction": "learned",
}
MLA = {"kv_rank": 6, "nope_head_size": 4, "rope_head_size": 4, "value_head_size": 3}
TWO_AHEAD = {"mtp": {"num_modules": 2, "loss_weight": 0.4}}
COMPRESSED = {**OTHER_FEATURES["compressed attention"]["model"], "num_layers": 3}
"""Each type of attention in one block."""

TWO = {"schedule": {"num_micro_batches": 2}}

FEATURES = {
    "plain": {},
    "rows first": {"model": {"activation_order": "bsh"}},
    "groups": {"model": {"num_kv_heads": 2, "head_size": 6}},
    "tied": {"model": {"tied_embedding": True}},
    "latent": {"model": {"mla": MLA}},
    "latent queries": {"model": {"mla": {**MLA, "q_rank": 5}, "activation_order": "bsh"}},
    "compressed": {"model": COMPRESSED},
    "compressed, experts, rows first": {"model": {**COMPRESSED, "moe": MOE, "activation_order": "bsh"}},
    "experts": {"model": {"moe": MOE}},
    "even experts": {"model": {"moe": {**MOE, **EVEN}}},
    "even experts by sigmoids": {"model": {"moe": {**MOE, **EVEN, "score": "sigmoid", "num_shared_experts": 0}}},
    "experts by token id": {"model": BY_TOKEN},
    "experts by token id, ahead": {"model": {**BY_TOKEN, **TWO_AHEAD, "activation_order": "bsh"}},
    "ranks of experts by token id": {"topology": {"ep": 2}, **TWO, "model": BY_TOKEN},
    "clamped": {"model": {"swiglu_limit": 0.05, "moe": MOE}},
    "dropout": {"model": {"dropout": {"embedding": 0.1, "attention": 0.2, "hidden": 0.3}, "num_kv_heads": 2}},
    "dropout, latent, rows first": {"model": {"dropout": 0.2, "mla": MLA, "activation_order": "bsh"}},
    "ahead": {"model": TWO_AHEAD},
    "ahead, dropout, rows first": {"model": {**TWO_AHEAD, "dropout": 0.1, "activation_order": "bsh"}},
    "ahead, embedded again": {"model": {"mtp": {"num_modules": 1, "loss_weight": 0.4, "magic_send": True}}},
    "ahead, embedded again, tied": {
        "model": {"mtp": {"num_modules": 2, "loss_weight": 0.4, "magic_send": True}, "tied_embedding": True}
    },
    "ahead, behind the norm": {"model": {"mtp": {**TWO_AHEAD["mtp"], "reads": "after_norm"}}},
    "ahead, behind the norm, own embeddings": {
        "model": {
            "mtp": {**TWO_AHEAD["mtp"], "reads": "after_norm", "embedding": "own"}, "tied_embedding": True,
            "activation_order": "bsh", "hyper_connections": {"streams": 2},
        }
    },
    "ahead, even experts": {"model": {**TWO_AHEAD, "moe": {**MOE, **EVEN}}},
    "streams": {"model": {"hyper_connections": {"streams": 3, "sinkhorn_iterations": 4}}},
    "streams of DeepSeek-V4": {"model": {"hyper_connections": STREAMS_V4}},
    "streams of DeepSeek-V4, ahead, rows first": {
        "model": {
            "hyper_connections": STREAMS_V4, "mtp": {"num_modules": 1, "loss_weight": 0.4, "magic_send": True},
            "activation_order": "bsh",
        }
    },
    "streams, ahead": {
        "model": {
            "hyper_connections": {"streams": 2}, "mtp": {"num_modules": 1, "loss_weight": 0.4, "magic_send": True},
            **BY_TOKEN,
        }
    },
    "streams, experts, dropout": {
        "model": {"hyper_connections": {"streams": 2}, "moe": {**MOE, **EVEN}, "dropout": 0.1}
    },
    "Qwen3": {"model": QWEN3},
    "GPT-3": {"model": {**GPT3, "dropout": 0.1, "activation_order": "bsh"}},
    "LayerNorm of heads": {"model": {**QWEN3, "norm": "layer", "biases": "all", "mlp": "gelu_tanh"}},
    "LayerNorm, ahead": {"model": {**TWO_AHEAD, "norm": "layer", "biases": "qkv"}},
    "empty layers": {"model": {"empty_layers": {"head": 1, "tail": 2}, "final_norm": "before_tail_empty"}},
    "clipped": {"run": {"clip_norm": 0.1}},
    "data ranks": {"topology": {"dp": 2}, **TWO, "model": {"moe": {**MOE, **EVEN}}},
    "ranks of experts": {"topology": {"ep": 2}, **TWO, "model": {"moe": {**MOE, **EVEN}}},
    "ranks of experts, gathered": {
        "topology": {"ep": 2}, **TWO, "model": {"moe": {**MOE, **EVEN, "dispatcher": "all_gather"}},
    },
    "sizes": {"schedule": {"seq_lengths": [8, 4, 6], "last_micro_batch_size": 1}},
    "mean of micro-batches": {"loss": {"normalization": "mean_of_micro_batches"}},
}  # fmt: skip
"""By name, the sections of a plan over the tests' base."""

GOLDENS = Path(__file__).parents[2] / "goldens" / "paddle_gradients"


def make_plan(feature, **sections):
    """The named feature's plan in float64 and two steps of SGD, or as further sections say."""
    given = {name: dict(section) for name, section in FEATURES[feature].items()}
    for name, section in sections.items():
        given[name] = {**given.get(name, {}), **section}
    given["model"] = {"num_layers": 2, **given.get("model", {})}
    given["topology"] = {"pp": 1, **given.get("topology", {})}
    given["schedule"] = {"num_micro_batches": 3, **given.get("schedule", {})}
    run = {"dtype": "float64", "steps": 2, "seed": 3, "optimizer": "sgd", "learning_rate": 0.5}
    given["run"] = {**run, **given.get("run", {})}
    return plan_spec(**given)


def golden_of(feature):
    """The file of a feature."""
    return GOLDENS / f"{feature.replace(',', '').replace(' ', '_')}.npz"


def kept_of(results):
    """Kept results of steps: losses, statistics of routers, and the norm and two projections of each gradient.

    A projection is the dot product with a fixed random vector of length one; projections and norms are [gradients, 3],
    in the order of the gradients' names.
    """
    kept = {}
    for result in results:
        kept[f"{result.step}/loss"] = np.asarray(result.loss, dtype=np.float64)
        kept[f"{result.step}/gradients"] = np.array(
            [_seen(name, gradient) for name, gradient in sorted(result.gradients.items())]
        )
        kept |= {f"{result.step}/{name}": np.asarray(value) for name, value in result.routers.items()}
    return kept


def _seen(name, gradient):
    draws = np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]))
    vectors = draws.standard_normal((2, gradient.size))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    flat = gradient.reshape(-1).astype(np.float64)
    return [np.linalg.norm(flat), *(vectors @ flat)]


def assert_kept(ours, golden, rtol=1e-12):
    """Both have the same entries; gradients agree to ``rtol`` of their norms, all else to ``rtol`` of itself."""
    assert set(ours) == set(golden)
    for name, value in golden.items():
        assert ours[name].shape == value.shape, name
        scale = value[:, :1] if name.endswith("/gradients") else np.abs(value)
        worst = np.max(np.abs(ours[name] - value) / np.maximum(scale, np.finfo(np.float64).tiny), initial=0.0)
        assert worst <= rtol, f"{name}: {worst:.3g} off"
