"""Contents of the buffers that rows name, followed through two steps of a program.

Only buffers without a race are examined, in the order in which their uses
happen; the rules of lifetimes report races. Tensors that rows do not name are
in the buffers that their kinds imply. The walk is linear in named uses and in
the terms of sums at each addition; lowered plans name no buffers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from pipeproof.schedule.op_table import NONE, OpGraph
from pipeproof.schedule.ops import CHILD_KINDS, KIND_CODE, KINDS, OpKind
from pipeproof.verify.content import (
    ADDENDS,
    ADDERS,
    TENSOR_READERS,
    UNSET,
    UPDATES,
    Change,
    Content,
    Role,
    Share,
    State,
    Term,
    Terms,
    holds,
    input_of,
    is_number,
    result_of,
    suits,
)
from pipeproof.verify.gradients.gradient_history import names_parameter
from pipeproof.verify.lifetime.buffer_uses import Uses
from pipeproof.verify.lifetime.happens_before import Order, event_edges
from pipeproof.verify.lifetime.races import lifetimes
from pipeproof.verify.lifetime.tensor_buffers import FREES, READS, WRITES
from pipeproof.verify.subject import Subject

NUM_STEPS = 2


@dataclass(frozen=True, slots=True)
class WrongRead:
    """An operation reads a buffer that does not hold its input.

    ``own`` is the operation that had written the input there in the same step,
    ``NONE`` if none had.
    """

    op: int
    buffer: int
    content: Content
    step: int
    own: int


@dataclass(frozen=True, slots=True)
class WrongSum:
    """A result that ``reader`` finds ``count`` times in a gradient, not once.

    ``adder`` is the operation that computes it. ``overwriter`` is the one that
    removed it before anything read it, ``NONE`` if none did.
    """

    term: Term
    count: int
    adder: int
    overwriter: int
    reader: int
    buffer: int


@dataclass
class Contents:
    """Findings of the walk.

    ``unused`` are (reduction or scaling of a stage's gradient, optimizer step that does not read its result), and
    ``unset`` (collective, buffer) whose buffer nothing on its rank had written.
    """

    uses: Uses
    wrong: list[WrongRead] = field(default_factory=list)
    sums: list[WrongSum] = field(default_factory=list)
    unused: list[tuple[int, int]] = field(default_factory=list)
    unset: list[tuple[int, int]] = field(default_factory=list)


def contents(subject: Subject) -> Contents:
    """The contents of a subject's named buffers; see ``Subject.once``."""
    analysis = subject.once(lifetimes)
    uses = analysis.in_order
    named = np.flatnonzero(uses.buffer >= uses.first_named)
    outcome = Contents(uses)
    if not len(named):
        return outcome
    parameters = {b for b, (_, name) in enumerate(uses.names, uses.first_named) if names_parameter(name)}
    walk = _Walk(subject.graph, outcome, frozenset(uses.op[analysis.unwritten].tolist()))
    accesses: dict[int, dict[int, int]] = {}
    for op, buffer, mode in zip(*(column[named].tolist() for column in (uses.op, uses.buffer, uses.mode)), strict=True):
        if buffer not in parameters:
            accesses.setdefault(op, {})[buffer] = mode
    ops = sorted({*accesses, *np.flatnonzero(subject.graph.is_kind(UPDATES | ADDERS)).tolist()})
    if analysis.races.reordered:
        ops = _as_they_happen(analysis.order, ops)
    for step in range(NUM_STEPS):
        for op in ops:
            walk.execute(op, accesses.get(op, {}), step)
    return outcome


def _as_they_happen(order: Order, ops: list[int]) -> list[int]:
    """Operations in an order of their starts that holds in every run; unchanged if there is none (a deadlock)."""
    import networkx as nx

    events: nx.DiGraph[int] = nx.DiGraph(event_edges(order).tolist())
    try:
        positions = {event: i for i, event in enumerate(nx.lexicographical_topological_sort(events))}
    except nx.NetworkXUnfeasible:
        return ops
    return sorted(ops, key=lambda op: positions.get(2 * op, op))


class _Walk:
    """The contents of all named buffers on the way through the program."""

    def __init__(self, graph: OpGraph, outcome: Contents, never_set: frozenset[int]) -> None:
        self._graph, self._found, self._never_set = graph, outcome, never_set
        self._contents: dict[int, Content] = defaultdict(lambda: UNSET)
        self._past: dict[int, list[Content]] = defaultdict(list)
        self._updates: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._added: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        self._reported: set[tuple[int, int]] = set()
        self._missed: set[tuple[int, int, int]] = set()
        self._stored: set[tuple[int, int, bool, int, int]] = set()
        self._sums: set[tuple[int, int]] = set()
        self._unknown: set[int] = set()  # buffers of sums with a wrong read: nothing more is reported about them

    def execute(self, op: int, accesses: Mapping[int, int], step: int) -> None:
        """Let one operation read, write and free its buffers."""
        kind = KINDS[self._graph.kind[op]]
        reads = [buffer for buffer, mode in accesses.items() if mode & READS]
        writes = [buffer for buffer, mode in accesses.items() if mode & WRITES]
        before = {buffer: self._contents[buffer] for buffer in reads}
        right = self._suitable(op, before, writes, step)
        if right == before.keys() and not self._has_input(op, before, step):
            right -= {next((buffer for buffer, content in before.items() if not content.terms), reads[0])}
        for buffer, content in before.items():
            self._read(op, kind, buffer, content, step, right=buffer in right, adds=buffer in writes)
        if kind in UPDATES:
            self._note_update(op, kind, reads, writes)
        elif kind in ADDERS:
            self._added[int(self._graph.rank[op]), int(self._graph.stage[op])][int(self._graph.work_item[op])] = op
        sums = [b for b in writes if b in right and kind in ADDERS and (not before[b].terms or before[b].is_gradient)]
        for buffer in writes:
            if result_of(self._graph, op) is None:
                content = self._passed_on(op, kind, buffer, before, step)
            else:
                content = self._computed(op, kind, before[buffer] if buffer in right else None, sums, buffer, step)
            self._write(buffer, content, op, kind, step)
        for buffer, mode in accesses.items():
            if mode & FREES:
                self._contents[buffer] = UNSET

    def _suitable(self, op: int, before: Mapping[int, Content], writes: list[int], step: int) -> set[int]:
        """The buffers whose content an operation may read: its input, and numbers next to it.

        A send, a slice or a gather moves only its tensor, not a number that forwards add up.
        """
        graph, kind = self._graph, KINDS[self._graph.kind[op]]
        right = {
            b
            for b, content in before.items()
            if suits(graph, op, content, step, adds=b in writes)
            and (content.state is not State.ZERO or b in writes or self._own(op, b, step) == NONE)
        }
        has_input = any(before[b].terms for b in right) or (
            graph.stage[op] == 0 or graph.work_item[op] == NONE or kind is not OpKind.FORWARD
        )
        if kind in TENSOR_READERS:
            return right
        return right | {
            b for b, content in before.items() if (has_input or b in writes) and is_number(graph, op, content)
        }

    def _has_input(self, op: int, before: Mapping[int, Content], step: int) -> bool:
        """Return False if the input of an operation with named reads is in a buffer that it does not name."""
        wanted = input_of(self._graph, op)
        if not before or wanted is None:
            return True
        roles, stage, work_item = wanted
        stored = (int(self._graph.rank[op]), step, Role.ACTIVATION in roles, stage, work_item) in self._stored
        is_tensor = KINDS[self._graph.kind[op]] in TENSOR_READERS
        return not stored or any(holds(c, wanted) or (is_tensor and c.terms) for c in before.values())

    def _read(
        self, op: int, kind: OpKind, buffer: int, content: Content, step: int, *, right: bool, adds: bool
    ) -> None:
        """Record one read, and a fault of it."""
        if not right and (op, buffer) not in self._reported and op not in self._never_set:
            self._reported.add((op, buffer))
            self._found.wrong.append(WrongRead(op, buffer, content, step, self._own(op, buffer, step)))
            self._unknown.add(buffer)
        if kind in UPDATES and (content.is_gradient or content.state is State.ZERO):
            for term, overwriter in content.lost.items():
                self._note_sum(WrongSum(term, 0, NONE, overwriter, op, buffer))
        if step == 0 and content is UNSET and kind in CHILD_KINDS and op not in self._never_set:
            self._found.unset.append((op, buffer))
        if not (adds and kind in (*ADDERS, *UPDATES)):
            self._contents[buffer] = replace(content, unread=frozenset())

    def _note_sum(self, wrong: WrongSum) -> None:
        key = (int(self._graph.rank[wrong.reader]), wrong.term.stage, wrong.term.work_item)
        if key not in self._missed:
            self._missed.add(key)
            self._found.sums.append(wrong)

    def _own(self, op: int, buffer: int, step: int) -> int:
        """The operation that wrote the input of ``op``, if it was in the buffer in this step; else NONE."""
        if result_of(self._graph, op) is None:
            return NONE
        for past in reversed(self._past[buffer]):
            if past.step == step and past.terms and suits(self._graph, op, past, step, adds=False):
                return past.writer
        return NONE

    def _note_update(self, op: int, kind: OpKind, reads: list[int], writes: list[int]) -> None:
        """Keep the updates of a stage until its optimizer step; an update without names is of its gradient anywhere."""
        graph = self._graph
        rank, stage = int(graph.rank[op]), int(graph.stage[op])
        if kind is OpKind.STEP:
            held = {b: c for b in reads if (c := self._contents[b]).is_gradient or c.state is State.ZERO}
            updates, added = self._updates.pop((rank, stage), []), self._added.pop((rank, stage), {})
            if held or (reads and (rank, stage) in self._sums):
                self._check_sum(op, stage, held or {reads[0]: UNSET}, updates, added)
        elif (writes or any(self._contents[b].is_gradient for b in reads)) and not self._is_reset(op, kind, reads):
            self._updates[rank, stage].append(op)

    def _check_sum(
        self, op: int, stage: int, held: Mapping[int, Content], updates: list[int], added: Mapping[int, int]
    ) -> None:
        """Compare the gradient that an optimizer step reads with its contributions and changes."""
        if not self._unknown.isdisjoint(held):
            return
        shares = [
            (b, t, share) for b, content in held.items() for t, share in content.terms.items() if t.stage == stage
        ]
        there = {term.work_item for _, term, _ in shares}
        for work_item in sorted(added.keys() - there):
            term = Term(Role.ADDEND, stage, work_item)
            self._note_sum(WrongSum(term, 0, added[work_item], NONE, op, next(iter(held))))
        for buffer, term, share in shares:
            if share.times > 1:
                self._note_sum(WrongSum(term, share.times, added.get(term.work_item, NONE), NONE, op, buffer))
        passed = {change for _, _, share in shares for change in share.changes}
        for update in updates:
            if self._change(update) not in passed and (update, NONE) not in self._reported:
                self._reported.add((update, NONE))
                self._found.unused.append((update, op))

    def _is_reset(self, op: int, kind: OpKind, reads: Iterable[int]) -> bool:
        return kind is OpKind.SCALE_GRAD and not reads and self._graph.scale[op] == 0

    def _change(self, op: int) -> Change:
        graph = self._graph
        return int(graph.kind[op]), int(graph.axis[op]), int(graph.reduction[op]), int(graph.scale[op])

    def _passed_on(self, op: int, kind: OpKind, buffer: int, reads: Mapping[int, Content], step: int) -> Content:
        """The content that an operation leaves in a buffer if it computes nothing itself."""
        if kind is OpKind.STEP:
            return Content(writer=op, step=step)  # set by the optimizer: there from the start of the next step
        if self._is_reset(op, kind, reads):
            return Content(State.ZERO, writer=op, step=step)
        sources = list(reads.values()) or ([self._contents[buffer]] if kind in UPDATES or self._is_inside(op) else [])
        terms = _joined(sources)
        if not terms:
            return Content(State.OTHER, writer=op, step=step)
        if kind in UPDATES or self._is_inside(op):
            update = op if kind in UPDATES else int(self._graph.parent[op])
            terms = _changed(terms, self._change(update), int(self._graph.stage[op]))
        lost = {term: by for source in sources for term, by in source.lost.items()}
        return Content(State.OTHER, terms, op, max(source.step for source in sources), frozenset(terms), lost)

    def _is_inside(self, op: int) -> bool:
        """Return True for a collective of a reduction of gradients."""
        parent = int(self._graph.parent[op])
        return parent != NONE and self._graph.kind[parent] == KIND_CODE[OpKind.REDUCE_GRAD]

    def _computed(
        self, op: int, kind: OpKind, added: Content | None, sums: Sequence[int], buffer: int, step: int
    ) -> Content:
        """A result alone, or added to the content: a gradient, zeros, or a number of the same rank.

        ``sums`` are the buffers that the operation adds to; a backward's other results go to the previous stage.
        """
        result = result_of(self._graph, op)
        assert result is not None
        if buffer in sums:
            result = result._replace(role=Role.ADDEND)
            self._sums.add((int(self._graph.rank[op]), result.stage))
        elif sums and result.role is Role.EITHER:
            result = result._replace(role=Role.INPUT_GRADIENT)
        if result.role not in ADDENDS:
            tensor = result.role is Role.ACTIVATION, result.stage, result.work_item
            self._stored.add((int(self._graph.rank[op]), step, *tensor))
        alone = Content(State.OTHER, {result: Share()}, op, step, frozenset({result}))
        if added is None or not (buffer in sums or (kind is OpKind.FORWARD and is_number(self._graph, op, added))):
            return alone
        return replace(alone, terms=_joined([added, alone]), unread=added.unread | {result}, lost=added.lost)

    def _write(self, buffer: int, content: Content, op: int, kind: OpKind, step: int) -> None:
        old = self._contents[buffer]
        gone = {t: op for t in old.unread if t.role in ADDENDS and t not in content.terms}
        if kind is OpKind.STEP or old.step != step:
            gone = {}
        elif old.lost and not content.lost:
            gone = {**old.lost, **gone}
        if gone:
            content = replace(content, lost={**content.lost, **gone})
        if old.terms:
            self._past[buffer].append(old)
        self._contents[buffer] = content


def _joined(sources: Iterable[Content]) -> Terms:
    terms: dict[Term, Share] = {}
    for source in sources:
        for term, share in source.terms.items():
            there = terms.get(term, Share(0))
            terms[term] = Share(there.times + share.times, there.changes | share.changes)
    return MappingProxyType(terms)


def _changed(terms: Terms, change: Change, stage: int) -> Terms:
    """The terms with a change of the gradient of ``stage`` noted."""
    return MappingProxyType(
        {
            term: share._replace(changes=share.changes | {change}) if term.stage == stage else share
            for term, share in terms.items()
        }
    )
