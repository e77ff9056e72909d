"""Sends and receives around computations, in the order in which PyTorch adds them.

``_add_send_recv`` of torch 2.13 (``torch/distributed/pipelining/schedules.py``)
visits the ranks round-robin; a rank takes its next operation, or overlapped
pair, if its inputs have arrived. A send comes right after the computation of
its tensor. Its receive goes at that moment to the end of what the receiving
rank has got so far, so that the transfers between two ranks are in one order
on both sides. Between two stages of one rank nothing is sent.

Receives are therefore posted as early as their sends, and earlier than our
own lowering posts them, which does it just before they are needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeproof.schedule.columns import Row
from pipeproof.schedule.formats.inexpressible import InexpressibleError, steps_of
from pipeproof.schedule.ops import COMPUTE_KINDS, Op, OpKind

_Need = tuple[bool, int, int | None]
"""Forward or backward, stage and micro-batch: what a computation waits for."""


@dataclass
class _Rank:
    """Progress of a rank."""

    steps: list[tuple[Row, ...]]
    place: int = 0
    rows: list[Row] = field(default_factory=list)
    arrived: set[_Need] = field(default_factory=set)
    """The inputs that have arrived, or were computed on the rank."""

    @property
    def step(self) -> tuple[Row, ...]:
        """The next step."""
        return self.steps[self.place]


def with_transfers(rows_by_rank: Sequence[Sequence[Row]], form: str) -> tuple[tuple[Row, ...], ...]:
    """Computations, with what else their ranks do, and SEND and RECV rows, which have no peer yet.

    Linear in operations times ranks. ``form`` is the name of the format in messages.

    Raises:
        InexpressibleError: a stage is on two ranks, or the computations cannot run to their end in their order.
    """
    rank_of = _rank_of_stage(rows_by_rank, form)
    ranks = [_Rank(list(steps_of(rows, form))) for rows in rows_by_rank]
    last = max(rank_of, default=0)
    under_way = [rank for rank in ranks if rank.steps]
    while under_way:
        moved = False
        for rank in under_way:
            if all(_is_ready(row.op, rank, last) for row in rank.step):
                _take(rank, ranks, rank_of)
                moved = True
        if not moved:
            row = under_way[0].step[0]
            raise InexpressibleError(f"the computations cannot run in this order: {row.op} lacks its input", row=row)
        under_way = [rank for rank in under_way if rank.place < len(rank.steps)]
    return tuple(tuple(rank.rows) for rank in ranks)


def _rank_of_stage(rows_by_rank: Sequence[Sequence[Row]], form: str) -> Mapping[int, int]:
    rank_of: dict[int, int] = {}
    for rank, rows in enumerate(rows_by_rank):
        for row in (row for row in rows if row.op.kind in COMPUTE_KINDS):
            first = rank_of.setdefault(row.op.stage, rank)
            if first != rank:
                message = f"stage {row.op.stage} is on ranks {first} and {rank}, and in {form} a stage is on one rank"
                raise InexpressibleError(message, row=row)
    return rank_of


def _is_ready(op: Op, rank: _Rank, last: int) -> bool:
    """Return True if the rank has the input of an operation from another stage."""
    forward = op.kind is OpKind.FORWARD
    first = 0 if forward else last
    return op.kind not in _HAND_ON or op.stage == first or (forward, op.stage, op.micro_batch) in rank.arrived


def _take(rank: _Rank, ranks: Sequence[_Rank], rank_of: Mapping[int, int]) -> None:
    """The next step of a rank, with the sends behind it, and their receives on other ranks."""
    step = rank.step
    rank.place += 1
    rank.rows += step
    for row in step:
        op, forward = row.op, row.op.kind is OpKind.FORWARD
        stage = op.stage + (1 if forward else -1)
        if op.kind not in _HAND_ON or stage not in rank_of:
            continue
        receiver = ranks[rank_of[stage]]
        receiver.arrived.add((forward, stage, op.micro_batch))
        if receiver is not rank:
            send, receive = _FORWARD if forward else _BACKWARD
            rank.rows.append(Row(Op(send, op.stage, op.micro_batch)))
            receiver.rows.append(Row(Op(receive, stage, op.micro_batch)))


_HAND_ON = frozenset({OpKind.FORWARD, OpKind.BACKWARD, OpKind.BACKWARD_INPUT})
"""Kinds that need something of one neighbouring stage and make something for the other."""
_FORWARD = (OpKind.SEND_FORWARD, OpKind.RECV_FORWARD)
_BACKWARD = (OpKind.SEND_BACKWARD, OpKind.RECV_BACKWARD)
