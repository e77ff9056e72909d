"""Findings about Fleet's own pipeline next to ours."""

from __future__ import annotations

from pipeproof.diagnostics.finding import ExampleKind, RuleDoc

NOT_AS_PLANNED = RuleDoc(
    code="PP918",
    title="the operations of Fleet's pipeline differ from the plan",
    explanation=(
        "Fleet's forwards and backwards on a rank, or its messages between two ranks, are not the plan's or come in "
        "another order; or a message is received with another shape than it was sent with; or a computation was given "
        "the tensors of another stage or micro-batch. The finding names the first difference of each rank or pair. The "
        "proof of the plan then does not apply to Fleet: the versions differ, or Fleet runs the schedule in another "
        "way."
    ),
    wrong="step 0, rank 1: Fleet computes 1F1 where the plan has 1B0, at position 1",
    right="the same forwards, backwards and messages in the same order",
    kind=ExampleKind.OUTCOME,
)
NOT_AS_TRAINED = RuleDoc(
    code="PP919",
    title="Fleet's pipeline and pipeproof's train different values",
    explanation=(
        "A loss or a gradient of Fleet's run has other bits than in `pipeproof.paddle.Pipeline`, with the same layers, "
        "weights, data and random states."
    ),
    wrong="1 of 40 gradients differ, most of all linear.weight in step 0 by 3e-2",
    right="every loss and gradient bit for bit",
    kind=ExampleKind.OUTCOME,
)
