"""Limits of formats: a conversion refuses by name what the format lacks and drops nothing silently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipeproof.diagnostics.finding import ExampleKind, RuleDoc
from pipeproof.schedule.columns import NONE, Row
from pipeproof.schedule.formats.text_tokens import row_attributes
from pipeproof.schedule.ops import COMPUTE_KINDS, OpKind

INEXPRESSIBLE = RuleDoc(
    code="PP141",
    title="the target format cannot express this",
    explanation=(
        "Some formats cannot express all schedules. Fleet's strings have whole forwards and backwards on stages that "
        "are assigned to ranks round-robin. PyTorch's CSV also has the two parts of a backward and overlapped pairs. "
        "Our text form has everything. `pipeproof schedule convert` "
        "leaves nothing out by itself; `--only-computations` leaves out transfers, waits, reductions and attributes."
    ),
    wrong="pipeproof schedule convert zero_bubble.csv --as fleet   # I and W are parts of a backward",
    right="pipeproof schedule convert zero_bubble.csv --as text",
    kind=ExampleKind.COMMAND,
)

_BACKWARDS = (OpKind.BACKWARD, OpKind.BACKWARD_INPUT)


class InexpressibleError(ValueError):
    """A format cannot express a part of a schedule.

    ``row`` is the row that cannot be written, None if it is not a single row. ``help`` is the suggested fix.
    """

    def __init__(self, message: str, *, row: Row | None = None, help: str | None = None) -> None:
        super().__init__(message)
        self.row = row
        self.help = help


def steps_of(rows: Sequence[Row], form: str) -> Iterator[tuple[Row, ...]]:
    """Yield the steps of a rank in order: single rows, and overlapped pairs of a forward and a backward.

    ``form`` is the name of the format in messages.

    Raises:
        InexpressibleError: rows are one call, but not such a pair.
    """
    sizes = Counter(row.batch for row in rows)
    position = 0
    while position < len(rows):
        row = rows[position]
        if row.batch == NONE:
            yield (row,)
            position += 1
            continue
        pair = tuple(rows[position : position + 2])
        kinds = [member.op.kind for member in pair if member.batch == row.batch]
        if sizes[row.batch] != 2 or len(kinds) != 2 or kinds[0] is not OpKind.FORWARD or kinds[1] not in _BACKWARDS:
            message = f"{row.op} is one call with others, and {form} has only a forward with a backward behind it"
            raise InexpressibleError(message, row=row)
        yield pair
        position += 2


def require_bare(rows: Sequence[Row], form: str) -> None:
    """Refuse rows with more than their operation and batch.

    Raises:
        InexpressibleError: a row is of one split of its sequences, or has attributes.
    """
    for row in rows:
        if row.op.split is not None:
            raise InexpressibleError(f"{row.op} is of one sequence split, and {form} has no splits", row=row)
        more = row_attributes(replace(row, batch=NONE))
        if more:
            raise InexpressibleError(f"{row.op} has the attributes {more}, and {form} has none", row=row)


def require_computations(rows: Sequence[Row], form: str, help: str) -> None:
    """Refuse rows other than computations.

    Raises:
        InexpressibleError: there is one.
    """
    for row in rows:
        if row.op.kind not in COMPUTE_KINDS:
            raise InexpressibleError(f"{row.op} is not a computation, and {form} has nothing else", row=row, help=help)


def computations_of(rows_by_rank: Sequence[Sequence[Row]]) -> list[list[Row]]:
    """Only the computations and their calls: no transfers, waits, reductions and attributes."""
    computations = []
    for rows in rows_by_rank:
        computed = [row for row in rows if row.op.kind in COMPUTE_KINDS]
        sizes = Counter(row.batch for row in computed)
        batches = (row.batch if sizes[row.batch] > 1 else NONE for row in computed)
        computations.append(
            [Row(row.op, batch=batch, origin=row.origin) for row, batch in zip(computed, batches, strict=True)]
        )
    return computations
