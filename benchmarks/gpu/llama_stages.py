"""Stages of a Llama or Qwen3-MoE of Hugging Face, random weights, each on one rank, by FSDP2, or cut by DTensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from sizes import Size
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from pipeproof.torch import stages_of_rank, stages_of_transformers

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")
"""Linear modules of a block that DTensor cuts by columns and by rows."""


def llama(size: Size, device: torch.device, seed: int = 0) -> PreTrainedModel:
    """The whole model on a device, equal on all ranks, with ``size.num_layers`` blocks for each rank of the world."""
    config = LlamaConfig(
        hidden_size=size.hidden, intermediate_size=size.hidden * 8 // 3 // 64 * 64, vocab_size=size.vocab_size,
        num_hidden_layers=size.num_layers * dist.get_world_size(), num_attention_heads=size.num_heads,
        max_position_embeddings=size.seq_length,
    )  # fmt: skip
    return _made(LlamaForCausalLM, config, size, device, seed)


def qwen3_moe(size: Size, device: torch.device, seed: int = 0) -> PreTrainedModel:
    """A model like ``llama``'s, with 128 experts, 8 for each token: blocks of Qwen3-30B-A3B at hidden 2048."""
    config = Qwen3MoeConfig(
        hidden_size=size.hidden, moe_intermediate_size=size.hidden * 3 // 8, num_experts=128, num_experts_per_tok=8,
        num_hidden_layers=size.num_layers * dist.get_world_size(), num_attention_heads=2 * size.num_heads,
        num_key_value_heads=max(1, size.num_heads // 4), head_dim=128, vocab_size=size.vocab_size,
        max_position_embeddings=size.seq_length, tie_word_embeddings=False, router_aux_loss_coef=0.0,
    )  # fmt: skip
    return _made(Qwen3MoeForCausalLM, config, size, device, seed)


def _made(model: type[PreTrainedModel], config: object, size: Size, device: torch.device, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    torch.set_default_dtype(size.dtype)
    with device:
        whole = model(config)
    torch.set_default_dtype(torch.float32)
    return whole


@dataclass(frozen=True)
class Layout:
    """Pipeline ranks times the ranks that hold one stage together: ``inside`` is ``pp`` (one), ``fsdp`` or ``tp``.

    ``reshards`` is ``reshard_after_forward`` of FSDP2.
    """

    inside: str
    mesh: DeviceMesh
    reshards: bool | None = None

    @classmethod
    def of(cls, inside: str, num_inside: int, device: torch.device, *, reshards: bool | None = None) -> Layout:
        """A layout of the whole world; neighbours hold a stage together."""
        shape = dist.get_world_size() // num_inside, num_inside
        return cls(inside, init_device_mesh(device.type, shape, mesh_dim_names=("pp", "inside")), reshards)

    @property
    def num_pp(self) -> int:
        """Pipeline ranks."""
        return self.mesh["pp"].size()

    @property
    def replica(self) -> int:
        """Number of this rank's data: ranks with ``fsdp`` have batches of their own."""
        return self.mesh.get_local_rank("inside") if self.inside == "fsdp" else 0

    @property
    def shard(self) -> int:
        """Number of this rank's part of a stage."""
        return self.mesh.get_local_rank("inside")

    def numbers(self, kind: str, num_stages: int) -> list[int]:
        """The stages of this rank."""
        return list(stages_of_rank(kind, self.num_pp, num_stages, self.mesh.get_local_rank("pp")))

    def stages(
        self, model: PreTrainedModel, kind: str, num_stages: int, blocks: Sequence[int] | None = None
    ) -> dict[int, nn.Module]:
        """This rank's stages of a model, sharded or cut; ``blocks`` of each stage."""
        cut = stages_of_transformers(model, num_stages, blocks_per_stage=blocks)
        own = {number: cut[number] for number in self.numbers(kind, num_stages)}
        for stage in own.values():
            if self.inside == "fsdp":
                for part in (*stage.blocks.values(), stage):
                    fully_shard(part, mesh=self.mesh["inside"], reshard_after_forward=self.reshards)
            elif self.inside == "tp":
                plan = {**dict.fromkeys(COLUMNS, ColwiseParallel()), **dict.fromkeys(ROWS, RowwiseParallel())}
                for block in stage.blocks.values():
                    parallelize_module(block, self.mesh["inside"], plan)
        return own


def weights_of(stages: Mapping[int, nn.Module]) -> dict[str, nn.Parameter]:
    """Weights by their names in the whole model."""
    return {
        name.replace("_orig_mod.", ""): weight for stage in stages.values() for name, weight in stage.named_parameters()
    }


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def joined(own: Iterable[tuple[str, object]]) -> dict[str, object]:
    """Values of all ranks by name; for a name of several ranks, the value of the first."""
    everyone: list[dict[str, object]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(own))
    return {name: value for of_rank in reversed(everyone) for name, value in of_rank.items()}
