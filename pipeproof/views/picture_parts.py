"""The parts of a timeline picture, independent of the drawing library: boxes, labels, messages, curves.

x is time in microseconds since the first start, y counts rows downwards: row r has its lane from r to r + 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeproof.schedule.ops import CHILD_KINDS, COLLECTIVE_KINDS, COMPUTE_KINDS, PART_KINDS, UPDATE_KINDS, Op, OpKind
from pipeproof.sim.timeline import COMPUTE_QUEUE, Span
from pipeproof.views.colours import COLLECTIVE, OTHER, colour_of
from pipeproof.views.memory_curves import Curve
from pipeproof.views.picture_rows import RankRow, work_item_text
from pipeproof.views.trace_slices import Slices

MOST_MESSAGES = 160
"""A picture with more messages shows none."""
_LANES = (0.86, 0.74)
"""Height of a row's lane without messages, and where the rest of the row is for them."""
_INNER = 0.2
"""The share of a block's height at its foot that shows the collectives inside of it."""

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


@dataclass(slots=True)
class Parts:
    """Everything that is drawn of the rows: blocks by colour, labels by block, messages between rows.

    ``lane`` is the height of a row's blocks; the rows are 1 apart.
    """

    lane: float
    boxes: dict[str, list[Box]] = field(default_factory=dict)
    """By colour; later colours lie above earlier ones."""
    labels: list[tuple[Box, str, str]] = field(default_factory=list)
    """Free area of a block, its full text, and its colour."""
    messages: list[Box] = field(default_factory=list)
    """From left and top to right and bottom, none where they are too many."""
    kinds: set[OpKind] = field(default_factory=set)
    num_chunks: int = 1
    has_collectives: bool = False
    has_others: bool = False
    has_pairs: bool = False

    @property
    def shortest(self) -> float:
        """A length that nine tenths of all labelled blocks have at least, in microseconds; 0 without any."""
        lengths = [right - left for (left, _, right, _), _, _ in self.labels]
        return float(np.quantile(lengths, 0.1)) if lengths else 0.0


def parts_of(slices: Slices, rows: Sequence[RankRow]) -> Parts:
    """The parts of a picture whose rows are these; a row shows the first of its ranks."""
    shown = _shown_messages(slices, rows)
    parts = Parts(_LANES[bool(shown)])
    parts.messages = [_message(slices, *message, parts.lane) for message in shown]
    by_rank: dict[int, list[Span]] = {row.ranks[0]: [] for row in rows}
    for span in slices.shown:
        is_here = span.queue == COMPUTE_QUEUE or _is_inner(slices.ops[span.op])
        if is_here and span.start < span.end and span.rank in by_rank:
            by_rank[span.rank].append(span)
    inner: list[tuple[str, Box]] = []
    for place, row in enumerate(rows):
        inner += _row(slices, row.ranks[0], by_rank[row.ranks[0]], place, parts)
    for colour, box in inner:  # above everything
        parts.boxes.setdefault(colour, []).append(box)
    return parts


