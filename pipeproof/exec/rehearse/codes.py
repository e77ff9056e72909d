"""9xx: what a rehearsal finds, documented."""

from __future__ import annotations

from pipeproof.specs.codes import ExampleKind, RuleDoc

NOT_AS_SENT = RuleDoc(
    code="PP914",
    title="elements arrived that were not those sent",
    severity="error",
    explanation=(
        "In a rehearsal each element says which rank made it, for which operation, and at which index. A receive, a "
        "gather or another collective ended on a rank with other elements than the graph says: of another message, "
        "another rank or another step, moved, cut off, or never written. The finding names the operation and the "
        "first range that is wrong, and what was found in its place. The graph is proved, so the fault is in what "
        "carries it out: an order of ranks, a launcher's environment, a backend, a link."
    ),
    wrong="rank 1, step 0, 1RECV_F1 over pp 0->1: elements 0..256 are elements 0..256 of 0SEND_F2 of rank 0",
    right="every range of every message has the elements that its sender put there",
    kind=ExampleKind.OUTCOME,
)
NOT_AS_PROMISED = RuleDoc(
    code="PP915",
    title="what arrived is not what the receiver's layout promises",
    severity="error",
    explanation=(
        "Every message of a rehearsal brought the elements that its sender put there, and the tensor that they make is "
        "not the one that the receiver's layout says it has. That is a fault of the plan, which `check` predicts "
        "(PP201): only a plan that does not pass it, rehearsed with `--unsafe`, comes to this. The witness has the "
        "same ranges, as they were really found."
    ),
    wrong="pipeproof rehearse --unsafe PLAN   # topology: {pp: 2, tp: 2, sequence_parallel: true}, transport: partial",
    right="pipeproof rehearse PLAN   # topology: {pp: 2, tp: 2, sequence_parallel: true}, transport: full",
    kind=ExampleKind.OUTCOME,
)
NO_SUCH_SCALE = RuleDoc(
    code="PP916",
    title="the plan cannot be rehearsed at that scale",
    severity="error",
    explanation=(
        "`--scale` divides the length of sequences, and the hidden size where lengths do not divide; both must go on "
        "to divide by all that cuts them (tensor-parallel ranks, heads, pieces of sequences). No such pair of sizes "
        "is a plan at the scale that was asked for. Own layers declare their shapes, so they are rehearsed as they "
        "are."
    ),
    wrong="pipeproof rehearse PLAN --scale 1/3   # seq_length: 4096, hidden_size: 4096",
    right="pipeproof rehearse PLAN --scale 1/8   # seq_length: 4096, hidden_size: 4096",
    kind=ExampleKind.COMMAND,
)

REHEARSAL_CODES = (NOT_AS_SENT, NOT_AS_PROMISED, NO_SUCH_SCALE)
