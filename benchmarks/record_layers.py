"""Cost of `pipeproof.torch.record_layers`: steps of a GPT of 4 layers at hidden size 512, with and without it.

Single steps alternate between recorded and plain ones. Prints the processor time of a step (least of all, and median)
without and with digests, and the difference in percent. A last line has plain steps after the recorder is gone.

    python benchmarks/record_layers.py --steps 20
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import nn
from torch.nn import functional

import pipeproof.torch

LAYERS, HIDDEN, HEADS, VOCAB, MICRO_BATCHES = 4, 512, 8, 4096, 4


class Block(nn.Module):  # type: ignore[misc]  # torch is untyped
    """Attention and MLP of a GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.act, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, hidden size]."""
        parts = self.qkv(self.norm1(x)).reshape(*x.shape[:2], 3, HEADS, -1).transpose(1, 3).unbind(2)
        attended = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(self.act(self.up(self.norm2(x))))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=1024, help="of a sequence; one is a micro-batch")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(VOCAB, HIDDEN), *(Block() for _ in range(LAYERS)), nn.LayerNorm(HIDDEN),
        nn.Linear(HIDDEN, VOCAB, bias=False),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(VOCAB, (1, arguments.tokens))

    def step() -> float:
        start = time.process_time()
        for _ in range(MICRO_BATCHES):
            logits = model(tokens).flatten(0, 1)
            (functional.cross_entropy(logits, tokens.flatten()) / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - start

    times: dict[str, list[float]] = {"plain": [], "recorded": []}
    step()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.steps):
            times["plain"].append(step())
            with pipeproof.torch.record_layers(model, f"{folder}/{number}"):
                times["recorded"].append(step())
    after = [step() for _ in range(arguments.steps // 2)]
    plain, recorded = (min(each) for each in times.values())
    print(f"plain {plain:.3f} s (median {median(times['plain']):.3f}), recorded {recorded:.3f} s "
          f"(median {median(times['recorded']):.3f}): {(recorded / plain - 1) * 100:+.1f} %")  # fmt: skip
    print(f"after it {min(after):.3f} s (median {median(after):.3f})")


if __name__ == "__main__":
    main()