def _row(slices: Slices, rank: int, spans: list[Span], place: int, parts: Parts) -> Iterator[tuple[str, Box]]:
    """Adds a row's blocks; yields what runs inside of them."""
    stages = {stage: chunk for chunk, stage in enumerate(slices.timeline.stages(rank))}
    parts.num_chunks = max(parts.num_chunks, len(stages))
    children = [span for span in spans if _is_inner(slices.ops[span.op])]
    with_children = {(span.step, slices.ops[span.op].target) for span in children}
    in_parts = {(s.step, slices.ops[s.op].target) for s in children if slices.ops[s.op].kind in PART_KINDS}
    blocks: dict[tuple[int, Op | None], Box] = {}
    lane: Box = (0.0, float(place), 0.0, place + parts.lane)

    def add_block(kind: OpKind, computation: Op, box: Box, free: Box) -> None:
        colour = colour_of(kind, stages[computation.stage], len(stages))
        parts.boxes.setdefault(colour, []).append(box)
        parts.kinds.add(kind)
        parts.labels.append((free, f"{kind.value}{work_item_text(computation)}", colour))

    whole = [span for span in spans if slices.ops[span.op].kind in COMPUTE_KINDS]
    for span, above, below in _heights([s for s in whole if (s.step, slices.ops[s.op]) not in in_parts]):
        op = slices.ops[span.op]
        box = _box(slices, span, place + above * parts.lane, place + below * parts.lane)
        blocks[span.step, op] = box
        parts.has_pairs |= below - above < 1
        add_block(op.kind, op, box, (*box[:3], _foot(box)) if (span.step, op) in with_children else box)
    for span in spans:
        op = slices.ops[span.op]
        if op.kind in COMPUTE_KINDS or op.kind is OpKind.WAIT:
            continue
        if op.kind in PART_KINDS:
            assert op.target is not None
            kind = OpKind.BACKWARD_WEIGHT if op.kind is OpKind.WEIGHTS else op.target.kind
            box = _box(slices, span, lane[1], _foot(lane))
            add_block(kind, op.target, box, box)
            continue
        is_collective = op.kind in COLLECTIVE_KINDS | UPDATE_KINDS
        parts.has_collectives |= is_collective
        parts.has_others |= not is_collective
        # A computation that is drawn as its parts has the whole lane.
        around = blocks.get((span.step, op.target), lane) if _is_inner(op) else None
        top, bottom = (_foot(around), around[3]) if around else (lane[1], lane[3])
        yield COLLECTIVE if is_collective else OTHER, _box(slices, span, top, bottom)


def _is_inner(op: Op) -> bool:
    """True for a collective inside a computation, on any queue, and for a part of one."""
    return op.kind in CHILD_KINDS | PART_KINDS and op.target is not None and op.target.kind in COMPUTE_KINDS


def _foot(block: Box) -> float:
    """Top of the foot of a block, the part that shows the operations inside it."""
    _, top, _, bottom = block
    return bottom - _INNER * (bottom - top)


def _heights(spans: Sequence[Span]) -> Iterator[tuple[Span, float, float]]:
    """Each computation with its top and bottom, as shares of the lane: two that run side by side share its height."""
    spans = sorted(spans, key=lambda span: (span.start, span.end, span.step, span.op_id))
    together: list[Span] = []
    for span in [*spans, None]:
        if together and (span is None or span.start >= max(before.end for before in together)):
            for layer, one in enumerate(together):
                yield one, layer / len(together), (layer + 1) / len(together)
            together = []
        if span is not None:
            together.append(span)


def _box(slices: Slices, span: Span, top: float, bottom: float) -> Box:
    return float(slices.us(span.start)), top, float(slices.us(span.end)), bottom


def _shown_messages(slices: Slices, rows: Sequence[RankRow]) -> list[tuple[Span, Span, int, int]]:
    """(send, receive, row of the one, row of the other) of all messages between rows, or none if they are many."""
    place_of = {rank: place for place, row in enumerate(rows) for rank in row.ranks}
    first = {row.ranks[0] for row in rows}
    found = []
    for send, recv in slices.messages:
        if send.rank in first and place_of[send.rank] != place_of[recv.rank]:
            found.append((send, recv, place_of[send.rank], place_of[recv.rank]))
            if len(found) > MOST_MESSAGES:
                return []
    return found


def _message(slices: Slices, send: Span, recv: Span, source: int, target: int, lane: float) -> Box:
    """From the start of a send to the end of its receive, between the edges of the lanes that face each other."""
    down = source < target
    top, bottom = source + (lane if down else 0.0), target + (0.0 if down else lane)
    return float(slices.us(send.start)), top, float(slices.us(recv.end)), bottom


def corners_of(boxes: Sequence[Box]) -> Any:
    """An array [box, corner, x and y] of float64, corners in order around each box."""
    left, top, right, bottom = np.asarray(boxes, dtype=float).T
    return np.stack([np.column_stack(c) for c in ((left, top), (right, top), (right, bottom), (left, bottom))], axis=1)


def steps_of(slices: Slices, curve: Curve, rank: int, until: float) -> tuple[list[float], list[int]]:
    """The corners of a rank's curve: times in microseconds, and the value from each on; the last at ``until``."""
    times, values = [0.0], [0]
    for time, value in curve.ranks[rank]:
        times.append(float(slices.us(time)))
        values.append(value)
    return [*times, until], [*values, values[-1]]
