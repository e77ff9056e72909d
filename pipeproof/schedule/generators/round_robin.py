"""Round-robin of one forward and one backward over several stages (chunks) of each rank.

The common part of the variants of interleaved 1F1B. A chunk step is a chunk
and a micro-batch; all ranks take them in the same order. A rank begins with
warm-up forwards, then alternates one forward and one backward, and ends with
the remaining backwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from pipeproof.schedule.ops import Op, OpKind
from pipeproof.schedule.programs import Schedule, UnfitSizesError, in_turn, stage_ops, steady_pairs


def equal_rounds(title: str, num_ranks: int, num_micro_batches: int) -> list[int]:
    """Return the number of micro-batches of each round; ``title`` names the schedule in the message.

    Raises:
        UnfitSizesError: the micro-batches do not divide by the rounds; the help names the nearest numbers that do.
    """
    num_rounds = max(1, num_micro_batches // num_ranks)
    below = num_micro_batches - num_micro_batches % num_rounds
    if below == num_micro_batches:
        return [num_micro_batches // num_rounds] * num_rounds
    # As many rounds hold up to p - 1 micro-batches more than p each; one round more is full again.
    above = min(below + num_rounds, (num_rounds + 1) * num_ranks)
    raise UnfitSizesError(
        f"{title} runs {num_micro_batches} micro-batches on {num_ranks} ranks in {num_rounds} rounds, and "
        f"{num_micro_batches} does not divide by that",
        help=f"use {below} or {above}",
    )


ChunkStep = tuple[int, int]
"""A chunk and a micro-batch."""


def order_of_groups(group_sizes: Iterable[int], num_chunks: int) -> list[ChunkStep]:
    """Each group of micro-batches goes through all chunks before the next group begins."""
    order: list[ChunkStep] = []
    first = 0
    for size in group_sizes:
        order += [(chunk, batch) for chunk in range(num_chunks) for batch in range(first, first + size)]
        first += size
    return order


def from_the_last_chunk(order: Iterable[ChunkStep], num_chunks: int) -> list[ChunkStep]:
    """The same order of micro-batches, through the chunks from the last to the first, as for backwards."""
    return [(num_chunks - 1 - chunk, batch) for chunk, batch in order]


def in_groups(
    num_ranks: int,
    num_chunks: int,
    group_sizes: Sequence[int],
    *,
    backwards: Sequence[ChunkStep] | None = None,
    warmup_per_hop: int = 2,
    overlaps: bool = False,
) -> Schedule:
    """The micro-batches go through the chunks in groups of these sizes.

    The last rank begins with the forwards that the first group has before its last chunk; each rank before it with
    ``warmup_per_hop`` more. By default ``backwards`` are in the order of the forwards, from the last chunk. If a
    forward ``overlaps`` the backward after it, each rank begins with one forward more: the two then do not depend on
    each other.
    """
    forwards = order_of_groups(group_sizes, num_chunks)
    if backwards is None:
        backwards = from_the_last_chunk(forwards, num_chunks)
    before = (num_chunks - 1) * group_sizes[0]
    num_warmup = [before + warmup_per_hop * (num_ranks - 1 - rank) + overlaps for rank in range(num_ranks)]
    schedule = round_robin(num_chunks, forwards, backwards, num_warmup)
    return replace(schedule, pairs=steady_pairs(len(forwards), num_warmup)) if overlaps else schedule


def round_robin(
    num_chunks: int, forwards: Sequence[ChunkStep], backwards: Sequence[ChunkStep], num_warmup: Sequence[int]
) -> Schedule:
    """One program per rank; ``num_warmup`` has for each rank the number of forwards before the first backward.

    Chunk ``c`` of rank ``r`` is stage ``c * p + r``. A warm-up longer than all
    forwards is limited to them.
    """
    num_ranks, num_micro_batches = len(num_warmup), len(forwards) // num_chunks
    forward_places = [chunk * num_micro_batches + batch for chunk, batch in forwards]
    backward_places = [chunk * num_micro_batches + batch for chunk, batch in backwards]
    programs = []
    for rank, warmup in enumerate(num_warmup):
        stages = range(rank, num_chunks * num_ranks, num_ranks)
        first = _in_order(OpKind.FORWARD, stages, num_micro_batches, forward_places)
        second = _in_order(OpKind.BACKWARD, stages, num_micro_batches, backward_places)
        programs.append(in_turn(first, second, warmup))
    return Schedule(tuple(programs))


def _in_order(kind: OpKind, stages: Iterable[int], num_micro_batches: int, places: Iterable[int]) -> list[Op]:
    """The operations of all chunks in the order of ``places``: chunk by chunk, each its micro-batches in order."""
    ops = [op for stage in stages for op in stage_ops(kind, stage, range(num_micro_batches))]
    return [ops[position] for position in places]
