"""Findings about Fleet's own pipeline next to ours."""

from __future__ import annotations

from pipeproof.diagnostics.finding import ExampleKind, RuleDoc

NOT_FOR_FLEET = RuleDoc(
    code="PP917",
    title="the plan cannot be run by Fleet's pipeline",
    explanation=(
        "`make fleet` trains a plan's custom layers with Fleet's `PipelineLayer` and `train_batch` on the "
        "CPU. Fleet chooses its scheduler by the numbers of ranks, chunks and micro-batches, and each scheduler has "
        "its own conditions. A plan is refused before a process starts if Fleet has no scheduler for it, or would "
        "compute with other settings."
    ),
    wrong="schedule: {kind: zb_h1, ..}",
    right="schedule: {kind: 1f1b, ..}",
    kind=ExampleKind.OUTCOME,
)
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
    title="the training results of Fleet's pipeline differ from the reference",
    explanation=(
        "A loss or a gradient of Fleet's run differs from the reference, which the executor's run matches: gradients "
        "in any bit, losses by more than the rounding of Fleet's division by the number of micro-batches explains."
    ),
    wrong="step 0, linear.0.weight: 3e-2 from the reference",
    right="every gradient bit for bit",
    kind=ExampleKind.OUTCOME,
)
