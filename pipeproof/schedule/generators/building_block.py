"""Schedules with a limit on memory: the way of one micro-batch, the building block, repeated every six slots.

Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv:2405.15362.
Stages lie in a V: rank ``r`` has stages ``r`` and ``2p - 1 - r``. A micro-batch passes each rank four times: its
forwards go down the ranks and back up, then its input gradients (I) go down and back up. These are the 4p *places* of
its way. A slot is the time of one F, I or W; a rank runs six of them for each micro-batch, so a block begins every six
slots. The time between F and W determines its memory.

The paper repeats a block, squeezes the result and reorders both its ends greedily. Here everything follows from rank p
- 1, which each way down reaches last. It runs the forwards of ``num_ahead`` micro-batches, as many as fit in memory. In
slot 3p - 1, before which no I can arrive, it begins cycles without a gap: cycle ``k`` is I of micro-batch ``k`` in slot
``3p - 1 + 6k``, then the I on its way up, two W, and in the last two slots both forwards of micro-batch ``k +
num_ahead``. Counted from there, each micro-batch has at each place a first slot, from its block, and a due slot, from
which it is still in time at rank p - 1. Among arrived operations that have reached their first slot, a rank runs the
one that is due first, or else its oldest W. Once a rank has no forwards left to keep memory for, first slots no longer
count.

*Nothing can be shorter.* Let F, I and W take one slot each and transfers
nothing, and let C = 2 num_ahead <= 2p be the most chunk activations that a
rank may hold. For m > num_ahead, rank p - 1 runs at most C forwards before
slot 3p - 1, so by then it has idled for 3p - 1 - C slots. Behind its last
forward there is a chain of p - 1 forwards, 2p I and one W, but only 2C
operations are left to rank p - 1 itself: it idles for 3p - 2C more. So no
order of these stages in this memory ends before::

    6m + (3p - 1 - C) + max(0, 3p - 2C)

Fewer micro-batches never fill that memory. They need ``max(4p - 1 + 2m, 3p - 1 + 4m)``:
that chain behind 2m forwards, or the 4m operations of rank p - 1 from slot
3p - 1 on. `v_min` and `v_half` end exactly then.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import count

from pipeproof.schedule.ops import Op, OpKind
from pipeproof.schedule.programs import Schedule, stage_ops

_CYCLE = 6


@dataclass(frozen=True, slots=True)
class BuildingBlock:
    """The slots of a micro-batch at each place of its way.

    No two micro-batches get one slot of a rank if ``hop`` and ``turn`` are both 1 or both 2. There is time for the way
    from rank p - 1 to rank 0 and back if ``3 num_ahead >= p + 2`` (``hop`` 1) or ``2 num_ahead >= p + 1`` (``hop`` 2).
    """

    num_ranks: int
    num_ahead: int
    """Micro-batches that rank p - 1 takes in before its first I: half of the chunk activations a rank may hold."""
    hop: int
    """Slots from one rank to the next on the ways down; on the ways up it is one."""
    turn: int
    """Slots from a micro-batch's first I on rank p - 1 to its second."""

    def windows(self, position: int, num_micro_batches: int) -> list[tuple[int, int]]:
        """The first and the due slot of each micro-batch at one place; places count from 0 to 4p - 1."""
        way, passed = divmod(position, self.num_ranks)
        down = self.num_ranks - 1 - passed  # ranks still to go to rank p - 1
        first_cycle = 3 * self.num_ranks - 1
        cycles = range(first_cycle, first_cycle + _CYCLE * num_micro_batches, _CYCLE)
        match way:
            case 0:
                ahead = min(self.num_ahead, num_micro_batches)
                early = [(position + 2 * k, first_cycle - 2 * (self.num_ahead - k) - down) for k in range(ahead)]
                return early + [
                    (cycle + 4 - self.hop * down, cycle + 4 - down) for cycle in cycles[: num_micro_batches - ahead]
                ]
            case 1:
                return [(0, cycle - self.num_ranks - down) for cycle in cycles]
            case 2:
                return [(cycle - self.hop * down, cycle - down) for cycle in cycles]
            case _:
                return [(cycle + self.turn + passed,) * 2 for cycle in cycles]


