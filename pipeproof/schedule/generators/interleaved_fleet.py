"""Interleaved 1F1B as PaddlePaddle Fleet runs it, for numbers of micro-batches that need not divide by the ranks.

``paddle/distributed/fleet/meta_parallel/pipeline_parallel.py`` of Paddle 3.3.1
has three classes, between which ``fleet/model.py`` chooses by the number ``m``
of micro-batches and by ``best_unbalanced_scheduler``:

- fewer than ``p``: refused;
- ``p`` to ``2p - 1``: ``PipelineParallelWithInterleaveFthenB``, which takes
  ``p`` alone (variant ``fleet_fthenb``), or with the flag
  ``VPPFhenBInBalancedMemory`` (``fleet_balanced``);
- ``2p`` and more: ``PipelineParallelWithInterleave`` (``fleet``); with the flag
  it takes the backwards in another order (``fleet_balanced``).

The remainder of ``m`` by ``p`` joins the first group. Fleet asks for more than
two ranks; these orders exist for fewer too. With
``forward_backward_overlap_scheduler`` its warm-up is one forward longer, which
is not made here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from pipeproof.schedule.generators.round_robin import (
    ChunkStep,
    from_the_last_chunk,
    in_groups,
    order_of_groups,
    round_robin,
)
from pipeproof.schedule.programs import Schedule, UnfitSizesError


def fleet(num_ranks: int, num_micro_batches: int, num_chunks: int) -> Schedule:
    """``PipelineParallelWithInterleave``: a first group of ``p + m % p`` micro-batches (its ``first_chunk_acc``).

    The groups after it have ``p``. Rank ``r`` begins with
    ``(v - 1) (p + m % p) + 2 (p - 1 - r)`` forwards. With ``m = p`` Fleet runs
    another class; its rule gives there what PyTorch and Megatron-Core do.

    Raises:
        UnfitSizesError: fewer micro-batches than ranks, or between ``p`` and ``2p``.
    """
    _refuse_fewer_than_ranks(num_ranks, num_micro_batches)
    if num_ranks < num_micro_batches < 2 * num_ranks:
        raise UnfitSizesError(
            f"Fleet runs {num_micro_batches} micro-batches on {num_ranks} ranks with best_unbalanced_scheduler only",
            help=f"use {num_ranks} or {2 * num_ranks}, or variant fleet_balanced",
        )
    return in_groups(num_ranks, num_chunks, _group_sizes(num_ranks, num_micro_batches))


def fleet_fthenb(num_ranks: int, num_micro_batches: int, num_chunks: int) -> Schedule:
    """``PipelineParallelWithInterleaveFthenB``: all forwards chunk by chunk, then all backwards from the last chunk.

    Raises:
        UnfitSizesError: other than ``p`` micro-batches. From ``2p`` on Fleet runs another class, and this one
            takes multiples of ``p``.
    """
    if num_micro_batches != num_ranks:
        raise UnfitSizesError(
            f"Fleet runs all forwards before all backwards with as many micro-batches as ranks, {num_ranks}, only",
            help=f"use {num_ranks}"
            + (", or variant fleet_balanced" if num_micro_batches > num_ranks else "")
            + (" or fleet" if num_micro_batches >= 2 * num_ranks else ""),
        )
    order = order_of_groups([num_micro_batches], num_chunks)
    return round_robin(num_chunks, order, from_the_last_chunk(order, num_chunks), [len(order)] * num_ranks)


def fleet_balanced(num_ranks: int, num_micro_batches: int, num_chunks: int) -> Schedule:
    """The order of Fleet with ``best_unbalanced_scheduler``.

    Below ``2p`` micro-batches ``VPPFhenBInBalancedMemory``: one group, and
    ``(v - 1) m + p - 1 - r`` forwards first, half as many beyond the last
    rank's as ``fleet`` has. From there on ``fleet`` with the backwards of the
    last chunk moved ahead of others: on the last rank each comes right behind
    its forward.

    Raises:
        UnfitSizesError: fewer micro-batches than ranks.
    """
    _refuse_fewer_than_ranks(num_ranks, num_micro_batches)
    if num_micro_batches < 2 * num_ranks:
        return in_groups(num_ranks, num_chunks, [num_micro_batches], warmup_per_hop=1)
    sizes = _group_sizes(num_ranks, num_micro_batches)
    return in_groups(num_ranks, num_chunks, sizes, backwards=_last_chunk_ahead(num_ranks, sizes, num_chunks))


def _refuse_fewer_than_ranks(num_ranks: int, num_micro_batches: int) -> None:
    if num_micro_batches < num_ranks:
        raise UnfitSizesError(
            f"Fleet interleaves stages for at least as many micro-batches as ranks, and {num_micro_batches} is less "
            f"than {num_ranks}",
            help=f"use {num_ranks}",
        )


def _group_sizes(num_ranks: int, num_micro_batches: int) -> list[int]:
    remainder = num_micro_batches % num_ranks
    return [num_ranks + remainder] + [num_ranks] * (num_micro_batches // num_ranks - 1)


def _last_chunk_ahead(num_ranks: int, group_sizes: Sequence[int], num_chunks: int) -> list[ChunkStep]:
    """The order of backwards in which those of the last chunk keep pace with its forwards on the last rank.

    That rank has run ``v - 1`` chunks of the first group, ``p + m % p``
    micro-batches, when it begins its first backward: the last chunk of group
    ``k >= 1`` is due at place ``m % p + k v p`` among the backwards. Those of
    other chunks fill the places between in their order.
    """
    last = num_chunks - 1
    chunk_steps = from_the_last_chunk(order_of_groups(group_sizes, num_chunks), num_chunks)
    others = (step for step in chunk_steps if step[0] != last)
    order: list[ChunkStep] = []
    first = 0
    for group, size in enumerate(group_sizes):
        due = first + group * (num_chunks - 1) * num_ranks
        order += islice(others, due - len(order))
        order += [(last, batch) for batch in range(first, first + size)]
        first += size
    return [*order, *others]
