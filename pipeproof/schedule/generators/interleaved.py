"""Interleaved 1F1B: each rank holds several stages (chunks) and alternates between them.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", arXiv:2104.04473,
section 2.2, where the micro-batches divide by the ranks: ``p`` of them go through a chunk before the next chunk begins.
For other numbers each tool has its own variant. With ``m = n p`` micro-batches

- ``torch``, ``megatron`` (groups of ``p``) and ``fleet`` are equal for every ``n``;
- ``fleet_balanced`` is equal to them for ``n >= 2``;
- ``fleet_fthenb`` exists only for ``n = 1``. There it, ``fleet_balanced`` and the others have the same order of
  forwards and the same order of backwards, and differ in their warm-up: all forwards, ``(v - 1) p + (p - 1 - r)`` and
  ``(v - 1) p + 2 (p - 1 - r)`` of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from pipeproof.schedule.generators.round_robin import (
    ChunkStep,
    equal_rounds,
    from_the_last_chunk,
    in_groups,
    order_of_groups,
    round_robin,
)
from pipeproof.schedule.kinds import VARIANTS
from pipeproof.schedule.programs import Schedule, UnfitSizesError


def interleaved(
    num_ranks: int,
    num_micro_batches: int,
    num_chunks: int,
    variant: str = VARIANTS[0],
    group_size: int | None = None,
    overlaps: bool = False,  # noqa: FBT002
) -> Schedule:
    """One program per pipeline rank; stage ``c * p + r`` is chunk ``c`` of rank ``r``.

    ``group_size`` is the number of micro-batches that go through a chunk at a time, in ``megatron`` only; the others
    derive it. ``overlaps`` is also for ``megatron`` only: a forward overlaps with the backward after it, its combined
    1F1B.

    Raises:
        UnfitSizesError: the variant does not exist for these sizes; its help names the nearest that fit.
    """
    if group_size is not None and variant != "megatron":
        raise UnfitSizesError(
            f"the variant {variant} derives how many micro-batches go through a chunk at a time",
            help="use variant megatron, or remove the key",
            key=("schedule", "micro_batch_group_size"),
        )
    if overlaps and variant != "megatron":
        raise UnfitSizesError(
            f"a forward overlaps with a backward in interleaved 1F1B as Megatron-Core has it, and the variant is "
            f"{variant}",
            help="use variant megatron, or remove schedule.overlap",
            key=("schedule", "overlap"),
        )
    match variant:
        case "torch":
            return interleaved_torch(num_ranks, num_micro_batches, num_chunks)
        case "megatron":
            return interleaved_megatron(num_ranks, num_micro_batches, num_chunks, group_size, overlaps=overlaps)
        case "fleet":
            return fleet(num_ranks, num_micro_batches, num_chunks)
        case "fleet_fthenb":
            return fleet_fthenb(num_ranks, num_micro_batches, num_chunks)
        case "fleet_balanced":
            return fleet_balanced(num_ranks, num_micro_batches, num_chunks)
    raise ValueError(f"{variant!r} is not a variant of interleaved 1F1B; there are {', '.join(VARIANTS)}")


def interleaved_torch(num_ranks: int, num_micro_batches: int, num_chunks: int) -> Schedule:
    """PyTorch's ``ScheduleInterleaved1F1B`` (``torch/distributed/pipelining/schedules.py`` of torch 2.13).

    ``max(1, m // p)`` rounds of equal size ``g``; rank ``r`` begins with
    ``(v - 1) g + 2 (p - 1 - r)`` forwards. Fewer micro-batches than ranks are
    one round.

    Raises:
        UnfitSizesError: the micro-batches do not divide by the rounds.
    """
    rounds = equal_rounds("interleaved 1F1B as PyTorch has it", num_ranks, num_micro_batches)
    return in_groups(num_ranks, num_chunks, rounds)


def interleaved_megatron(
    num_ranks: int, num_micro_batches: int, num_chunks: int, group_size: int | None = None, *, overlaps: bool = False
) -> Schedule:
    """Megatron-Core's interleaved schedule (``megatron/core/pipeline_parallel/schedules.py``, 2026).

    ``group_size`` is its ``microbatch_group_size_per_vp_stage``, by default
    ``p``: so many micro-batches go through a chunk at a time, in the last
    group those that are left. Rank ``r`` begins with
    ``(v - 1) group_size + 2 (p - 1 - r)`` forwards, and if forwards overlap with
    backwards (``--overlap-moe-expert-parallel-comm``), with one more.

    Raises:
        UnfitSizesError: fewer micro-batches than ranks, a group smaller than the ranks or larger than all
            micro-batches, or a last group smaller than the ranks, which would make bubbles.
    """
    size = num_ranks if group_size is None else group_size
    _check_group_size(num_ranks, num_micro_batches, size)
    num_groups, left = divmod(num_micro_batches, size)
    if 0 < left < num_ranks:
        below = num_micro_batches - left
        raise UnfitSizesError(
            f"interleaved 1F1B as Megatron-Core has it takes {size} micro-batches at a time through each chunk, and "
            f"in the last group at least as many as there are ranks, {num_ranks}: {num_micro_batches} leaves {left}",
            help=f"use {below} or {below + num_ranks}",
        )
    return in_groups(num_ranks, num_chunks, [size] * num_groups + ([left] if left else []), overlaps=overlaps)


def _check_group_size(num_ranks: int, num_micro_batches: int, size: int) -> None:
    _refuse_fewer_than_ranks("Megatron-Core", num_ranks, num_micro_batches)
    if not num_ranks <= size <= num_micro_batches:
        raise UnfitSizesError(
            f"Megatron-Core takes at least as many micro-batches at a time through a chunk as there are ranks, "
            f"{num_ranks}, and at most all {num_micro_batches}, not {size}",
            help=f"use {num_ranks}" + (f" to {num_micro_batches}" if num_micro_batches > num_ranks else ""),
            key=("schedule", "micro_batch_group_size"),
        )


# Interleaved 1F1B as PaddlePaddle Fleet runs it, for numbers of micro-batches that need not divide by the ranks.
#
# ``paddle/distributed/fleet/meta_parallel/pipeline_parallel.py`` of Paddle 3.3.1
# has three classes, between which ``fleet/model.py`` chooses by the number ``m``
# of micro-batches and by ``best_unbalanced_scheduler``:
#
# - fewer than ``p``: refused;
# - ``p`` to ``2p - 1``: ``PipelineParallelWithInterleaveFthenB``, which takes
#   ``p`` alone (variant ``fleet_fthenb``), or with the flag
#   ``VPPFhenBInBalancedMemory`` (``fleet_balanced``);
# - ``2p`` and more: ``PipelineParallelWithInterleave`` (``fleet``); with the flag
#   it takes the backwards in another order (``fleet_balanced``).
#
# The remainder of ``m`` by ``p`` joins the first group. Fleet asks for more than
# two ranks; these orders exist for fewer too. With
# ``forward_backward_overlap_scheduler`` its warm-up is one forward longer, which
# is not made here.


def fleet(num_ranks: int, num_micro_batches: int, num_chunks: int) -> Schedule:
    """``PipelineParallelWithInterleave``: a first group of ``p + m % p`` micro-batches (its ``first_chunk_acc``).

    The groups after it have ``p``. Rank ``r`` begins with ``(v - 1) (p + m % p) + 2 (p - 1 - r)`` forwards. With
    ``m = p`` Fleet runs another class; this rule then gives the order of PyTorch and Megatron-Core.

    Raises:
        UnfitSizesError: fewer micro-batches than ranks, or between ``p`` and ``2p``.
    """
    _refuse_fewer_than_ranks("Fleet", num_ranks, num_micro_batches)
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
    _refuse_fewer_than_ranks("Fleet", num_ranks, num_micro_batches)
    if num_micro_batches < 2 * num_ranks:
        return in_groups(num_ranks, num_chunks, [num_micro_batches], warmup_per_hop=1)
    sizes = _group_sizes(num_ranks, num_micro_batches)
    return in_groups(num_ranks, num_chunks, sizes, backwards=_last_chunk_ahead(num_ranks, sizes, num_chunks))


def _refuse_fewer_than_ranks(tool: str, num_ranks: int, num_micro_batches: int) -> None:
    if num_micro_batches < num_ranks:
        raise UnfitSizesError(
            f"{tool} interleaves stages for at least as many micro-batches as ranks, and {num_micro_batches} is less "
            f"than {num_ranks}",
            help=f"use {num_ranks}",
        )


def _group_sizes(num_ranks: int, num_micro_batches: int) -> list[int]:
    remainder = num_micro_batches % num_ranks
    return [num_ranks + remainder] + [num_ranks] * (num_micro_batches // num_ranks - 1)


def _last_chunk_ahead(num_ranks: int, group_sizes: Sequence[int], num_chunks: int) -> list[ChunkStep]:
    """The order of backwards in which the last chunk's backwards keep pace with its forwards on the last rank.

    That rank has run ``v - 1`` chunks of the first group, ``p + m % p`` micro-batches, when it begins its first
    backward: the last chunk of group ``k >= 1`` is due at position ``m % p + k v p`` among the backwards. Other chunks
    fill the positions between, in order.
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
