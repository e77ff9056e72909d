"""Compares Megatron-Core's losses with pipeproof's, for weights that ``reshard --names megatron`` wrote.

Needs PyTorch and megatron-core (0.16.1 is the newest for Python 3.11). Prints a
line for each model; status 1 if a loss differs too much. GPTModel is built on a
CPU, one rank over gloo, with Megatron-Core's local layers, and loads every
tensor strictly.

The convention has the names of Transformer Engine's layers, which run only on GPUs. ``_LOCAL`` renames the tensors that
those layers fuse: norms that are part of the following matrix, and the experts of a grouped product. Patches:

- ``torch.cuda.current_device``, because position tables are placed on a GPU;
- the GPU's random state, from which a dropout of zero draws nothing;
- two places that assume that Transformer Engine is installed.

The causal mask is passed explicitly, because Megatron-Core's default mask is
made on a GPU. For latent attention, PyTorch computes the step between the
projections, which has no weights: Megatron-Core has it only in Transformer
Engine.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import megatron.core
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import MLATransformerConfig, TransformerConfig, multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from safetensors.torch import load_file
from torch.nn.functional import scaled_dot_product_attention, silu
from tried_models import MLA, MOE, SIGMOID, Array, Line, Trained, compare, each

from pipeproof.specs.model import ModelSpec

MODELS: Mapping[str, Mapping[str, Any]] = {
    "dense": {},
    "dense with grouped queries": {"num_kv_heads": 3},
    "dense, a head of another size": {"head_size": 12, "num_kv_heads": 2},
    "tied": {"tied_embedding": True},
    "padded vocabulary": {"vocab_size": 64, "unpadded_vocab_size": 61},
    "experts as Mixtral": {"num_kv_heads": 2, "moe": MOE},
    "experts, not normalized": {"moe": MOE | {"normalize": False, "num_shared_experts": 2, "dense_layers": 1}},
    "experts with biases, a module": {
        "num_kv_heads": 3, "moe": MOE | SIGMOID | {"dense_layers": 1, "num_shared_experts": 1},
        "mtp": {"num_modules": 1},
    },
    "latent, dense": {"mla": MLA},
    "latent, experts": {"mla": MLA, "moe": MOE | {"num_shared_experts": 1, "normalize": False}},
    "latent, experts with biases": {
        "mla": MLA | {"q_rank": 9}, "moe": MOE | SIGMOID | {"dense_layers": 1, "num_shared_experts": 1},
    },
    "latent with a module": {"mla": MLA | {"q_rank": 9}, "mtp": {"num_modules": 1}},
}  # fmt: skip
_LOCAL = (
    (r"self_attention\.linear_qkv\.layer_norm_weight", "input_layernorm.weight"),
    (r"mlp\.linear_fc1\.layer_norm_weight", "pre_mlp_layernorm.weight"),
    (r"linear_(q|kv)_up_proj\.layer_norm_weight", r"\1_layernorm.weight"),
    (r"mlp\.experts\.linear_fc(\d)\.weight(\d+)", r"mlp.experts.local_experts.\2.linear_fc\1.weight"),
)
"""Names of Transformer Engine's layers, and the names in Megatron-Core's local layers."""


@patch("torch.cuda.current_device", lambda: torch.device("cpu"))
@patch.object(CudaRNGStatesTracker, "fork", lambda *_: nullcontext())
@patch.object(multi_latent_attention, "HAVE_TE", new=False)
@patch.object(moe_utils, "te_general_gemm", None, create=True)
def main() -> int:
    """Compare all models."""
    print(f"PyTorch {torch.__version__}, Megatron-Core {megatron.core.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        store = torch.distributed.FileStore(f"{folder}/store", 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        status = compare("Megatron-Core", each(MODELS, "torch", _tried))
        torch.distributed.destroy_process_group()
    return status


def _tried(name: str, trained: Trained) -> Iterator[Line]:
    network = _network(trained.model)
    named = load_file(trained.named("megatron"))
    network.load_state_dict(_renamed(named) | _extra_state(network), strict=True)

    def losses(tokens: Array, labels: Array) -> Array:
        length = tokens.shape[1]
        positions = torch.arange(length).expand(len(tokens), -1)
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        with torch.no_grad():
            token_losses: torch.Tensor = network(
                torch.from_numpy(tokens), positions, hidden, labels=torch.from_numpy(labels).clamp(min=0)
            )
        return token_losses.numpy()

    yield Line(name, f"{len(named)} tensors", trained.loss, trained.loss_by(losses))


def _renamed(named: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the tensors under the names of Megatron-Core's local layers."""
    renamed = {}
    for name, tensor in named.items():
        for fused, local in _LOCAL:
            name = re.sub(fused, local, name)
        renamed[name] = tensor
    return renamed


def _extra_state(network: GPTModel) -> dict[str, Any]:
    """Return the entries for Transformer Engine's extra state: names with empty values."""
    return {name: value for name, value in network.state_dict().items() if name.endswith("._extra_state")}


def _network(model: ModelSpec) -> GPTModel:
    """Build the plan's model from Megatron-Core's local layers."""
    config = (TransformerConfig if model.mla is None else MLATransformerConfig)(**_settings(model))
    layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    modules = None
    if model.mla is not None:
        for layer in layers.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = _Attention
    if model.mtp is not None:
        modules = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False)
    return GPTModel(
        config,
        layers,
        vocab_size=model.vocab_size,
        max_sequence_length=model.seq_length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=model.tied_embedding,
        parallel_output=False,
        mtp_block_spec=modules,
    ).eval()


class _Attention(torch.nn.Module):
    """Causal attention whose values and keys may differ in size: [S, B, A, D] to [S, B, A * D of values]."""

    def __init__(self, softmax_scale: float, **_others: object) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: torch.Tensor, **_others: object
    ) -> torch.Tensor:
        """Ignore the mask argument, which is always the causal one."""
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return mixed.permute(2, 0, 1, 3).flatten(2)


def _settings(model: ModelSpec) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "num_query_groups": model.kv_heads,
        "kv_channels": model.size_of_head,
        "ffn_hidden_size": model.ffn_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "gated_linear_unit": True,
        "activation_func": silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "apply_rope_fusion": False,
    }
    if model.mtp is not None:
        settings["mtp_num_layers"] = model.mtp.num_modules
    if model.mla is not None:
        settings |= {
            "multi_latent_attention": True,
            "qk_layernorm": True,
            "rope_type": "rope",
            "rotary_scaling_factor": 1.0,
            "q_lora_rank": model.mla.q_rank,
            "kv_lora_rank": model.mla.kv_rank,
            "qk_head_dim": model.mla.nope_head_size,
            "qk_pos_emb_head_dim": model.mla.rope_head_size,
            "v_head_dim": model.mla.value_head_size,
        }
    moe = model.moe
    if moe is not None:
        settings |= {
            "num_moe_experts": moe.num_experts,
            "moe_ffn_hidden_size": moe.ffn_size,
            "moe_layer_freq": [int(number >= moe.dense_layers) for number in range(model.num_layers)],
            "moe_router_topk": moe.top_k,
            "moe_router_score_function": moe.score,
            "moe_router_pre_softmax": not moe.normalize,
            "moe_router_enable_expert_bias": moe.expert_bias_rate is not None,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
        }
        if moe.num_shared_experts:
            settings["moe_shared_expert_intermediate_size"] = moe.num_shared_experts * moe.ffn_size
    return settings


if __name__ == "__main__":
    sys.exit(main())
