"""Eager 1F1B: 1F1B with a warm-up twice as long, which hides transfers behind computation.

Zhuang et al., "On Optimizing the Communication of Model Parallelism", arXiv:2211.05322, section 4. Each rank runs one
more forward for every rank behind it. A micro-batch may then take one whole round (a forward and a backward) for each
hop and back: with ``2c <= tf + tb`` no rank waits for a transfer of ``c`` in the steady phase, at the price of up to
``p - 1`` more activations. Paddle's static pass ``Eager1F1B`` takes the same order where ``m >= 2p - 1``.
"""

from __future__ import annotations

from pipeproof.schedule.generators.round_robin import in_groups
from pipeproof.schedule.programs import Schedule


def eager_1f1b(num_ranks: int, num_micro_batches: int) -> Schedule:
    """One program per pipeline rank ``r``, with ``min(m, 2 (p - 1 - r))`` warm-up forwards.

    At most ``min(m, 2 (p - 1 - r) + 1)`` micro-batches are in flight on rank ``r``.
    """
    return in_groups(num_ranks, 1, [num_micro_batches])
