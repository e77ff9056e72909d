"""Which names may stand on the two sides of a statement, for each of its operations."""

from __future__ import annotations

from collections.abc import Iterator

from pipeproof.specs.finding import Finding
from pipeproof.state.aoa.codes import NOT_READ, fault
from pipeproof.state.aoa.syntax import NOTHING, Statement

_COUNTS = {
    "fused_qkv": (((1, 3), (3, 1)), "QKV -> Q, K, V or Q, K, V -> QKV"),
    "fused_qkv_old": (((1, 1), (1, 3), (3, 1)), "QKV -> QKV2, QKV -> Q, K, V or Q, K, V -> QKV"),
    "fused_ffn": (((1, 1), (1, 2), (2, 1)), "FFN -> FFN2, FFN -> GATE, UP or GATE, UP -> FFN"),
}
"""By operation, how many names it takes on each side, and how that is written."""


def form_faults(statement: Statement) -> Iterator[Finding]:
    """What cannot be meant, whatever the tensors are: PP180 and PP184."""
    yield from _of_names(statement)
    if any(name.is_nothing for name in (*statement.left, *statement.right)):
        yield from _of_nothing(statement)
        return
    operations = [
        word
        for word, given in (
            ("permute", statement.permutation is not None),
            ("a cast", statement.cast is not None),
            (statement.fused.kind if statement.fused else "", statement.fused is not None),
        )
        if given
    ]
    if len(operations) > 1:
        mend = "write two, and a name between them"
        yield fault(NOT_READ, f"{operations[0]} and {operations[1]} in one statement", statement.place, mend)
    elif not any(name.may_be_many for name in statement.names):
        yield from count_faults(statement, written_many=False)


def count_faults(statement: Statement, *, written_many: bool) -> Iterator[Finding]:
    """What does not go with so many names on each side, once all patterns are replaced.

    ``written_many`` says that a pattern stood for them: it may have found one tensor where there could be many.
    """
    counts, place = (len(statement.left), len(statement.right)), statement.place
    if statement.fused is not None:
        allowed, forms = _COUNTS[statement.fused.kind]
        if counts not in allowed:
            message = f"{statement.fused.kind} with {counts[0]} names to the left and {counts[1]} to the right"
            yield fault(NOT_READ, message, place, f"it is {forms}")
    elif min(counts) > 1:
        mend = "merge into one name, and split that; where names go in pairs, write $EXPERT_ID or $LAYER_ID"
        yield fault(NOT_READ, f"{counts[0]} names to the left and {counts[1]} to the right", place, mend)
    elif max(counts) > 1:
        if statement.permutation is not None or statement.cast is not None:
            yield fault(NOT_READ, "a permutation or a cast is of one tensor", place, "write a statement for each")
        elif statement.axis is None:
            yield fault(NOT_READ, "a merge or a split needs `axis`", place, "write `, axis=0` or `, axis=1`")
    elif statement.axis is not None and not written_many:
        yield fault(NOT_READ, "`axis` is of a merge, a split or a fused form", place, "remove it")


def _of_names(statement: Statement) -> Iterator[Finding]:
    for name in statement.right:
        if name.transposed:
            mend = f"write `A -> {name.text}`, then `{name.text}^T -> {name.text}`"
            yield fault(NOT_READ, f"`{name.text}^T` is a view, and cannot be assigned to", name.place, mend)
    for name in statement.names:
        if name.text.count("*") > 1:
            yield fault(NOT_READ, f"`{name.text}` has two `*`", name.place, "write $LAYER_ID for one of them")
        if len(set(name.ids)) < len(name.ids):
            yield fault(NOT_READ, f"`{name.text}` has `{name.ids[0]}` twice", name.place)
    sets = {frozenset(name.ids) for name in statement.names}
    if len(sets) > 1:
        tags = sorted(frozenset.union(*sets))
        lacking = next(name for name in statement.names if set(name.ids) != set(tags))
        tag = next(tag for tag in tags if tag not in lacking.ids)
        mend = "numbers stand in each name of a statement; `*` stands for all of them in one statement"
        yield fault(NOT_READ, f"`{lacking.text}` has no `{tag}`, and other names have", lacking.place, mend)
    elif {"$LAYER_ID", "$LAYER_ID_OFFSET"} <= set().union(*sets):
        yield fault(NOT_READ, "`$LAYER_ID` and `$LAYER_ID_OFFSET` in one statement", statement.place)


def _of_nothing(statement: Statement) -> Iterator[Finding]:
    sides = (statement.left, statement.right)
    if not statement.names or any(len(side) > 1 for side in sides):
        mend = "`_ -> A` adds a tensor of zeros, `A -> _` leaves one out"
        yield fault(
            NOT_READ, f"`{NOTHING}` stands alone on its side, with one name on the other", statement.place, mend
        )
    elif any(name.may_be_many or name.transposed for name in statement.names):
        yield fault(NOT_READ, f"a pattern with {NOTHING} is of $LAYER_ID and $EXPERT_ID", statement.place)
    elif (statement.axis, statement.permutation, statement.cast, statement.fused) != (None,) * 4:
        yield fault(NOT_READ, f"`{NOTHING}` has no attributes", statement.place, "remove them")
