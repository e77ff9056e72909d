"""DualPipe: micro-batches enter at both ends, forwards of one direction overlap with backwards of the other.

DeepSeek-V3 Technical Report, arXiv:2412.19437, section 3.2.1; the order comes from ``dualpipe/dualpipe.py`` in
deepseek-ai/DualPipe. Every stage has two copies: stage ``s`` is on rank ``s`` for the first half of the micro-batches,
which enter at rank 0, and on rank ``p - 1 - s`` for the second half, which enter at rank ``p - 1``.

Ranks ``r`` and ``p - 1 - r`` do the same at the same time, each for its own direction. So DualPipe is DualPipeV
(``dualpipe_v``) of half the ranks and half the micro-batches, unfolded: the opposite rank does here for the other
direction what a rank there does on its way back. Without latency both run in the same time, with DualPipeV's formula,
conditions and peaks (``p + 1`` chunk activations on every rank).
"""

from __future__ import annotations

from pipeproof.schedule.generators.dualpipe_v import dualpipe_v
from pipeproof.schedule.ops import Op
from pipeproof.schedule.programs import Program, Schedule, UnfitSizesError


def dualpipe(num_ranks: int, num_micro_batches: int) -> Schedule:
    """One program per pipeline rank ``r``, with the positions of its overlapped pairs; stages ``r`` and ``p - 1 - r``.

    Raises:
        UnfitSizesError: an odd number of ranks, an odd number of micro-batches, or fewer than ``2p`` of these.
    """
    _check_sizes(num_ranks, num_micro_batches)
    folded = dualpipe_v(num_ranks // 2, num_micro_batches // 2)
    folded_ranks = [min(rank, num_ranks - 1 - rank) for rank in range(num_ranks)]
    return Schedule(
        tuple(
            _unfolded(folded.programs[folded_rank], num_ranks, num_micro_batches, from_rank_0=folded_rank == rank)
            for rank, folded_rank in enumerate(folded_ranks)
        ),
        tuple(folded.pairs[folded_rank] for folded_rank in folded_ranks),
    )


def _unfolded(program: Program, num_ranks: int, num_micro_batches: int, *, from_rank_0: bool) -> Program:
    """A rank of DualPipeV with its way out, stages below ``p / 2``, in one direction and its way back in the other."""
    half = num_micro_batches // 2
    out, back = (0, half) if from_rank_0 else (half, 0)
    return tuple(
        Op(op.kind, op.stage, (op.micro_batch or 0) + (out if op.stage < num_ranks // 2 else back)) for op in program
    )


def _check_sizes(num_ranks: int, num_micro_batches: int) -> None:
    if num_ranks % 2:
        raise _odd_ranks(num_ranks, num_micro_batches)
    if num_micro_batches < 2 * num_ranks:
        raise UnfitSizesError(
            f"DualPipe fills both directions before anything overlaps: {num_ranks} ranks need {2 * num_ranks} "
            f"micro-batches, and there are {num_micro_batches}",
            help=f"use {2 * num_ranks}, or a larger even number",
        )
    if num_micro_batches % 2:
        raise UnfitSizesError(
            f"DualPipe sends half of the micro-batches in at each end, and {num_micro_batches} are odd",
            help=f"use {num_micro_batches - 1} or {num_micro_batches + 1}",
        )


def _odd_ranks(num_ranks: int, num_micro_batches: int) -> UnfitSizesError:
    """The refusal of an odd number of ranks, with even numbers that fit these micro-batches, if any do."""
    message = f"DualPipe pairs each rank with the one opposite, and {num_ranks} ranks are odd"
    if num_micro_batches % 2 or num_micro_batches < 4:
        ranks = max(2, num_ranks - 1)
        micro_batches = max(2 * ranks, num_micro_batches + num_micro_batches % 2)
        return UnfitSizesError(
            f"{message}; {num_micro_batches} micro-batches suit no other number either",
            help=f"use pp {ranks} with {micro_batches} micro-batches, or another kind",
            key=("schedule", "kind"),
        )
    most = num_micro_batches // 4 * 2
    fitting = {min(num_ranks - 1, most), min(num_ranks + 1, most)} - {0}
    return UnfitSizesError(message, help=f"use {' or '.join(map(str, sorted(fitting)))}", key=("topology", "pp"))
