"""Writes PyTorch's CSV of a schedule, in both of its formats; ``csv_file`` reads it.

The cells of a rank stand in the order of its program. PyTorch's own files of
the compute-only format also have an empty cell for each time step at which a
rank idles; its reader does not need them, and time steps mean nothing once
computations differ in length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest

from pipeproof.schedule.columns import NONE, Row
from pipeproof.schedule.formats.csv_file import CELL_KINDS
from pipeproof.schedule.formats.inexpressible import InexpressibleError, require_bare, require_computations, steps_of
from pipeproof.schedule.formats.peers import with_peers
from pipeproof.schedule.formats.placed import Findings
from pipeproof.schedule.formats.text_words import row_attributes
from pipeproof.schedule.formats.torch_runtime import runtime_rows
from pipeproof.schedule.formats.torch_transfers import with_transfers
from pipeproof.schedule.formats.torch_weights import with_weights
from pipeproof.schedule.ops import COMPUTE_KINDS, OpKind

_FORM = "PyTorch's CSV"
_COMPUTE_FORM = "PyTorch's compute-only CSV"


def csv_text(rows_by_rank: Sequence[Sequence[Row]]) -> str:
    """The compute-only format: a line for each rank, a cell for each computation or overlapped pair.

    Raises:
        InexpressibleError: there is more than computations and overlapped pairs.
    """
    for rows in rows_by_rank:
        require_computations(rows, _COMPUTE_FORM, "write csv-comms, or leave it out with --only-computations")
        require_bare(rows, _COMPUTE_FORM)
    return _lines(rows_by_rank, _COMPUTE_FORM)


def csv_comms_text(rows_by_rank: Sequence[Sequence[Row]]) -> str:
    """The format with communication.

    Computations alone get what PyTorch adds to its compute-only format: the
    handling of weights (``torch_weights``), then transfers in its order (``torch_transfers``).
    Rows that have communication must be what PyTorch's runtime makes of some
    cells (``torch_runtime``), waits and communicators included; these cells
    are written.

    Raises:
        InexpressibleError: the rows are something else.
    """
    rows = [row for rows in rows_by_rank for row in rows]
    if all(row.op.kind in COMPUTE_KINDS for row in rows):
        require_bare(rows, _FORM)
        num_micro_batches = 1 + max((row.op.micro_batch or 0 for row in rows), default=-1)
        weighted = [list(with_weights(mine, num_micro_batches, _FORM)) for mine in rows_by_rank]
        return _lines(with_transfers(weighted, _FORM), _FORM)
    return _lines(_actions(rows_by_rank), _FORM)


def _actions(rows_by_rank: Sequence[Sequence[Row]]) -> list[list[Row]]:
    """The actions of which PyTorch's runtime makes these rows."""
    actions: list[list[Row]] = []
    for rows in rows_by_rank:
        actions.append([])
        for row in rows:
            if row.op.kind in CELL_KINDS and row.op.axis is None and row.op.split is None:
                actions[-1].append(Row(row.op, batch=row.batch, origin=row.origin))
            elif row.op.kind is not OpKind.WAIT:
                raise InexpressibleError(f"{row.op} is no operation of {_FORM}", row=row)
    stages = [{row.op.stage for row in mine if row.op.kind in COMPUTE_KINDS} for mine in actions]
    num_stages = 1 + max((stage for mine in stages for stage in mine), default=-1)
    bare = [[replace(row, origin=NONE) for row in mine] for mine in actions]
    run = with_peers(
        [[*runtime_rows(mine, own, num_stages)] for mine, own in zip(bare, stages, strict=True)], (), Findings()
    )  # a transfer without a peer is left without: it differs then
    for done, given in zip(run, rows_by_rank, strict=True):
        _require_equal(done, given)
    return actions


def _require_equal(done: Sequence[Row], given: Sequence[Row]) -> None:
    """Refuse the first row that PyTorch's runtime would not do so."""
    last = given[-1] if given else None
    for there, here in zip_longest(done, given):
        if there is not None and here is not None and there == replace(here, origin=NONE):
            continue
        found = "ends" if here is None else f"has {_row_text(here)}"
        wanted = "would end" if there is None else f"would do {_row_text(there)}"
        message = f"the program {found} where PyTorch's runtime {wanted}, and {_FORM} says only what that does"
        mend = "leave communication out with --only-computations: PyTorch adds its own"
        raise InexpressibleError(message, row=here or last, help=mend)


def _row_text(row: Row) -> str:
    return f"{row.op}{row_attributes(row)}"


def _lines(rows_by_rank: Sequence[Iterable[Row]], form: str) -> str:
    return "".join(f"{','.join(_cell(step) for step in steps_of([*rows], form))}\n" for rows in rows_by_rank)


def _cell(step: Sequence[Row]) -> str:
    if len(step) == 1:
        return str(step[0].op)
    forward, backward = step
    return f"({forward.op};{backward.op})OVERLAP_F_B"
