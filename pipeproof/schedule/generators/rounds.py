"""Rounds of equal size, as PyTorch's interleaved schedules take micro-batches through the chunks.

There are ``max(1, m // p)`` of them (``torch/distributed/pipelining/schedules.py`` of torch 2.13).
Fewer micro-batches than ranks are one round.
"""

from __future__ import annotations

from pipeproof.schedule.programs import UnfitSizesError


def equal_rounds(title: str, num_ranks: int, num_micro_batches: int) -> list[int]:
    """How many micro-batches each round takes; ``title`` is of the schedule, for the message.

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
