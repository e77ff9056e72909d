"""Interleaved 1F1B: each rank holds several stages (chunks) and takes turns between them.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM", arXiv:2104.04473, section 2.2. Stage ``c * p + r``
is chunk ``c`` of rank ``r``. Micro-batches go through a chunk in groups of
``p``, so their number must divide by ``p``.
"""

from __future__ import annotations

from pipeproof.schedule.ops import Op, OpKind
from pipeproof.schedule.programs import Program, Programs


def interleaved(num_ranks: int, num_micro_batches: int, num_chunks: int) -> Programs:
    """One program per pipeline rank ``r``, with ``min(2 (p - 1 - r) + (v - 1) p, m v)`` warm-up forwards.

    Raises:
        ValueError: the micro-batches do not divide by the ranks; the message names the nearest that do.
    """
    if num_micro_batches % num_ranks:
        below = num_micro_batches // num_ranks * num_ranks
        near = f"{below} or {below + num_ranks}" if below else str(num_ranks)
        raise ValueError(
            f"interleaved 1F1B takes {num_ranks} micro-batches at a time through each chunk, and "
            f"{num_micro_batches} does not divide by that; use {near}"
        )
    return tuple(_rank_program(rank, num_ranks, num_micro_batches, num_chunks) for rank in range(num_ranks))


def _rank_program(rank: int, num_ranks: int, num_micro_batches: int, num_chunks: int) -> Program:
    total = num_micro_batches * num_chunks
    num_warmup = min(2 * (num_ranks - 1 - rank) + (num_chunks - 1) * num_ranks, total)

    def op(kind: OpKind, turn: int) -> Op:
        group, within = divmod(turn, num_ranks * num_chunks)
        chunk, place = divmod(within, num_ranks)
        if kind is OpKind.BACKWARD:
            chunk = num_chunks - 1 - chunk
        return Op(kind, chunk * num_ranks + rank, group * num_ranks + place)

    program = [op(OpKind.FORWARD, turn) for turn in range(num_warmup)]
    for turn in range(num_warmup, total):
        program += [op(OpKind.FORWARD, turn), op(OpKind.BACKWARD, turn - num_warmup)]
    program += [op(OpKind.BACKWARD, turn) for turn in range(total - num_warmup, total)]
    return tuple(program)
