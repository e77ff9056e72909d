"""Compares transformers' losses with pipeproof's, for weights that ``reshard --names huggingface`` wrote.

Needs PyTorch and transformers. Prints a line for each model; status 1 if a loss differs too much. ``from_pretrained``
reads the directory that pipeproof writes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from tried_models import MLA, MOE, SIGMOID, Array, Line, Trained, compare, cross_entropy, each

MODELS: Mapping[str, Mapping[str, Any]] = {
    "dense with grouped queries": {"num_kv_heads": 3},
    "dense, a head of another size": {"head_size": 12, "num_kv_heads": 2},
    "tied": {"tied_embedding": True},
    "biases of queries, keys, values": {"num_kv_heads": 3, "biases": "qkv"},
    "all biases": {"biases": "all"},
    "norms of queries and keys": {"num_kv_heads": 3, "qk_norm": True, "tied_embedding": True},
    "GPT-3": {"norm": "layer", "positions": "learned", "mlp": "gelu_tanh", "biases": "all", "tied_embedding": True},
    "GPT-3, rotary, exact": {"norm": "layer", "mlp": "gelu", "biases": "all"},
    "experts as Mixtral": {"num_kv_heads": 2, "moe": MOE},
    "experts with biases, a module": {
        "num_kv_heads": 3, "moe": MOE | SIGMOID | {"dense_layers": 1, "num_shared_experts": 1},
        "mtp": {"num_modules": 1},
    },
    "latent, dense": {"mla": MLA},
    "latent, experts": {"mla": MLA, "moe": MOE | {"num_shared_experts": 1, "normalize": False}},
    "latent, experts with biases": {
        "mla": MLA | {"q_rank": 9}, "moe": MOE | SIGMOID | {"dense_layers": 1, "num_shared_experts": 1},
    },
}  # fmt: skip


def main() -> int:
    """Compare all models."""
    print(f"PyTorch {torch.__version__}, transformers {transformers.__version__}")
    return compare("transformers", each(MODELS, "torch", _tried))


def _tried(name: str, trained: Trained) -> Iterator[Line]:
    made = trained.named("huggingface", directory=True)
    network = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32, attn_implementation="eager").eval()

    def losses(tokens: Array, labels: Array) -> Array:
        with torch.no_grad():
            logits = network(torch.from_numpy(tokens), use_cache=False).logits
        return cross_entropy(logits.numpy(), labels)

    yield Line(name, type(network).__name__, trained.loss, trained.loss_by(losses))


if __name__ == "__main__":
    sys.exit(main())
