"""Every schedule kind and split on real GPUs: `Pipeline.compare` with the unpartitioned module, in float32.

torchrun --nproc-per-node 2 benchmarks/gpu/train_check.py
torchrun --nproc-per-node 2 benchmarks/gpu/train_check.py --replay linear  # bits of replayed steps, and of plain ones
torchrun --nproc-per-node 2 benchmarks/gpu/train_check.py --fail    # an error in a module ends both ranks
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from pipeproof.torch import Pipeline, stages_of_rank

KINDS = {
    "gpipe": 1, "1f1b": 1, "eager_1f1b": 1, "interleaved": 2, "looped_bfs": 2, "zb_h1": 1, "zb_h2": 1,
    "interleaved_zb": 2, "zb_v": 2, "v_half": 2, "v_min": 2, "dualpipe": 1, "dualpipe_v": 2, "chimera": 1,
}  # fmt: skip
"""Kinds with the stages of each of two ranks."""


class Block(nn.Module):
    """An MLP block; ``fails`` raises at the third micro-batch."""

    def __init__(self, seed: int, size: int, *, fails: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm, self.up, self.down = nn.LayerNorm(size), nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.fails, self.calls = fails, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block."""
        self.calls += 1
        if self.fails and self.calls > 4:
            raise ValueError("a planted error")
        return x + self.down(F.gelu(self.up(self.norm(x))))


def main() -> None:
    """Compare all kinds, or fail."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, size, num = dist.get_rank(), 512 if on_gpu else 16, 8
    torch.manual_seed(0)
    x, y = torch.randn(2 * num, 64, size, device=device), torch.randn(2 * num, 64, size, device=device)
    if "--fail" in sys.argv:
        modules = {rank: Block(rank, size, fails=rank == 1).to(device)}
        pipe = Pipeline(modules, num_micro_batches=num, loss_fn=F.mse_loss, example=(x[:2],), timeout_s=30)
        start = time.perf_counter()
        try:
            for _ in range(3):
                pipe.step(x, target=y)
                if on_gpu:
                    torch.cuda.synchronize()
        finally:
            print(f"rank {rank} ended after {time.perf_counter() - start:.1f} s", flush=True)
        return
    if "--replay" in sys.argv:
        split = sys.argv[sys.argv.index("--replay") + 1]
        for kind in ("1f1b", "interleaved", "zb_v", "dualpipe_v"):
            check_replay(kind, split, device, x, y)
        dist.destroy_process_group()
        return
    for kind, chunks in KINDS.items():
        num_stages = chunks * dist.get_world_size()
        for split in ("whole", "linear"):
            own = stages_of_rank(kind, dist.get_world_size(), num_stages, rank)
            modules = {number: Block(number, size).to(device) for number in own}
            with Pipeline(
                modules, schedule=kind, num_micro_batches=num, loss_fn=F.mse_loss, example=(x[:2],), split=split
            ) as pipe:
                pipe.step(x, target=y)
                reference = nn.Sequential(*(Block(99, size) for _ in range(num_stages))).to(device)
                found = pipe.compare(reference, x, target=y)
            if rank == 0:
                print(json.dumps({"schedule": kind, "split": split, "exact": found.is_exact, "what": str(found)[:200]}),
                      flush=True)  # fmt: skip
    dist.destroy_process_group()


def check_replay(kind: str, split: str, device: torch.device, x: torch.Tensor, y: torch.Tensor) -> None:
    """Train two copies of a model with dropout, one by replayed steps; print whether losses and weights are equal."""
    rank, num = dist.get_rank(), x.shape[0] // 2
    num_stages, size = KINDS[kind] * dist.get_world_size(), x.shape[-1]
    losses: dict[bool, list[torch.Tensor | None]] = {}
    weights: dict[bool, list[torch.Tensor]] = {}
    for replay in (False, True):
        modules = {}
        for number in stages_of_rank(kind, dist.get_world_size(), num_stages, rank):
            modules[number] = nn.Sequential(Block(number, size), nn.Dropout(0.1)).to(device)
        optimizer = torch.optim.AdamW([w for module in modules.values() for w in module.parameters()], 1e-3)
        with Pipeline(
            modules, schedule=kind, num_micro_batches=num, loss_fn=F.mse_loss, example=(x[:2],), split=split,
            replay=replay,
        ) as pipe:  # fmt: skip
            torch.manual_seed(7)
            losses[replay] = []
            start = time.perf_counter()
            for number in range(6):
                losses[replay].append(pipe.step(x + number, target=y))
                optimizer.step()
                optimizer.zero_grad()
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            weights[replay] = [w.detach().clone() for module in modules.values() for w in module.parameters()]
    for plain, replayed in zip(losses[False], losses[True], strict=True):
        assert plain is None or replayed is None or torch.isfinite(plain)
    same_losses = all(a is None or torch.equal(a, b) for a, b in zip(losses[False], losses[True], strict=True))
    same_weights = all(map(torch.equal, weights[False], weights[True]))
    found = {"schedule": kind, "split": split, "rank": rank, "same losses": same_losses, "same weights": same_weights}
    print(json.dumps({**found, "seconds": round(seconds, 2)}), flush=True)


if __name__ == "__main__":
    main()