def repeated(block: BuildingBlock, num_micro_batches: int) -> Schedule:
    """One program of F, I and W per pipeline rank, for any numbers of ranks and micro-batches.

    No rank ever holds more than ``2 num_ahead`` chunk activations until W frees
    them. Weight gradients run in the order of the input gradients. Linear in
    operations.
    """
    ranks = [_Rank(rank, block, num_micro_batches) for rank in range(block.num_ranks)]
    num_done = [num_micro_batches] + [0] * (4 * block.num_ranks)
    num_left = 6 * block.num_ranks * num_micro_batches
    for slot in count():
        if not num_left:
            break
        assert slot < _CYCLE * (num_micro_batches + block.num_ranks), "these blocks cannot take so long"
        moved = []
        for rank in ranks:
            way = rank.choose(slot, num_done)
            if way is not None:
                rank.run(way, num_done)
                moved.append(way.place)
            elif rank.weights:
                rank.run_weight()
            else:
                continue
            num_left -= 1
        for position in moved:
            num_done[position + 1] += 1  # at the end of the slot: no rank continues with it before
    return Schedule(tuple(tuple(rank.program) for rank in ranks))


@dataclass(frozen=True, slots=True)
class _Way:
    """One of the four ways on which micro-batches pass a rank; lists are by micro-batch.

    ``weights`` are the W that its operations leave for later, none for forwards.
    """

    place: int
    windows: list[tuple[int, int]]
    ops: list[Op]
    weights: list[Op]


class _Rank:
    """One rank while its program is written.

    ``num_done[k + 1]`` micro-batches are through place ``k``, and ``num_done[k]`` have arrived there.
    """

    def __init__(self, rank: int, block: BuildingBlock, num_micro_batches: int) -> None:
        p = block.num_ranks
        self.program: list[Op] = []
        self.weights: deque[Op] = deque()
        """The W of I that have run, oldest first."""
        self._ways = [
            _way(position, block, num_micro_batches)
            for position in (rank, 2 * p - 1 - rank, 2 * p + rank, 4 * p - 1 - rank)
        ]
        self._num_forwards_left = 2 * num_micro_batches
        self._num_free = 2 * block.num_ahead
        self._is_memory_short = num_micro_batches > block.num_ahead

    def choose(self, slot: int, num_done: list[int]) -> _Way | None:
        """The operation that may run in this slot and is due first."""
        chosen, chosen_due = None, 0
        keeps_memory = self._is_memory_short and self._num_forwards_left > 0
        for way in self._ways:
            micro_batch = num_done[way.place + 1]
            if micro_batch == num_done[way.place]:
                continue
            first, due = way.windows[micro_batch]
            too_early = slot < first and (keeps_memory or not way.weights)
            lacks_memory = not (self._num_free or way.weights)
            if too_early or lacks_memory:
                continue
            if chosen is None or due < chosen_due:
                chosen, chosen_due = way, due
        return chosen

    def run(self, way: _Way, num_done: list[int]) -> None:
        """Run the next micro-batch of a way."""
        micro_batch = num_done[way.place + 1]
        self.program.append(way.ops[micro_batch])
        if way.weights:
            self.weights.append(way.weights[micro_batch])
        else:
            self._num_forwards_left -= 1
            self._num_free -= 1

    def run_weight(self) -> None:
        """Run the oldest W, which frees the activation."""
        self.program.append(self.weights.popleft())
        self._num_free += 1


def _way(position: int, block: BuildingBlock, num_micro_batches: int) -> _Way:
    windows = block.windows(position, num_micro_batches)
    micro_batches = range(num_micro_batches)
    if position < 2 * block.num_ranks:
        return _Way(position, windows, stage_ops(OpKind.FORWARD, position, micro_batches), [])
    stage = 4 * block.num_ranks - 1 - position
    input_gradients = stage_ops(OpKind.BACKWARD_INPUT, stage, micro_batches)
    return _Way(position, windows, input_gradients, stage_ops(OpKind.BACKWARD_WEIGHT, stage, micro_batches))
