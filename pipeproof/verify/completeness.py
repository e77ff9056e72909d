"""12x: every stage computes every micro-batch once, forward before backward, on the rank that owns it."""

from __future__ import annotations

from collections.abc import Iterator

from pipeproof.schedule.ops import COMPUTE_KINDS, Op, OpKind
from pipeproof.specs.codes import RuleDoc
from pipeproof.specs.finding import Finding, OpsWitness
from pipeproof.verify.subject import Rule, Subject, finding, missing_op

_ComputeOps = dict[tuple[int, int], dict[OpKind, list[int]]]


def _compute_ops(subject: Subject, rank: int) -> _ComputeOps:
    """Op ids by (stage, micro-batch) and kind on one rank, in program order."""
    found: _ComputeOps = {}
    for op_id in subject.graph.rank_ops(rank):
        op = subject.graph.ops[op_id]
        if op.kind in COMPUTE_KINDS and op.micro_batch is not None:
            found.setdefault((op.stage, op.micro_batch), {}).setdefault(op.kind, []).append(op_id)
    return found


def _owned_stage(subject: Subject, rank: int) -> int:
    return subject.plan.mesh.coords(rank)["pp"]


MISSING = RuleDoc(
    code="PP121",
    title="a stage never computes a micro-batch",
    severity="error",
    explanation=(
        "Training needs one forward and one backward (or one input-gradient and one weight-gradient operation) "
        "for each stage and micro-batch. A missing backward leaves a gradient without that micro-batch's share: "
        "training goes on with a smaller, biased gradient."
    ),
    wrong="rank 0: 0F0 0F1 0B0",
    right="rank 0: 0F0 0F1 0B0 0B1",
)


def _check_missing(subject: Subject) -> Iterator[Finding]:
    for rank in range(subject.graph.num_ranks):
        stage = _owned_stage(subject, rank)
        found = _compute_ops(subject, rank)
        for micro_batch in range(subject.plan.spec.schedule.num_micro_batches):
            kinds = found.get((stage, micro_batch), {})
            split = OpKind.BACKWARD_INPUT in kinds or OpKind.BACKWARD_WEIGHT in kinds
            backward = (OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT) if split else (OpKind.BACKWARD,)
            absent = [Op(k, stage, micro_batch) for k in (OpKind.FORWARD, *backward) if k not in kinds]
            if absent:
                names = " and ".join(map(str, absent))
                yield finding(
                    MISSING,
                    f"{subject.coords_text(rank)} never runs {names}",
                    help=f"add {names} to the program of rank {rank}",
                    witness=OpsWitness(tuple(missing_op(rank, op) for op in absent)),
                )


DOUBLED = RuleDoc(
    code="PP122",
    title="a stage computes a micro-batch twice",
    severity="error",
    explanation=(
        "A second backward adds the micro-batch's gradient again; a second forward overwrites the activations "
        "that the backward needs. B beside I or W of the same micro-batch counts as twice too."
    ),
    wrong="rank 0: 0F0 0B0 0B0",
    right="rank 0: 0F0 0B0",
)


def _check_doubled(subject: Subject) -> Iterator[Finding]:
    for rank in range(subject.graph.num_ranks):
        for (stage, micro_batch), kinds in _compute_ops(subject, rank).items():
            doubles = [ids for ids in kinds.values() if len(ids) > 1]
            if OpKind.BACKWARD in kinds and (kinds.keys() & {OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT}):
                doubles.append([i for kind, ids in kinds.items() if kind is not OpKind.FORWARD for i in ids])
            for ids in doubles:
                yield finding(
                    DOUBLED,
                    f"{subject.coords_text(rank)} runs "
                    f"{', '.join(str(subject.graph.ops[i]) for i in ids)}: stage {stage} does the work of "
                    f"micro-batch {micro_batch} more than once",
                    help="keep one of them",
                    witness=OpsWitness(tuple(subject.witness_op(i) for i in ids)),
                )


ORDER = RuleDoc(
    code="PP123",
    title="a backward comes before what it needs",
    severity="error",
    explanation=(
        "The backward of a micro-batch reads the activations that its forward kept, and the weight-gradient "
        "operation reads what the input-gradient operation left."
    ),
    wrong="rank 0: 0B0 0F0",
    right="rank 0: 0F0 0B0",
)

_MUST_PRECEDE = (
    (OpKind.FORWARD, OpKind.BACKWARD),
    (OpKind.FORWARD, OpKind.BACKWARD_INPUT),
    (OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT),
)


def _check_order(subject: Subject) -> Iterator[Finding]:
    for rank in range(subject.graph.num_ranks):
        for kinds in _compute_ops(subject, rank).values():
            for earlier, later in _MUST_PRECEDE:
                if earlier in kinds and later in kinds and kinds[later][0] < kinds[earlier][0]:
                    first, second = kinds[later][0], kinds[earlier][0]
                    yield finding(
                        ORDER,
                        f"{subject.coords_text(rank)} runs {subject.graph.ops[first]} before "
                        f"{subject.graph.ops[second]}",
                        help=f"move {subject.graph.ops[second]} before {subject.graph.ops[first]}",
                        witness=OpsWitness((subject.witness_op(first), subject.witness_op(second))),
                    )


FOREIGN = RuleDoc(
    code="PP124",
    title="a rank computes a stage or micro-batch that it does not have",
    severity="error",
    explanation=(
        "A rank owns the stages that the placement gives it, and the schedule has a fixed number of "
        "micro-batches. An operation outside of both has no weights or no data."
    ),
    wrong="rank 0 (stage 0): 0F0 1F0",
    right="rank 0 (stage 0): 0F0",
)


def _check_foreign(subject: Subject) -> Iterator[Finding]:
    num_micro_batches = subject.plan.spec.schedule.num_micro_batches
    for rank in range(subject.graph.num_ranks):
        owned = _owned_stage(subject, rank)
        strangers = [
            op_id
            for (stage, micro_batch), kinds in _compute_ops(subject, rank).items()
            if stage != owned or micro_batch >= num_micro_batches
            for ids in kinds.values()
            for op_id in ids
        ]
        if strangers:
            yield finding(
                FOREIGN,
                f"{subject.coords_text(rank)} owns stage {owned} and micro-batches 0..{num_micro_batches - 1}, "
                f"but runs {', '.join(str(subject.graph.ops[i]) for i in strangers[:8])}",
                help="run the operation on the rank that owns the stage",
                witness=OpsWitness(tuple(subject.witness_op(i) for i in strangers)),
            )


RULES = (
    Rule(MISSING, _check_missing),
    Rule(DOUBLED, _check_doubled),
    Rule(ORDER, _check_order),
    Rule(FOREIGN, _check_foreign),
)
