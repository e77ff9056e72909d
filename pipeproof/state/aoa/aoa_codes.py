"""PP180 to PP184: AOA statements."""

from __future__ import annotations

from pipeproof.diagnostics.finding import BadPlanError, ExampleKind, RuleDoc

UNREADABLE = RuleDoc(
    code="PP180",
    title="an AOA statement cannot be read",
    explanation=(
        "A statement is names, an arrow, names, and attributes, and has its line to itself. Attributes must be known "
        "and of their type. A statement has one operation: a merge or a split along `axis`, a `permute`, a cast, or "
        "one of fused_qkv, fused_qkv_old, fused_ffn. `$LAYER_ID` and `$EXPERT_ID` are in all of its names or in none; "
        "only one side has several names. The reader guesses nothing and skips nothing: a statement with another "
        "meaning than intended puts weights into the wrong tensors, and a loss curve does not show it."
    ),
    wrong="q.weight, k.weight > qk.weight, axis=1",
    right="q.weight, k.weight -> qk.weight, axis=1",
    kind=ExampleKind.COMMAND,
)
UNKNOWN_TENSOR = RuleDoc(
    code="PP181",
    title="an AOA statement names an unknown tensor",
    explanation=(
        "A name to the left of the arrow is a tensor of the source, or the result of an earlier statement. A pattern "
        "(`$LAYER_ID`, `$EXPERT_ID`, `*`) matches at least one tensor, and the numbers that `*` matches have no gap. "
        "Every tensor of the target is made by a statement, or is the source's of that name. Paddle's engine skips a "
        "pattern that matches no tensor, and the weights keep their initial values."
    ),
    wrong="model.layer.$LAYER_ID.qkv -> qkv.$LAYER_ID   # the source has model.layers.0.qkv, ..",
    right="model.layers.$LAYER_ID.qkv -> qkv.$LAYER_ID",
    kind=ExampleKind.COMMAND,
)
SIZE_MISMATCH = RuleDoc(
    code="PP182",
    title="sizes or types do not match an AOA statement",
    explanation=(
        "A split and the fused forms need shards of one size. Tensors that are merged have one type, and one shape "
        "except along the axis. A permutation has each dim of the tensor once. A cast starts from the type of the "
        "tensor. A result has the shape and the type of the target's tensor. An optimizer state has a type of its own, "
        "and keeps it: casts apply to weights."
    ),
    wrong="qkv -> q, k, v, axis=1   # of 4 heads and 2 groups: 4, 2 and 2 heads wide",
    right="qkv -> q, k, v, fused_qkv, num_heads=4, num_key_value_groups=2, axis=1",
    kind=ExampleKind.COMMAND,
)
NO_INVERSE = RuleDoc(
    code="PP183",
    title="AOA statements without an inverse",
    explanation=(
        "The inverse restores the source's tensors from the target's. It exists only if nothing is lost: no tensor is "
        "removed, and no cast is to a type that holds fewer values (float32 to bfloat16 or float16, and between these "
        "two). The inverse is derived statement by statement. The composition of both maps is checked to be the "
        "identity on each tensor before the inverse is shown."
    ),
    wrong="a -> b, dtype='bfloat16'   # of float32",
    right="a -> b, dtype='float32'   # of bfloat16: every value has its own",
    kind=ExampleKind.COMMAND,
)
NO_EFFECT = RuleDoc(
    code="PP184",
    title="an AOA statement has no effect, or undoes another",
    explanation=(
        "A name is assigned once, and again only by a statement that reads it (`b^T -> b`). The result of a statement "
        "is a tensor of the target, or is read by a later statement, or is removed with `-> _`. A removed tensor is "
        "not read; a tensor of the source is not overwritten before it is read; a cast changes the type. In Paddle's "
        "engine the last statement wins: `a -> b` and `b -> a` do not exchange, they make two copies. `a -> a` keeps a "
        "tensor, as in statements of PaddleFormers."
    ),
    wrong="a -> b\nb -> a",
    right="a -> kept\nb -> a\nkept -> b",
    kind=ExampleKind.COMMAND,
)

AOA_CODES = (UNREADABLE, UNKNOWN_TENSOR, SIZE_MISMATCH, NO_INVERSE, NO_EFFECT)


class AoaError(BadPlanError):
    """Statements that cannot be read, applied or inverted."""
