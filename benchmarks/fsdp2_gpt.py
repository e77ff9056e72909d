"""The rival of ``sharded_states.py``: the GPT of a plan in plain PyTorch, sharded by FSDP2 over all ranks.

    torchrun --nproc-per-node 4 benchmarks/fsdp2_gpt.py PLAN.json RESULT.npz

Each block is a group of ``fully_shard``; with ``memory.shard_weights`` its weights are dropped behind its forward. Two
steps of the plan's micro-batches with AdamW: rank 0 writes the loss and the whole gradients of the first step, and the
most bytes of its process (``VmHWM``) in the second.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from pipeproof import load_plan
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.synthetic import initial_weight, loss_scale, micro_batch


class Weights(nn.Module):
    """The weights of one layer of the plan by their names, as [in, out]."""

    def __init__(self, plan: PlanSpec, layers: tuple[str, ...]) -> None:
        super().__init__()
        self.names = {p.name: p.name.replace(".", "_") for each in describe_gpt(plan) if each.name in layers
                      for p in each.parameters}  # fmt: skip
        for each in describe_gpt(plan):
            for p in each.parameters if each.name in layers else ():
                value = torch.from_numpy(initial_weight(p, plan.run.seed, "float64")).float()
                self.register_parameter(self.names[p.name], nn.Parameter(value))

    def of(self, name: str) -> torch.Tensor:
        """A weight."""
        weight: torch.Tensor = getattr(self, self.names[f"{name}.weight"])
        return weight


class Block(Weights):
    """Attention with rotary positions and a gated MLP, each behind a norm."""

    def __init__(self, plan: PlanSpec, name: str) -> None:
        super().__init__(plan, (name,))
        self.name, self.num_heads = name, plan.gpt.num_heads
        size, length = plan.gpt.size_of_head, plan.gpt.seq_length
        angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, size, 2).double() / size)
        self.cos, self.sin = angles.cos().float(), angles.sin().float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output [B, S, H]."""
        normed = F.rms_norm(x, x.shape[-1:], self.of(f"{self.name}.attn_norm"), 1e-6)
        qkv = (normed @ self.of(f"{self.name}.attn.qkv")).unflatten(-1, (self.num_heads, 3, -1)).permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(self._turned(qkv[0]), self._turned(qkv[1]), qkv[2], is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(2) @ self.of(f"{self.name}.attn.out")
        normed = F.rms_norm(x, x.shape[-1:], self.of(f"{self.name}.mlp_norm"), 1e-6)
        inner = F.silu(normed @ self.of(f"{self.name}.mlp.gate")) * (normed @ self.of(f"{self.name}.mlp.up"))
        return x + inner @ self.of(f"{self.name}.mlp.down")

    def _turned(self, heads: torch.Tensor) -> torch.Tensor:
        a, b = heads.chunk(2, -1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1)


class Gpt(Weights):
    """The whole model; embedding, last norm and head are its own weights."""

    def __init__(self, plan: PlanSpec) -> None:
        super().__init__(plan, ("embed", "norm", "head"))
        self.blocks = nn.ModuleList(Block(plan, f"layer.{n}") for n in range(plan.gpt.num_layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, S, V]."""
        x = F.embedding(tokens, self.of("embed"))
        for block in self.blocks:
            x = block(x)
        return F.rms_norm(x, x.shape[-1:], self.of("norm"), 1e-6) @ self.of("head")


def status(key: str) -> int:
    """Bytes of this process by Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


def main() -> None:
    """Two steps."""
    plan = load_plan(Path(sys.argv[1])).spec
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, num_ranks, num = dist.get_rank(), dist.get_world_size(), plan.schedule.num_micro_batches
    model = Gpt(plan)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=plan.memory.shard_weights == "dp")
    fully_shard(model, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.run.learning_rate, weight_decay=0.01, foreach=False)
    names = {local: name for part in model.modules() if isinstance(part, Weights) for name, local in part.names.items()}
    for step in range(2):
        if step == 1:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        total = torch.zeros(())
        for index in range(rank * num, (rank + 1) * num):
            batch = micro_batch(plan, step, index)
            logits = model(torch.from_numpy(batch.tokens))
            loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.labels).flatten(), reduction="sum")
            loss = loss * loss_scale(plan, step, index)
            (loss * num_ranks).backward()  # FSDP averages
            total += loss.detach()
        dist.all_reduce(total)
        if step == 0:
            whole = {names[n.rpartition(".")[2]]: w.grad.full_tensor() for n, w in model.named_parameters()}
            if rank == 0:
                np.savez(sys.argv[2], loss=float(total), **{name: value.numpy() for name, value in whole.items()})
            del whole
        optimizer.step()
        optimizer.zero_grad()
        del logits, loss
    peak = status("VmHWM")
    if rank == 0:
        Path(sys.argv[2]).with_suffix(".peak").write_text(str(peak))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
