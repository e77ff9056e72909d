"""Interleaved 1F1B: each rank holds several stages (chunks) and takes turns between them.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM", arXiv:2104.04473, section 2.2. Stage ``c * p + r``
is chunk ``c`` of rank ``r``. Micro-batches go through a chunk in groups of
``p``, so their number must divide by ``p``.
"""

from __future__ import annotations

from pipeproof.schedule.ops import Op, OpKind
from pipeproof.schedule.programs import Program, Schedule, UnfitSizesError


def interleaved(num_ranks: int, num_micro_batches: int, num_chunks: int) -> Schedule:
    """One program per pipeline rank ``r``, with ``min(2 (p - 1 - r) + (v - 1) p, m v)`` warm-up forwards.

    Raises:
        UnfitSizesError: the micro-batches do not divide by the ranks; the message names the nearest that do.
    """
    if num_micro_batches % num_ranks:
        below = num_micro_batches // num_ranks * num_ranks
        near = f"{below} or {below + num_ranks}" if below else str(num_ranks)
        raise UnfitSizesError(
            f"interleaved 1F1B takes {num_ranks} micro-batches at a time through each chunk, and "
            f"{num_micro_batches} does not divide by that",
            help=f"use {near}",
        )
    turns = [
        (chunk, first + place)
        for first in range(0, num_micro_batches, num_ranks)
        for chunk in range(num_chunks)
        for place in range(num_ranks)
    ]
    return Schedule(tuple(_rank_program(rank, num_ranks, num_chunks, turns) for rank in range(num_ranks)))


def _rank_program(rank: int, num_ranks: int, num_chunks: int, turns: list[tuple[int, int]]) -> Program:
    """Forwards take ``turns`` (chunk, micro-batch) in order; backwards too, through the chunks from the last."""
    num_warmup = min(2 * (num_ranks - 1 - rank) + (num_chunks - 1) * num_ranks, len(turns))
    last = (num_chunks - 1) * num_ranks + rank
    forwards = [Op(OpKind.FORWARD, chunk * num_ranks + rank, batch) for chunk, batch in turns]
    backwards = [Op(OpKind.BACKWARD, last - chunk * num_ranks, batch) for chunk, batch in turns]
    program = forwards[:num_warmup]
    for forward, backward in zip(forwards[num_warmup:], backwards, strict=False):
        program += [forward, backward]
    return tuple(program + backwards[len(turns) - num_warmup :])
