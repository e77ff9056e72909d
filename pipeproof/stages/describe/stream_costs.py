"""What the residual streams of a block cost, for each token that lies between layers: operations, and what is kept.

As fused kernels do it (arXiv:2512.24880, section 4.3.1): one pass reads the
streams for a sub-layer; one mixes them, and adds what the sub-layer made;
Sinkhorn-Knopp stays on the chip, and is computed again on the way back. Counted
is what ``work`` and ``memory`` count: each operand and each result once.

Shape letters: n streams, H hidden, g = n^2 + 2 n numbers that gate and mix them, t iterations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeproof.stages.describe.streams import BlockStreams

Cost = tuple[int, int]
"""(FLOPs, elements read or written) for each element."""

_NORM, _NORM_BACK, _SIGMOID, _SIGMOID_BACK = 4, 8, 4, 3
_NORMALIZE, _NORMALIZE_BACK = 3, 4
"""FLOPs per element; of Sinkhorn's, for columns or rows: an exponential, two additions; back also a product."""


@dataclass(frozen=True, slots=True)
class StreamProduct:
    """A product of each token with a weight of [inner, columns]."""

    name: str
    inner: int
    columns: int


@dataclass(frozen=True, slots=True)
class StreamPass:
    """What is no product, for ``numel`` elements of a token: forward, for the input's gradient, for the weights'."""

    name: str
    numel: int
    forward: Cost
    backward: Cost
    weight: Cost = (0, 0)


def work_around(of: BlockStreams, hidden: int, at: str) -> tuple[StreamProduct | StreamPass, ...]:
    """What comes before and behind the sub-layer ``at``, in place of a residual's addition."""
    n, gates = of.count, of.num_gates
    turns = 2 * of.iterations
    sinkhorn = turns * _NORMALIZE + 1
    return (
        StreamPass(f"{at}.streams.norm", n * hidden, (_NORM, 2), (_NORM_BACK, 3)),
        StreamProduct(f"{at}.streams.gates", n * hidden, gates),
        StreamPass(f"{at}.streams.scale", gates, (2 + _SIGMOID, 2), (1 + _SIGMOID_BACK, 3), (3, 2)),
        StreamPass(f"{at}.streams.sinkhorn", n * n, (sinkhorn, 2), (sinkhorn + turns * _NORMALIZE_BACK, 3)),
        # Back: of the streams and of the gates, and the sum of what the three readers of the streams say.
        StreamPass(f"{at}.streams.read", hidden, (2 * n, n + 1), (2 * n + 3 * n, 4 * n + 1)),
        StreamPass(f"{at}.streams.mix", hidden, (2 * n * (n + 1), 2 * n + 1), (4 * n * (n + 1), 3 * n + 2)),
    )


def work_at_ends(of: BlockStreams, hidden: int) -> tuple[StreamPass, ...]:
    """Making streams of one activation, in the first block, and one of them, in the last."""
    n = of.count
    opened = StreamPass("streams.open", hidden, (0, n + 1), (n - 1, n + 1))
    closed = StreamPass("streams.close", hidden, (n - 1, n + 1), (0, n + 1))
    return (*([opened] if of.expands else []), *([closed] if of.contracts else []))


@dataclass(frozen=True, slots=True)
class StreamHeld:
    """``numel`` elements of a token, kept to the end of I, or of W, or just between them."""

    name: str
    life: Literal["TO_INPUT", "TO_WEIGHT", "BETWEEN"]
    numel: int
    is_float32: bool = False


def held_around(of: BlockStreams, hidden: int, at: str) -> tuple[StreamHeld, ...]:
    """What is kept for the streams around the sub-layer ``at``; the streams themselves come first."""
    n, gates = of.count, of.num_gates
    return (
        StreamHeld(f"{at}.streams", "TO_INPUT", n * hidden),
        StreamHeld(f"{at}.streams.factor", "TO_INPUT", 1, is_float32=True),
        StreamHeld(f"{at}.streams.gates", "TO_WEIGHT", n * hidden),  # the norm's result
        StreamHeld(f"{at}.streams.gates.grad", "BETWEEN", gates),
        StreamHeld(f"{at}.streams.scale", "TO_WEIGHT", gates),
        StreamHeld(f"{at}.streams.scale.grad", "BETWEEN", gates),
        StreamHeld(f"{at}.streams.sinkhorn", "TO_INPUT", n * n),
        StreamHeld(f"{at}.streams.mix", "TO_INPUT", gates + hidden),  # the gates, and what the sub-layer made
    )
