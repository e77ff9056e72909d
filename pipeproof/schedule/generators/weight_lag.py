"""The common form of zero-bubble schedules in one direction: weight gradients run some rounds behind.

A rank runs in rounds. Each round has one forward, the input gradient (I) of an earlier forward and the weight gradient
(W) of an earlier input gradient. Two numbers define the schedule: the number of forwards before the first round, and
the number of rounds by which W follows I. Nothing on another rank waits for a W, so a rank near the end of the
pipeline, which starts late, may keep its own for the time when the ranks before it still work on their last input
gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeproof.schedule.ops import Op, OpKind
from pipeproof.schedule.programs import Program, stage_ops


def one_stage(stage: int, num_micro_batches: int, num_warmup: int, weight_lag: int) -> Program:
    """The program of a rank with one stage, in the order of its micro-batches."""
    kinds = OpKind.FORWARD, OpKind.BACKWARD_INPUT
    forwards, input_gradients = (stage_ops(kind, stage, range(num_micro_batches)) for kind in kinds)
    return with_weight_lag(forwards, input_gradients, num_warmup=num_warmup, weight_lag=weight_lag)


def with_weight_lag(
    forwards: Sequence[Op], input_gradients: Sequence[Op], *, num_warmup: int, weight_lag: int
) -> Program:
    """One rank's program from its forwards and as many input gradients, each in the order in which they run.

    ``num_warmup`` forwards come first (all of them, if there are no more), and
    ``weight_lag`` rounds pass before the first W. Weight gradients run in the
    order of the input gradients. The rank holds ``num_warmup + weight_lag + 1``
    activations at most, and ``num_warmup + 1`` that still wait for their input gradient.
    """
    weight_gradients = [Op(OpKind.BACKWARD_WEIGHT, op.stage, op.micro_batch) for op in input_gradients]
    num_warmup = min(num_warmup, len(forwards))
    weight_lag = min(weight_lag, len(input_gradients))
    num_rounds_with_forward = len(forwards) - num_warmup
    program = list(forwards[:num_warmup])
    for index, input_gradient in enumerate(input_gradients):
        if index < num_rounds_with_forward:
            program.append(forwards[num_warmup + index])
        program.append(input_gradient)
        if index >= weight_lag:
            program.append(weight_gradients[index - weight_lag])
    program += weight_gradients[len(weight_gradients) - weight_lag :]
    return tuple(program)
