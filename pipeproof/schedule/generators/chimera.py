"""Chimera: two 1F1B pipelines in opposite directions through the same ranks.

Li and Hoefler, "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional Pipelines",
arXiv:2107.06925, bidirectional pipelines with direct concatenation. Every stage has two copies: on rank ``s`` for
micro-batches that enter at rank 0, on rank ``p - 1 - s`` for micro-batches that enter at rank ``p - 1``. Micro-batches
go in units of ``p``; the first half of a unit enters at rank 0. A smaller last unit is halved too, with the odd
micro-batch at rank 0.

The order follows from equal slots for forwards and backwards. Each direction takes in a micro-batch every other slot,
the two directions fall into slots of different parity on every rank because ``p`` is even, and a unit fills ``2p``
slots of every rank without a gap, so the next one begins ``2p`` slots later.

For equal stages without latency, with tb = ti + tw and ``m = Kp``, the makespan is exactly ::

    m (tf + tb) + (p - 2) [max(tf, tb) + (K - 1) |tb - tf|]

and ``p (tf + tb) + 2 (ceil(m / 2) - 1) max(tf, tb)`` for ``m <= p``. So the published bubble ratio,
``(p - 2) / (2m + p - 2)``, is exact for tb = tf. For tb = 2 tf it is ``(p - 2) / (3m/2 + p - 2)`` with one unit, and
more with several: wherever tb and tf differ, each unit adds a bubble of ``(p - 2) |tb - tf|``.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeproof.schedule.ops import Op, OpKind
from pipeproof.schedule.programs import Program, Schedule, UnfitSizesError


def chimera(num_ranks: int, num_micro_batches: int) -> Schedule:
    """One program per pipeline rank, with stages ``r`` and ``p - 1 - r``; any number of micro-batches.

    Rank ``r`` holds at most ``min(m, p, h + 1 + min(r, p - 1 - r))`` chunk activations for any times, where ``h``
    of the first unit's micro-batches enter at the end nearer to it (``p / 2`` for ``m >= p``).

    Raises:
        UnfitSizesError: an odd number of ranks.
    """
    if num_ranks % 2:
        below = f"{num_ranks - 1} or " if num_ranks > 1 else ""
        raise UnfitSizesError(
            f"the two directions of Chimera fit together on an even number of ranks only, and {num_ranks} are odd",
            help=f"use {below}{num_ranks + 1}",
            key=("topology", "pp"),
        )
    return Schedule(tuple(_rank_program(rank, num_ranks, num_micro_batches) for rank in range(num_ranks)))


def _rank_program(rank: int, num_ranks: int, num_micro_batches: int) -> Program:
    in_slots: list[Op | None] = [None] * (2 * (num_micro_batches + 2 * num_ranks))
    for micro_batch, enters_at_0, first_slot in _entries(num_ranks, num_micro_batches):
        stage = rank if enters_at_0 else num_ranks - 1 - rank
        in_slots[first_slot + stage] = Op(OpKind.FORWARD, stage, micro_batch)
        in_slots[first_slot + 2 * num_ranks - 1 - stage] = Op(OpKind.BACKWARD, stage, micro_batch)
    return tuple(op for op in in_slots if op is not None)


def _entries(num_ranks: int, num_micro_batches: int) -> Iterator[tuple[int, bool, int]]:
    """Of each micro-batch: its number, whether it enters at rank 0, and the slot of its first forward."""
    for first in range(0, num_micro_batches, num_ranks):
        num_left = min(num_ranks, num_micro_batches - first)
        num_at_0 = (num_left + 1) // 2
        for offset in range(num_left):
            enters_at_0 = offset < num_at_0
            index = offset if enters_at_0 else offset - num_at_0
            yield first + offset, enters_at_0, 2 * first + 2 * index
