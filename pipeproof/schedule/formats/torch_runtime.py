"""Rows that PyTorch's runtime executes for the actions of a schedule with communication.

``_PipelineScheduleRuntime._step_microbatches`` of torch 2.13
(``torch/distributed/pipelining/schedules.py``) takes the actions of a rank one
by one:

- SEND and RECV post their tensors and return. Each action goes through ``_batch_p2p`` alone, which posts sends alone
  and receives alone one after another without a group call: no two transfers are in one batch. All of them use the
  group of the pipeline, in both directions: one channel from each rank to each other.
- F waits for its RECV_F just before it runs, B and I for their RECV_B, unless
  the neighbouring stage is on the same rank, which hands the tensor over.
- UNSHARD begins to gather a stage's weights concurrently with computation; the
  next computation of the stage waits for it. If RESHARD has freed the stage
  before, the gathering waits for that
  (``_reshard_after_forward_event`` in ``torch/distributed/fsdp``).
- At the end of the step all sends are waited for, the last one first.

The two actions of an overlapped pair are one row each, in one batch: both
inputs are waited for before the pair, as a concurrent run of both requires.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from pipeproof.schedule.columns import NONE, Row
from pipeproof.schedule.ops import COMPUTE_KINDS, SEND_KINDS, TRANSFER_KINDS, Op, OpKind, wait_for
from pipeproof.schedule.programs import input_of

COMMUNICATOR = "pp"
"""The communicator of all transfers, for the pipeline's group."""

WEIGHTS_QUEUE = "unshard"
"""The queue on which sharded weights are gathered."""

PAIR = 2
"""Computations that overlap with each other."""


@dataclass
class _Rank:
    stages: Collection[int]
    num_stages: int
    sends: list[Row] = field(default_factory=list)
    gathering: set[int] = field(default_factory=set)
    resharded: dict[int, int] = field(default_factory=dict)
    """Origins of RESHARD by stage."""


def runtime_rows(actions: Sequence[Row], stages: Collection[int], num_stages: int) -> Iterator[Row]:
    """The rows of a rank that holds ``stages``, from one row for each action; transfers have no peer yet."""
    rank = _Rank(stages, num_stages)
    pair: list[Row] = []
    for row in actions:
        if row.op.kind not in COMPUTE_KINDS:
            yield from _other(row, rank)
            continue
        pair.append(row)
        if row.batch == NONE or len(pair) == PAIR:
            for computation in pair:
                yield from _waits_before(computation, rank)
            yield from pair
            pair.clear()
    for send in reversed(rank.sends):
        yield Row(wait_for(send.op), origin=send.origin)
    for stage, origin in rank.resharded.items():
        yield _wait_before_gathering(stage, origin)


def _waits_before(row: Row, rank: _Rank) -> Iterator[Row]:
    stage = row.op.stage
    if stage in rank.gathering:
        rank.gathering.remove(stage)
        yield Row(wait_for(Op(OpKind.UNSHARD, stage)), origin=row.origin)
    receive = _input_of(row.op, rank)
    if receive is not None:
        yield Row(wait_for(receive), origin=row.origin)


def _input_of(op: Op, rank: _Rank) -> Op | None:
    """The receive that brings what a computation needs; None where the rank has it, or nothing comes."""
    needed = input_of(op, rank.num_stages)
    if needed is None or needed[1] in rank.stages:
        return None
    return Op(OpKind.RECV_FORWARD if needed[0] else OpKind.RECV_BACKWARD, op.stage, op.micro_batch)


def _other(action: Row, rank: _Rank) -> Iterator[Row]:
    kind, stage = action.op.kind, action.op.stage
    if kind in TRANSFER_KINDS:
        action = replace(action, communicator=COMMUNICATOR)
        if kind in SEND_KINDS:
            rank.sends.append(action)
    elif kind is OpKind.UNSHARD:
        action = replace(action, queue=WEIGHTS_QUEUE)
        if stage in rank.resharded:
            yield _wait_before_gathering(stage, rank.resharded.pop(stage))
        rank.gathering.add(stage)
    elif kind is OpKind.RESHARD:
        rank.resharded[stage] = action.origin
    yield action


def _wait_before_gathering(stage: int, origin: int) -> Row:
    """Delays later gathering, also in the next step, until the weights were resharded."""
    return Row(wait_for(Op(OpKind.RESHARD, stage)), queue=WEIGHTS_QUEUE, origin=origin)
