"""Suggested fix of a deadlock: a change found by search, accepted only if the changed graph is proved.

The cycle shows the ranks: on each of them an operation waits for an earlier
one. Changes are to wait later, to exchange the two operations, or to make one
call of both; at one position, or for every equal pair of the rank. A change may
not move an operation past others of the same stage and micro-batch, nor past
uses of its buffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from pipeproof.comm.channel_models import ChannelModel
from pipeproof.diagnostics.finding import Severity
from pipeproof.schedule.columns import NONE, Row
from pipeproof.schedule.op_table import OpGraph, build_graph
from pipeproof.schedule.ops import SEND_KINDS, TRANSFER_KINDS, UPDATE_KINDS, Op, OpKind
from pipeproof.verify import collectives
from pipeproof.verify import fifo_matching as matching
from pipeproof.verify import message_contents as messages
from pipeproof.verify.deadlock.deadlock_verdict import cycle_of, cyclic_part, deadlocks
from pipeproof.verify.deadlock.wait_columns import rows_of, wait_graph
from pipeproof.verify.subject import Subject

LARGEST = 5_000
"""Operations up to which a change is looked for."""

_MOST_WORK = 150_000
"""Operations in all changed graphs that are checked before the search ends."""

_MOST_CHANGES = 6
"""Maximum number of changes of one suggestion."""


@dataclass(frozen=True)
class _Draft:
    """A graph being changed: its operations by rank in program order, the new batches, and the changes."""

    programs: tuple[tuple[int, ...], ...]
    batches: Mapping[int, int]
    changes: tuple[str, ...] = ()


def suggest_fix(subject: Subject, model: ChannelModel) -> str | None:
    """Changes after which the graph does not deadlock under the model, in words; None if none was found.

    The changed graph is checked again: no cycle of waits, and no new finding of
    the matching rules.
    """
    if subject.graph.num_ops > LARGEST:
        return None
    draft = _Search(subject, model).run()
    return None if draft is None else "; ".join(draft.changes)


class _Search:
    def __init__(self, subject: Subject, model: ChannelModel) -> None:
        self._subject, self._graph, self._model = subject, subject.graph, model
        self._rows = [row for rows in subject.graph.rows() for row in rows]
        self._found = _codes(subject)
        self._tries_left = _MOST_WORK // max(1, subject.graph.num_ops)

    def run(self) -> _Draft | None:
        """Improve by one change at a time, until there is no deadlock or nothing helps."""
        graph = self._graph
        draft = _Draft(tuple(tuple(graph.rank_ops(rank)) for rank in range(graph.num_ranks)), {})
        left = self._left(graph)
        for _ in range(_MOST_CHANGES):
            best: tuple[int, _Draft] | None = None
            for option in self._options(draft):
                if not self._tries_left:
                    return None
                self._tries_left -= 1
                changed = self._build(option)
                still = self._left(changed)
                if still == 0 and self._proved(changed):
                    return option
                if 0 < still < left and (best is None or still < best[0]):
                    best = still, option
            if best is None:
                return None
            left, draft = best
        return None

    def _build(self, draft: _Draft) -> OpGraph:
        rows: list[list[Row]] = [
            [replace(self._rows[i], batch=draft.batches.get(i, self._rows[i].batch)) for i in program]
            for program in draft.programs
        ]
        return build_graph(rows, self._graph.tensors, self._graph.groups)

    def _left(self, graph: OpGraph) -> int:
        """Number of waits on cycles."""
        return int(np.count_nonzero(cyclic_part(wait_graph(rows_of(graph), self._model))))

    def _proved(self, graph: OpGraph) -> bool:
        return not deadlocks(graph, self._model) and _codes(self._subject.with_graph(graph)) <= self._found

    def _options(self, draft: _Draft) -> Iterator[_Draft]:
        """Changes on each rank where the cycle of the draft shows an operation that waits for an earlier one."""
        order = np.concatenate([np.array(program, dtype=np.int64) for program in draft.programs])
        cycle = [int(order[position]) for position in cycle_of(self._build(draft), self._model)]
        stretches = [list(ops) for _, ops in groupby(cycle, key=lambda i: int(self._graph.rank[i]))]
        if len(stretches) > 1 and self._graph.rank[stretches[0][0]] == self._graph.rank[stretches[-1][-1]]:
            stretches[0] = stretches.pop() + stretches[0]
        position = {op_id: i for program in draft.programs for i, op_id in enumerate(program)}
        for everywhere in (False, True):
            for stretch in stretches:
                later, earlier = max(stretch, key=position.__getitem__), min(stretch, key=position.__getitem__)
                for waiting in stretch:
                    if self._rows[waiting].op.kind is OpKind.WAIT and waiting != later:
                        yield from self._moved(draft, waiting, later, "move behind", everywhere=everywhere)
                if later != earlier:
                    if not everywhere:
                        yield from self._one_call(draft, later, earlier)
                    yield from self._moved(draft, later, earlier, "issue before", everywhere=everywhere)

    def _moved(self, draft: _Draft, op: int, other: int, words: str, *, everywhere: bool) -> Iterator[_Draft]:
        """The draft with an operation moved past another; ``words`` are a verb and a preposition for the change."""
        moved = _Move(self._graph, self._rows, op, other).moved(draft, beyond=True, everywhere=everywhere)
        if moved is not None:
            one, anchor = self._rows[op].op, self._rows[other].op
            verb, preposition = words.split()
            what = f"{verb} {one} {preposition} {anchor}"
            if everywhere:
                what = f"{verb} each {_pattern(one)} {preposition} the nearest {_pattern(anchor)}"
            yield self._with_change(moved, draft, op, what)

    def _one_call(self, draft: _Draft, later: int, earlier: int) -> Iterator[_Draft]:
        one, other = self._rows[earlier], self._rows[later]
        if not {one.op.kind, other.op.kind} <= TRANSFER_KINDS or _buffers(one) & _buffers(other):
            return
        if {one.batch, other.batch} != {NONE} or {earlier, later} & draft.batches.keys():
            return
        number = max((row.batch for row in self._rows), default=NONE) + 1 + len(draft.changes)
        together = {**draft.batches, later: number, earlier: number}
        what = f"issue {one.op} and {other.op} as one batch"
        for op_id, anchor in ((later, earlier), (earlier, later)):
            moved = _Move(self._graph, self._rows, op_id, anchor).moved(draft, beyond=False)
            if moved is not None:
                yield self._with_change(replace(moved, batches=together), draft, later, what)

    def _with_change(self, moved: _Draft, draft: _Draft, op_id: int, what: str) -> _Draft:
        rank = self._graph.global_rank[int(self._graph.rank[op_id])]
        return replace(moved, changes=(*draft.changes, f"on rank {rank}, {what}"))


def _codes(subject: Subject) -> Counter[str]:
    """Number of errors of each code that the matching rules find."""
    rules = [rule for rule in (*matching.RULES, *messages.RULES, *collectives.RULES) if not rule.needs_plan]
    return Counter(f.code for rule in rules for f in rule.check(subject) if f.severity is Severity.ERROR)


def _pattern(op: Op) -> Op:
    """An operation without its micro-batch."""
    return op._replace(micro_batch=None, split=None, target=None if op.target is None else _pattern(op.target))


@dataclass(frozen=True)
class _Move:
    """One operation to be moved next to another of its rank, or each equal one next to its nearest anchor."""

    graph: OpGraph
    rows: Sequence[Row]
    op_id: int
    anchor: int

    def moved(self, draft: _Draft, *, beyond: bool, everywhere: bool = False) -> _Draft | None:
        """The draft with the operation next to the anchor, or ``beyond`` it; None if it may not go there."""
        rank = int(self.graph.rank[self.op_id])
        program = list(draft.programs[rank])
        step = 1 if program.index(self.anchor) > program.index(self.op_id) else -1
        moving = [self.op_id]
        if everywhere:
            expected = _pattern(self.rows[self.op_id].op)
            moving = [i for i in program if _pattern(self.rows[i].op) == expected]
        ends = [self._end(program, op_id, step, beyond=beyond, everywhere=everywhere) for op_id in moving]
        if all(end is None for end in ends):
            return None
        for op_id, end in zip(moving, ends, strict=True):
            if end not in (None, op_id):  # it may be there already
                program.remove(op_id)
                program.insert(program.index(end) + (step > 0), op_id)
        programs = (*draft.programs[:rank], tuple(program), *draft.programs[rank + 1 :])
        return replace(draft, programs=programs)

    def _end(self, program: list[int], op_id: int, step: int, *, beyond: bool, everywhere: bool) -> int | None:
        """The operation to put it next to, if it may pass all operations in between."""
        expected = _pattern(self.rows[self.anchor].op)
        before = op_id
        for position in range(program.index(op_id) + step, len(program) if step > 0 else -1, step):
            at = program[position]
            there = at == self.anchor or (everywhere and _pattern(self.rows[at].op) == expected)
            if there and not beyond:
                return before
            if not self._may_pass(op_id, at):
                return None
            if there:
                return at
            before = at
        return None

    def _may_pass(self, op_id: int, other: int) -> bool:
        """Return True if two neighbours work on different data and may be swapped."""
        selected, theirs = self.rows[op_id], self.rows[other]
        if op_id in (self.graph.waits_for[other], self.graph.parent[other]) or other == self.graph.waits_for[op_id]:
            return False
        if {OpKind.STEP, *UPDATE_KINDS} & {selected.op.kind, theirs.op.kind}:
            return False
        if self._same_fifo(op_id, other) or self._buffers(op_id) & self._buffers(other):
            return False
        communicates = {selected.op.kind, theirs.op.kind} <= TRANSFER_KINDS | {OpKind.WAIT}
        same_work = (selected.op.stage, selected.op.micro_batch) == (theirs.op.stage, theirs.op.micro_batch)
        return communicates or not same_work

    def _same_fifo(self, op_id: int, other: int) -> bool:
        """Return True if the order of two operations decides their matching."""
        graph = self.graph
        ends = graph.channel[op_id] != NONE and graph.channel[op_id] == graph.channel[other]
        same_side = (self.rows[op_id].op.kind in SEND_KINDS) == (self.rows[other].op.kind in SEND_KINDS)
        return bool((ends and same_side) or (graph.group[op_id] != NONE and graph.group[op_id] == graph.group[other]))

    def _buffers(self, op_id: int) -> set[str]:
        """The buffers of an operation; for a wait, the buffers of its transfer."""
        ended = int(self.graph.waits_for[op_id])
        return _buffers(self.rows[op_id if ended == NONE else ended])


def _buffers(row: Row) -> set[str]:
    return {*row.reads, *row.writes, *row.frees}
