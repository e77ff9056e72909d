"""Per-rank programs, and the named passes that complete them.

A program is what one pipeline rank does in one step, in order. Generators
make the compute operations; the passes here add what they need: transfers
with their waits, then gradient reductions and the optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeproof.schedule.ops import Op, OpKind, wait_for

Program = tuple[Op, ...]
Programs = tuple[Program, ...]
"""One program per pipeline rank."""


def add_transfers(programs: Programs) -> Programs:
    """Insert sends, receives and waits around the compute operations.

    A receive is posted just before the wait for it, and the wait stands just
    before the operation that uses the tensor (an earlier receive spins on a
    GPU and slows the compute beside it). A send is posted right after its
    producer and never blocks it. A forward send is waited for before the
    backward of its micro-batch, which frees the activation; backward sends
    are waited for at the end of the step.

    The first stage is the smallest one that the programs mention, the last
    stage the largest. No transfer is made between two stages of one rank.
    """
    rank_of_stage = {op.stage: rank for rank, program in enumerate(programs) for op in program}
    return tuple(tuple(_with_transfers(program, rank_of_stage)) for program in programs)


def _with_transfers(program: Program, rank_of_stage: dict[int, int]) -> Iterator[Op]:
    def crosses(stage: int, neighbour: int) -> bool:
        return neighbour in rank_of_stage and rank_of_stage[neighbour] != rank_of_stage[stage]

    last_sends: list[Op] = []
    for op in program:
        if op.kind is OpKind.BACKWARD_WEIGHT:  # reads what F and I kept, hands nothing on
            yield op
            continue
        forward = op.kind is OpKind.FORWARD
        source, sink = (op.stage - 1, op.stage + 1) if forward else (op.stage + 1, op.stage - 1)
        if crosses(op.stage, source):
            receive = Op(OpKind.RECV_FORWARD if forward else OpKind.RECV_BACKWARD, op.stage, op.micro_batch)
            yield receive
            yield wait_for(receive)
        if not forward and crosses(op.stage, source):
            yield wait_for(Op(OpKind.SEND_FORWARD, op.stage, op.micro_batch))
        yield op
        if crosses(op.stage, sink):
            send = Op(OpKind.SEND_FORWARD if forward else OpKind.SEND_BACKWARD, op.stage, op.micro_batch)
            yield send
            if not forward:
                last_sends.append(send)
    yield from map(wait_for, last_sends)


def add_update(programs: Programs, reduce_axes: Sequence[str]) -> Programs:
    """End each program with the gradient reductions over ``reduce_axes``, in that order, and the optimizer."""
    return tuple(
        program
        + tuple(
            op
            for stage in sorted({op.stage for op in program})
            for op in (
                *(Op(OpKind.REDUCE_GRAD, stage, axis=axis) for axis in reduce_axes),
                Op(OpKind.STEP, stage),
            )
        )
        for program in programs
    )
