"""Schedules with a limit on memory: the way of one micro-batch, the building block, repeated every six slots.

Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv:2405.15362.
Stages lie in a V: rank ``r`` has stages ``r`` and ``2p - 1 - r``. A micro-batch
passes each rank four times: its forwards go down the ranks and back up, then
its input gradients (I) go down and back up. These are the 4p *places* of its
way. A slot is the time of one F, I or W; a rank has six to run per
micro-batch, so a block begins every six slots, and how long it lies between F
and W is how much memory it takes.

The paper repeats a block, then squeezes the result and reorders both its ends
greedily. Here everything follows from rank p - 1, which each way down reaches
last. It runs the forwards of ``num_ahead`` micro-batches, as many as memory
takes, and in slot 3p - 1, before which no I can get there, it begins a cycle
that has no gap: cycle ``k`` is I of micro-batch ``k`` in slot ``3p - 1 + 6k``, then its other I, both W, and both forwards
of micro-batch ``k + num_ahead`` in the last two slots. Reckoned from there, each micro-batch has at
each place a first slot, where its block has it, and a due slot, the last from
which it still reaches rank p - 1 in time. A rank runs what is due soonest of
all that is there and not before its first slot, or else its oldest W. Once a rank has no
forwards left to keep memory for, first slots count no more.

*Nothing can be shorter.* Let F, I and W take one slot each and transfers
nothing; let C = 2 num_ahead <= 2p be the most chunk activations that a rank may hold.
For m > num_ahead, rank p - 1 runs at most C forwards before slot 3p - 1: it
idles for 3p - 1 - C slots by then. Behind its last forward there is a chain of p - 1
forwards, 2p I and one W, and only 2C operations are left to rank p - 1: it
idles for 3p - 2C slots more. So no order of these stages in this memory ends before::

    6m + (3p - 1 - C) + max(0, 3p - 2C)

Fewer micro-batches never fill that memory and need ``max(4p - 1 + 2m, 3p - 1 + 4m)``:
that chain behind 2m forwards, or the 4m operations of rank p - 1 from slot 3p - 1 on.
`v_min` and `v_half` end exactly then.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import count

from pipeproof.schedule.ops import Op, OpKind
from pipeproof.schedule.programs import Schedule
from pipeproof.schedule.stage_ops import stage_ops

_CYCLE = 6


@dataclass(frozen=True, slots=True)
class BuildingBlock:
    """When a micro-batch is at each place of its way.

    No two micro-batches want one slot of a rank if ``hop`` and ``turn`` are both 1 or
    both 2. A cycle of rank p - 1 has time for the way to rank 0 and
    back if ``3 num_ahead >= p + 2`` (``hop`` 1) or ``2 num_ahead >= p + 1`` (``hop`` 2).
    """

    num_ranks: int
    num_ahead: int
    """Micro-batches that rank p - 1 takes in before its first I: half of the chunk activations a rank may hold."""
    hop: int
    """Slots from one rank to the next on the ways down; on the ways up it is one."""
    turn: int
    """Slots from a micro-batch's first I on rank p - 1 to its second."""

    def windows(self, place: int, num_micro_batches: int) -> list[tuple[int, int]]:
        """The first and the due slot of each micro-batch at one place; places count from 0 to 4p - 1."""
        way, passed = divmod(place, self.num_ranks)
        down = self.num_ranks - 1 - passed  # ranks still to go to rank p - 1
        first_cycle = 3 * self.num_ranks - 1
        cycles = range(first_cycle, first_cycle + _CYCLE * num_micro_batches, _CYCLE)
        match way:
            case 0:
                forward = 4 - _CYCLE * self.num_ahead
                early = [(2 * k, cycle + forward - down) for k, cycle in enumerate(cycles[: self.num_ahead])]
                later = cycles[self.num_ahead :]
                return early + [(cycle + forward - self.hop * down, cycle + forward - down) for cycle in later]
            case 1:
                return [(0, cycle - self.num_ranks - down) for cycle in cycles]
            case 2:
                return [(cycle - self.hop * down, cycle - down) for cycle in cycles]
            case _:
                return [(cycle + self.turn + passed,) * 2 for cycle in cycles]


def repeated(block: BuildingBlock, num_micro_batches: int) -> Schedule:
    """One program of F, I and W per pipeline rank, none of which ever holds more than ``2 num_ahead`` chunk activations.

    Exists for any numbers of ranks and micro-batches. Weight gradients run in
    the order of the input gradients. Linear in operations.
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
        for place in moved:
            num_done[place + 1] += 1  # at the end of the slot: nobody goes on with it before
    return Schedule(tuple(tuple(rank.program) for rank in ranks))


@dataclass(frozen=True, slots=True)
class _Way:
    """One of the four times that micro-batches pass a rank, by micro-batch: when, what runs, and what W is left."""

    place: int
    windows: list[tuple[int, int]]
    ops: list[Op]
    weights: list[Op]


class _Rank:
    """One rank while its program is written.

    How many micro-batches are through place ``k`` is ``num_done[k + 1]``, so that ``num_done[k]`` have come there.
    """

    def __init__(self, rank: int, block: BuildingBlock, num_micro_batches: int) -> None:
        p = block.num_ranks
        self.program: list[Op] = []
        self.weights: deque[Op] = deque()
        """What is left of I that have run, oldest first."""
        self._ways = [
            _way(place, block, num_micro_batches) for place in (rank, 2 * p - 1 - rank, 2 * p + rank, 4 * p - 1 - rank)
        ]
        self._num_forwards_left = 2 * num_micro_batches
        self._num_free = 2 * block.num_ahead
        self._is_memory_short = num_micro_batches > block.num_ahead

    def choose(self, slot: int, num_done: list[int]) -> _Way | None:
        """Of what may run in this slot, the one that is due first."""
        chosen, chosen_due = None, 0
        keeps_memory = self._is_memory_short and self._num_forwards_left > 0
        for way in self._ways:
            micro_batch = num_done[way.place + 1]
            if micro_batch == num_done[way.place]:
                continue
            first, due = way.windows[micro_batch]
            if (slot < first and (keeps_memory or not way.weights)) or not (self._num_free or way.weights):
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


def _way(place: int, block: BuildingBlock, num_micro_batches: int) -> _Way:
    windows = block.windows(place, num_micro_batches)
    micro_batches = range(num_micro_batches)
    if place < 2 * block.num_ranks:
        return _Way(place, windows, stage_ops(OpKind.FORWARD, place, micro_batches), [])
    stage = 4 * block.num_ranks - 1 - place
    input_gradients = stage_ops(OpKind.BACKWARD_INPUT, stage, micro_batches)
    return _Way(place, windows, input_gradients, stage_ops(OpKind.BACKWARD_WEIGHT, stage, micro_batches))
