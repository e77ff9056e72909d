"""DualPipeV: stages in a V, forwards of one direction overlap with backwards of the other.

"Cut in half" of DualPipe (DeepSeek-V3 Technical Report, arXiv:2412.19437, section 3.2.1), made by Sea AI Lab and
published as ``dualpipe/dualpipev.py`` in deepseek-ai/DualPipe; PyTorch's ``ScheduleDualPipeV`` and Paddle Fleet's
``DualPipeVParallel`` compute in this very order. Rank ``r`` of ``p`` holds stage ``r`` on the way out and stage
``2p - 1 - r`` on the way back.

Times, for equal stages without latency: with F, I, W the times of a forward and of the two parts of a backward
``B = I + W``, and D the time of an overlapped pair, ``D >= max(F, B)``, the makespan is exactly ::

    2pF + max(pF, (p - 1) I) + (2m - p - 2) D + 2B + pI + W + (p - 1) max(I, W)

so the last rank idles ``(p - 1)(D - W - min(I, W)) + max((p - 1) F, (p - 1) I - F)``. That is the published bubble
``(PP/2 - 1)(F&B + B - 3W)``, where PP = 2p counts stages, for ``F = I >= W``. Other conditions, the proof and
counter-examples: ``docs/schedules.md``.
"""

from __future__ import annotations

from pipeproof.schedule.ops import Op, OpKind
from pipeproof.schedule.programs import Program, Schedule, UnfitSizesError

_OUT, _BACK = 0, 1
"""The two ways through the ranks: from the first to the last, and from the last to the first."""


def dualpipe_v(num_ranks: int, num_micro_batches: int) -> Schedule:
    """One program per pipeline rank, with the positions of its overlapped pairs; two stages per rank.

    Every rank holds at most ``2p + 1`` chunk activations, for any times, freed at I or at W.

    Raises:
        UnfitSizesError: fewer than ``2p`` micro-batches, which all three originators refuse.
    """
    if num_micro_batches < 2 * num_ranks:
        raise UnfitSizesError(
            f"DualPipeV fills the way out and the way back before anything overlaps: {num_ranks} ranks need "
            f"{2 * num_ranks} micro-batches, and there are {num_micro_batches}",
            help=f"use {2 * num_ranks} or more",
        )
    ranks = [_rank_program(rank, num_ranks, num_micro_batches) for rank in range(num_ranks)]
    return Schedule(tuple(program for program, _ in ranks), tuple(pairs for _, pairs in ranks))


def _rank_program(rank: int, num_ranks: int, num_micro_batches: int) -> tuple[Program, frozenset[int]]:
    writer = _Writer(stages=(rank, 2 * num_ranks - 1 - rank))
    num_behind = num_ranks - 1 - rank
    _warm_up(writer, rank, num_behind)
    for index in range(num_micro_batches - 2 * num_ranks + rank + 1):
        if index == 0 and num_behind == 0:
            # The first backward of the last rank is what all others wait for: nothing overlaps with it.
            writer.forward(_OUT)
            writer.backward(_BACK, OpKind.BACKWARD)
        else:
            writer.pair(_OUT)
        writer.pair(_BACK)
    _cool_down(writer, rank, num_behind)
    return tuple(writer.ops), frozenset(writer.pairs)


def _warm_up(writer: _Writer, rank: int, num_behind: int) -> None:
    """Forwards until the way back is full; then each backward makes room for one forward more."""
    for _ in range(2 * num_behind):
        writer.forward(_OUT)
    for _ in range(rank + 1):
        writer.forward(_OUT)
        writer.forward(_BACK)
    for _ in range(num_behind):
        # Split although its W follows at once: the rank behind gets its input gradient earlier by the time of a W.
        writer.backward(_BACK, OpKind.BACKWARD_INPUT)
        writer.weight()
        writer.forward(_BACK)


def _cool_down(writer: _Writer, rank: int, num_behind: int) -> None:
    """The last forwards of the way back, then backwards alone: the second half of them leave their W for later."""
    for _ in range(num_behind):
        writer.backward(_BACK, OpKind.BACKWARD)
        writer.pair(_BACK)
    num_whole = rank + 1
    for number in range(2 * num_whole):
        writer.backward((_BACK, _OUT)[number % 2], OpKind.BACKWARD if number < num_whole else OpKind.BACKWARD_INPUT)
    for _ in range(num_behind):
        writer.weight()
        writer.backward(_OUT, OpKind.BACKWARD_INPUT)
    for _ in range(num_whole):
        writer.weight()


class _Writer:
    """Writes one rank's program; each way counts its own micro-batches, and W come in the order of their I."""

    def __init__(self, stages: tuple[int, int]) -> None:
        self.ops: list[Op] = []
        self.pairs: list[int] = []
        self._stages = stages
        self._num_forwards, self._num_backwards = [0, 0], [0, 0]
        self._num_weights = 0
        self._inputs: list[Op] = []

    def forward(self, way: int) -> None:
        self.ops.append(Op(OpKind.FORWARD, self._stages[way], self._num_forwards[way]))
        self._num_forwards[way] += 1

    def backward(self, way: int, kind: OpKind) -> None:
        self.ops.append(Op(kind, self._stages[way], self._num_backwards[way]))
        self._num_backwards[way] += 1
        if kind is OpKind.BACKWARD_INPUT:
            self._inputs.append(self.ops[-1])

    def pair(self, way: int) -> None:
        """A forward of one direction that overlaps with a backward of the other."""
        self.pairs.append(len(self.ops))
        self.forward(way)
        self.backward(1 - way, OpKind.BACKWARD)

    def weight(self) -> None:
        """The oldest W whose I is done."""
        op = self._inputs[self._num_weights]
        self.ops.append(Op(OpKind.BACKWARD_WEIGHT, op.stage, op.micro_batch))
        self._num_weights += 1
