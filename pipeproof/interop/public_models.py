"""Sizes of public models, as their configurations on Hugging Face have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class PublicModel:
    """The keys of ``model`` of a plan, without the sequence length; ``notes`` name what a plan cannot express."""

    keys: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    has_experts: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "has_experts", "moe" in self.keys)


def _llama(num_layers: int, hidden: int, heads: int, ffn: int) -> PublicModel:
    return PublicModel(
        {"num_layers": num_layers, "hidden_size": hidden, "num_heads": heads, "num_kv_heads": 8, "ffn_size": ffn,
         "vocab_size": 128256}
    )  # fmt: skip


def _qwen(num_layers: int, hidden: int, heads: int, ffn: int, expert: int) -> PublicModel:
    return PublicModel(
        {"num_layers": num_layers, "hidden_size": hidden, "num_heads": heads, "num_kv_heads": 4, "head_size": 128,
         "ffn_size": ffn, "vocab_size": 151936, "qk_norm": True,
         "moe": {"num_experts": 128, "top_k": 8, "ffn_size": expert}}
    )  # fmt: skip


def _deepseek(heads: int, vocabulary: int, experts: int, dense: int, **more: Any) -> PublicModel:
    return PublicModel(
        {"num_layers": 61, "hidden_size": 7168, "num_heads": heads, "ffn_size": 18432, "vocab_size": vocabulary,
         "mla": {"q_rank": 1536, "kv_rank": 512, "nope_head_size": 128, "rope_head_size": 64, "value_head_size": 128},
         "moe": {"num_experts": experts, "top_k": 8, "ffn_size": 2048, "num_shared_experts": 1,
                 "dense_layers": dense, "score": "sigmoid"}, **more}
    )  # fmt: skip


MODELS: Mapping[str, PublicModel] = MappingProxyType(
    {
        "llama3_8b": _llama(32, 4096, 32, 14336),
        "llama3_70b": _llama(80, 8192, 64, 28672),
        "llama3.1_405b": _llama(126, 16384, 128, 53248),
        "qwen3_30b_a3b": _qwen(48, 2048, 32, 6144, 768),
        "qwen3_235b_a22b": _qwen(94, 4096, 64, 12288, 1536),
        "deepseekv3": _deepseek(128, 129280, 256, 3, mtp={"num_modules": 1, "magic_send": True}),
        "kimi_k2": _deepseek(64, 163840, 384, 1),
        "gpt oss 120b": PublicModel(
            {
                "num_layers": 36,
                "hidden_size": 2880,
                "num_heads": 64,
                "num_kv_heads": 8,
                "head_size": 64,
                "ffn_size": 2880,
                "vocab_size": 201088,
                "biases": "qkv",
                "moe": {"num_experts": 128, "top_k": 4, "ffn_size": 2880},
            },
            (
                "attention to the last 128 tokens, in every second block, is counted as attention to all",
                "biases of experts and of attention's output are left out",
            ),
        ),
    }
)
"""By the name in lower case."""

NOT_DESCRIBED: Mapping[str, str] = MappingProxyType(
    {
        "nemotron": "blocks with a state space (Mamba) have no key in a plan",
        "deepseekv4": "sparse attention has no key in a plan",
        "qwen3_next": "linear attention has no key in a plan",
    }
)
"""Reasons by the beginning of the name in lower case."""
