"""Cost of `record_layers`: steps of a GPT of 4 layers at hidden size 512 with and without it, on either framework.

Single steps alternate between plain and recorded ones. Prints the processor time and the wall time of a step (least of
all, and median) without and with digests, and the difference in percent. A last line has plain steps after the recorder
is gone.

    python benchmarks/record_layers.py --steps 20
    python benchmarks/record_layers.py --backend paddle
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

LAYERS, HIDDEN, HEADS, VOCAB, MICRO_BATCHES = 4, 512, 8, 4096, 4
Recorded = Callable[[str], Any]


def block_class(nn: Any, base: Any, attention: Callable[..., Any]) -> Any:
    """The class of a block of a GPT, [batch, sequence, hidden size], in a framework's layers."""

    class Block(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
            self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
            self.up, self.act, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN)

        def forward(self, x: Any) -> Any:
            x = x + self.out(attention(self.qkv(self.norm1(x)).reshape([*x.shape[:2], 3, HEADS, -1])).reshape(x.shape))
            return x + self.down(self.act(self.up(self.norm2(x))))

    return Block


def torch_step(num_tokens: int) -> tuple[Callable[[], None], Recorded]:
    """A step on PyTorch, and its recorder."""
    import torch
    from torch import nn
    from torch.nn import functional

    from pipeproof.torch import record_layers

    def attention(heads: Any) -> Any:
        parts = heads.transpose(1, 3).unbind(2)
        return functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2)

    torch.manual_seed(0)
    block = block_class(nn, nn.Module, attention)
    ends = nn.Embedding(VOCAB, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
    model = nn.Sequential(ends[0], *(block() for _ in range(LAYERS)), *ends[1:])
    optimizer, tokens = torch.optim.AdamW(model.parameters()), torch.randint(VOCAB, (1, num_tokens))

    def step() -> None:
        for _ in range(MICRO_BATCHES):
            loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            (loss / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda folder: record_layers(model, folder)


def paddle_step(num_tokens: int) -> tuple[Callable[[], None], Recorded]:
    """The same on Paddle."""
    import paddle
    from paddle import nn
    from paddle.nn import functional

    from pipeproof.paddle import record_layers

    def attention(heads: Any) -> Any:
        return functional.scaled_dot_product_attention(*heads.unbind(2), is_causal=True)

    paddle.seed(0)
    block = block_class(nn, nn.Layer, attention)
    ends = nn.Embedding(VOCAB, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias_attr=False)
    model = nn.Sequential(ends[0], *(block() for _ in range(LAYERS)), *ends[1:])
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
    tokens = paddle.randint(0, VOCAB, [1, num_tokens])

    def step() -> None:
        for _ in range(MICRO_BATCHES):
            loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            (loss / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.clear_grad()

    return step, lambda folder: record_layers(model, folder)


def timed(step: Callable[[], None]) -> tuple[float, float]:
    """Seconds of processor time and of wall time."""
    start = time.process_time(), time.perf_counter()
    step()
    return time.process_time() - start[0], time.perf_counter() - start[1]


def text(plain: Sequence[float], recorded: Sequence[float], what: str) -> str:
    """One line of a kind of time."""
    sides = [f"{name} {min(times):.3f} s (median {median(times):.3f})"
             for name, times in (("plain", plain), ("recorded", recorded))]  # fmt: skip
    least, middle = (each(recorded) / each(plain) - 1 for each in (min, median))
    return f"{what}: {', '.join(sides)}: {least * 100:+.1f} % (median {middle * 100:+.1f} %)"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=1024, help="of a sequence; one is a micro-batch")
    parser.add_argument("--backend", choices=("torch", "paddle"), default="torch")
    arguments = parser.parse_args()
    step, record = (torch_step if arguments.backend == "torch" else paddle_step)(arguments.tokens)
    plain, recorded = [], []
    step()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.steps):
            plain.append(timed(step))
            with record(f"{folder}/{number}"):
                recorded.append(timed(step))
    after = [timed(step) for _ in range(arguments.steps // 2)]
    for what, *sides in zip(("processor", "wall"), zip(*plain, strict=True), zip(*recorded, strict=True), strict=True):
        print(text(*sides, what))
    print(f"after it: processor {min(after)[0]:.3f} s (median {median(each[0] for each in after):.3f})")


if __name__ == "__main__":
    main()
