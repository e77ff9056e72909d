"""Runs the program of a two-rank case on a pair of real processes, row by row in the order of its text.

A module of its own and importing little, because the processes import it by
name. A forward computes nothing: its output is ``value_of`` its stage and micro-batch in every element, which tells a
receiver the sender.
"""

from dataclasses import dataclass

import numpy as np

from pipeproof.schedule.columns import Row
from pipeproof.schedule.ops import COMPUTE_KINDS, SEND_KINDS, TRANSFER_KINDS, OpKind

STALE = -7.0
"""Contents of a receive buffer before the receive."""

NUMEL = 4
"""Elements of a message whose row names no range."""


def value_of(stage, micro_batch):
    """Value of every element of a forward's output."""
    return 10.0 * (stage + 1) + micro_batch


@dataclass(frozen=True)
class RunProgram:
    """A body for two endpoints: each executes its rank's rows and returns the received values, by name."""

    rows: tuple[tuple[Row, ...], ...]
    late: int | None = None
    """The rank that pauses before it begins; the other is then ahead."""

    def __call__(self, end):
        """Run the rank's rows on this endpoint."""
        if end.rank == self.late:
            end.pause()
        posted, received = {}, {}
        for row in self.rows[end.rank]:
            op = row.op
            if op.kind in TRANSFER_KINDS:
                posted[op] = _post(end, row)
            elif op.kind is OpKind.WAIT:
                array = posted[op.target].wait()
                if op.target.kind not in SEND_KINDS:
                    received[str(op.target)] = array.tolist()
            elif op.kind in COMPUTE_KINDS and row.writes:
                _overwrite(row, posted, self.rows[end.rank])
        return received


def _post(end, row):
    """Post one transfer over the pair's edge of its direction."""
    op = row.op
    numel = row.stop - row.start or NUMEL
    edge = "forward" if op.is_forward else "backward"
    if op.kind in SEND_KINDS:
        return end.post_send(np.full(numel, value_of(op.stage, op.micro_batch), np.float32), edge)
    return end.post_recv(np.full(numel, STALE, np.float32), edge)


def _overwrite(row, posted, rows):
    """Write the forward's output into the tensors that are being sent from the buffers that it writes."""
    for other in rows:
        if other.op in posted and set(other.reads) & set(row.writes):
            tensor = posted[other.op].tensor
            tensor.set_value(np.full(tensor.shape, value_of(row.op.stage, row.op.micro_batch), np.float32))
