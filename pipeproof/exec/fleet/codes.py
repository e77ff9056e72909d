"""9xx: what a run of Fleet's own pipeline beside ours finds, documented."""

from __future__ import annotations

from pipeproof.specs.codes import ExampleKind, RuleDoc

NOT_FOR_FLEET = RuleDoc(
    code="PP917",
    title="the plan is none that Fleet's pipeline can run",
    severity="error",
    explanation=(
        "`pipeproof fleet` trains a plan's own layers with Fleet's `PipelineLayer` and `train_batch` on the CPU. Fleet "
        "chooses its scheduler by the numbers of ranks, chunks and micro-batches, and each has conditions of its own; "
        "what it has no scheduler for, or would compute with other settings than the plan's, is refused before a "
        "process is started."
    ),
    wrong="schedule: {kind: zb_h1, ..}",
    right="schedule: {kind: 1f1b, ..}",
    kind=ExampleKind.OUTCOME,
)
NOT_AS_PLANNED = RuleDoc(
    code="PP918",
    title="what Fleet's pipeline does is not what the plan says",
    severity="error",
    explanation=(
        "Fleet's forwards and backwards on a rank, or its messages between two ranks, are not the plan's or come in "
        "another order; or a message is received with another shape than it was sent with; or a computation was given "
        "what another stage or micro-batch made. The finding names the first difference of each rank or pair. What the "
        "plan proves is then not what Fleet does: a difference of versions, or a schedule that Fleet runs otherwise."
    ),
    wrong="step 0, rank 1: Fleet computes 1F1 where the plan has 1B0, at place 1",
    right="the same forwards, backwards and messages in the same order",
    kind=ExampleKind.OUTCOME,
)
NOT_AS_TRAINED = RuleDoc(
    code="PP919",
    title="what Fleet's pipeline trains is not what the plan says",
    severity="error",
    explanation=(
        "A loss or a gradient of Fleet's run differs from the reference, from which the executor's do not: gradients "
        "in any bit, losses by more than the rounding of Fleet's division by the number of micro-batches explains."
    ),
    wrong="step 0, linear.0.weight: 3e-2 from the reference",
    right="every gradient bit for bit",
    kind=ExampleKind.OUTCOME,
)
FLEET_CODES = (NOT_FOR_FLEET, NOT_AS_PLANNED, NOT_AS_TRAINED)
