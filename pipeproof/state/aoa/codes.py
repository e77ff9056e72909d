"""18x: what can be wrong with AOA statements, documented."""

from __future__ import annotations

from pipeproof.specs.codes import ExampleKind, RuleDoc
from pipeproof.specs.finding import BadPlanError, Finding, Location, Severity

NOT_READ = RuleDoc(
    code="PP180",
    title="an AOA statement cannot be read",
    severity="error",
    explanation=(
        "A statement is names, an arrow, names, and attributes, and nothing else on its line. Attributes are known "
        "and of their type; there is one operation in a statement (a merge or a split along `axis`, a `permute`, a "
        "cast, or one of fused_qkv, fused_qkv_old, fused_ffn); `$LAYER_ID` and `$EXPERT_ID` stand in all of its names "
        "or in none; several names stand on one side only. Nothing is guessed and nothing is passed over: a statement "
        "that is read otherwise than it was meant puts weights in the wrong place, and a loss curve does not tell."
    ),
    wrong="q.weight, k.weight > qk.weight, axis=1",
    right="q.weight, k.weight -> qk.weight, axis=1",
    kind=ExampleKind.COMMAND,
)
NAMES_NOTHING = RuleDoc(
    code="PP181",
    title="an AOA statement names a tensor that is not there",
    severity="error",
    explanation=(
        "A name to the left of the arrow is of the source, or of the result of a statement before; a pattern "
        "(`$LAYER_ID`, `$EXPERT_ID`, `*`) fits at least one, and the numbers that `*` stands for have no gap. Every "
        "tensor of the target is made by a statement, or is the source's of that name. Paddle's engine passes over a "
        "pattern that fits nothing, and the weights stay what they were initialised to."
    ),
    wrong="model.layer.$LAYER_ID.qkv -> qkv.$LAYER_ID   # the source has model.layers.0.qkv, ..",
    right="model.layers.$LAYER_ID.qkv -> qkv.$LAYER_ID",
    kind=ExampleKind.COMMAND,
)
DOES_NOT_FIT = RuleDoc(
    code="PP182",
    title="sizes or types do not fit an AOA statement",
    severity="error",
    explanation=(
        "A split and the fused forms cut into parts of one size; tensors that are merged have one type, and one shape "
        "but along the axis; a permutation has each dim of the tensor once; a cast begins at the type that the tensor "
        "has; and what comes out has the shape and the type of the target's tensor. A state of an optimizer has its "
        "own type, and keeps it: casts are of weights."
    ),
    wrong="qkv -> q, k, v, axis=1   # of 4 heads and 2 groups: 4, 2 and 2 heads wide",
    right="qkv -> q, k, v, fused_qkv, num_heads=4, num_key_value_groups=2, axis=1",
    kind=ExampleKind.COMMAND,
)
NO_INVERSE = RuleDoc(
    code="PP183",
    title="statements of AOA that cannot be turned round",
    severity="error",
    explanation=(
        "What makes the source's tensors of the target's again exists only where nothing was lost: no tensor removed "
        "or left out, no cast to a type that holds fewer values (float32 to bfloat16 or float16, and between these "
        "two). The inverse is derived statement by statement, and both maps joined are checked to be the identity on "
        "each tensor before it is shown."
    ),
    wrong="a -> b, dtype='bfloat16'   # of float32",
    right="a -> b, dtype='float32'   # of bfloat16: every value has its own",
    kind=ExampleKind.COMMAND,
)
IN_VAIN = RuleDoc(
    code="PP184",
    title="an AOA statement is in vain, or undoes another",
    severity="error",
    explanation=(
        "A name is assigned once, and again only by a statement that reads it (`b^T -> b`). What a statement makes is "
        "of the target, or is read by a later one, or is left out with `-> _`. A tensor that is removed is not read; "
        "a tensor of the source is not covered by another before it was read; a cast changes the type. Elsewhere the "
        "last statement wins: `a -> b` and `b -> a` do not exchange, they make two copies. `a -> a` says that a tensor "
        "stays, as statements of PaddleFormers do."
    ),
    wrong="a -> b\nb -> a",
    right="a -> kept\nb -> a\nkept -> b",
    kind=ExampleKind.COMMAND,
)

AOA_CODES = (NOT_READ, NAMES_NOTHING, DOES_NOT_FIT, NO_INVERSE, IN_VAIN)


class AoaError(BadPlanError):
    """Statements that cannot be read, carried out or turned round."""


def fault(doc: RuleDoc, message: str, place: Location | None, mend: str | None = None) -> Finding:
    """A finding of one of these codes."""
    return Finding(doc.code, Severity.ERROR, message, place, mend)
