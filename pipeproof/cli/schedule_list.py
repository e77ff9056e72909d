"""``pipeproof schedule list``: every kind of schedule, with the sizes for which it exists."""

from __future__ import annotations

from rich.text import Text

from pipeproof.cli.console import console_for, echo
from pipeproof.diagnostics.text_output import wrapped_text
from pipeproof.schedule.kinds import SCHEDULE_KINDS, Placement, Request, ScheduleKind, sizes_of
from pipeproof.schedule.ops import OpKind
from pipeproof.schedule.programs import Schedule
from pipeproof.views.tables import print_lines, table_lines

_SAMPLE_RANKS, _SAMPLE_MICRO_BATCHES = 4, 8
"""Sizes for which every kind exists: facts of a schedule are read from such a sample."""


def show_kinds() -> None:
    """Print one line of facts for each kind, one for each further variant, and the title below."""
    cells: list[list[str]] = []
    titles = [""]
    for kind in SCHEDULE_KINDS.values():
        sizes = [line for text in _sizes_texts(kind) for line in wrapped_text(text, _MOST_CONDITION).split("\n")]
        facts = (kind.name, _chunks_text(kind), kind.placement.replace("_", " "), _backward_text(_sample(kind)))
        cells += [[*facts, sizes[0]], *(["", "", "", "", text] for text in sizes[1:])]
        titles += [""] * (len(sizes) - 1) + [kind.title]
    console = console_for()
    for line, title in zip(table_lines(_HEADINGS, cells), titles, strict=True):
        print_lines((line,), console)
        if title:
            console.print(Text(f"    {title}"), soft_wrap=True)
    echo(_LEGEND)


_HEADINGS = ("kind", "stages", "placed", "backward", "exists for")
_LEGEND = (
    "\np ranks, m micro-batches; stages of each rank. B is a whole backward, I and W its parts for inputs and "
    "for weights, F+B a forward and a backward that run in parallel. `custom` and `file` are your own schedules."
)
_MOST_CONDITION = 32
"""Columns of a condition; a longer one takes several lines."""


def _sizes_texts(kind: ScheduleKind) -> list[str]:
    """Return the condition of a kind, or of each of its variants."""
    if not kind.variants:
        return [sizes_of(kind.name)]
    return [f"{variant}: {sizes_of(kind.name, variant)}" for variant in kind.variants]


def _chunks_text(kind: ScheduleKind) -> str:
    if kind.max_chunks is None:
        return f"{kind.min_chunks} or more"
    return str(kind.min_chunks) if kind.min_chunks == kind.max_chunks else f"{kind.min_chunks} to {kind.max_chunks}"


def _sample(kind: ScheduleKind) -> Schedule:
    """Return the schedule for few ranks and micro-batches, with two splits if it splits sequences."""
    ranks = range(_SAMPLE_RANKS)
    return kind.generate(
        Request(
            num_ranks=_SAMPLE_RANKS,
            num_micro_batches=_SAMPLE_MICRO_BATCHES,
            num_chunks=kind.min_chunks,
            num_sequence_splits=2 if kind.splits_sequences else 1,
            placement=tuple((rank,) for rank in ranks) if kind.placement is Placement.ANY else None,
        )
    )


def _backward_text(schedule: Schedule) -> str:
    """Return the backwards of a schedule: ``B``, ``I W`` or both, and pairs."""
    kinds = {op.kind for program in schedule.programs for op in program} - {OpKind.FORWARD}
    return " ".join([*sorted(kinds), *(["F+B"] if any(schedule.pairs) else [])])
