"""Races and wrong sequences among the uses of each buffer, in columns.

Uses of a buffer are examined in program order. If each use comes after the
previous write or free, and each write or free after all uses since the previous
one, then all conflicting uses are in order. There are as many such pairs as
uses. If a pair is not in order for one of the common reasons, the exact order
decides, and if that contradicts the program, all pairs of the buffer are
examined.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations

import numpy as np

from pipeproof.schedule.derive import BoolColumn
from pipeproof.schedule.op_table import NONE, IntColumn
from pipeproof.schedule.ops import COMPUTE_KINDS, KIND_CODE, RECV_KINDS, TRANSFER_KINDS, OpKind
from pipeproof.verify.lifetime.buffer_uses import Uses, uses_of
from pipeproof.verify.lifetime.happens_before import Order, order_of
from pipeproof.verify.lifetime.tensor_buffers import FREES, WRITES
from pipeproof.verify.subject import Subject

Pair = tuple[int, int]
"""Two places in ``Uses``, in program order."""


@dataclass
class Races:
    """Races that ``find_races`` found, by code, as indices of the searched uses.

    ``racing`` buffers have a race, ``reordered`` buffers an order other than
    the program's. ``unexamined`` counts, by code, pairs that were left
    out because enough races of that code were found.
    """

    pairs: dict[str, list[Pair]] = field(default_factory=dict)
    racing: set[int] = field(default_factory=set)
    reordered: set[int] = field(default_factory=set)
    unexamined: Counter[str] = field(default_factory=Counter)


def neighbours(uses: Uses) -> tuple[IntColumn, IntColumn]:
    """Pairs of uses (indices, earlier and later): if they are ordered, all conflicting uses are."""
    begins, last = uses.last_change
    after_change = np.flatnonzero(last != NONE)
    index = np.arange(len(uses))
    following = np.minimum.accumulate(np.where(uses.changes, index, len(uses))[::-1])[::-1]
    reads = np.flatnonzero(~uses.changes & (following < len(uses)))
    reads = reads[begins[following[reads]] == begins[reads]]
    return np.concatenate([last[after_change], reads]), np.concatenate([after_change, following[reads]])


def find_races(order: Order, uses: Uses, code_of: Callable[[Pair], str | None], *, most: int) -> Races:
    """Every race, named by ``code_of`` (None: ignored); at most ``most`` of one code.

    Linear in uses, plus one walk of the events for each pair that program
    order and waits do not settle.
    """
    races = Races()
    earlier, later = neighbours(uses)
    a, b = uses.op[earlier], uses.op[later]
    unsettled = np.flatnonzero(~order.definitely_before(a, b) | (order.rank[a] != order.rank[b]))
    if uses.shared:
        unsettled = unsettled[~np.isin(uses.buffer[earlier[unsettled]], list(uses.shared))]
    for pair in zip(earlier[unsettled].tolist(), later[unsettled].tolist(), strict=True):
        _check_pair(order, uses, pair, code_of, most, races)
    for buffer in sorted((races.reordered - races.racing) | uses.shared):
        first, last = np.searchsorted(uses.buffer, [buffer, buffer + 1]).tolist()
        for one, other in combinations(range(first, last), 2):
            if uses.changes[one] or uses.changes[other]:
                _check_pair(order, uses, (one, other), code_of, most, races)
    return races


def _check_pair(
    order: Order, uses: Uses, pair: Pair, code_of: Callable[[Pair], str | None], most: int, races: Races
) -> None:
    code = code_of(pair)
    buffer = int(uses.buffer[pair[0]])
    first, second = (int(uses.op[index]) for index in pair)
    if code is None or (order.call[first] != NONE and order.call[first] == order.call[second]):
        return
    if len(races.pairs.get(code, ())) >= most:
        races.unexamined[code] += 1
        races.racing.add(buffer)
        return
    first_end, second_end = (int(uses.end[index]) for index in pair)
    if order.before(first_end, second):
        return
    if order.before(second_end, first):
        races.reordered.add(buffer)
        return
    races.racing.add(buffer)
    races.pairs.setdefault(code, []).append(pair)


def settled(order: Order, uses: Uses, races: Races) -> Uses:
    """The uses of buffers without races, by buffer in their actual order.

    Buffers that collectives of several ranks use together have no such order, and are left out.
    """
    unclear = races.racing | uses.shared
    if not unclear and not races.reordered:
        return uses
    places = np.flatnonzero(~np.isin(uses.buffer, list(unclear)))
    for buffer in sorted(races.reordered - unclear):
        selected = np.flatnonzero(uses.buffer[places] == buffer)
        ops = uses.op[places[selected]].tolist()
        before = [sum(order.before(other, op) for other in ops if other != op) for op in ops]
        places[selected] = places[selected][np.argsort(before, kind="stable")]
    return uses.at(places)


def after_free(uses: Uses) -> IntColumn:
    """Uses (places) of a buffer that was freed and not written since; only a write makes it usable again."""
    _, last = uses.last_change
    after_change = np.flatnonzero(last != NONE)
    gone = after_change[(uses.mode[last[after_change]] & FREES) != 0]
    wrong: IntColumn = gone[uses.reads[gone] | ((uses.mode[gone] & (WRITES | FREES)) == FREES)]
    return wrong


def repeated(uses: Uses, order: Order) -> Uses:
    """The uses of persistent buffers in both steps of ``order``."""
    persistent = uses.at(np.flatnonzero(uses.buffer >= uses.first_persistent))
    twice = persistent.at(np.tile(np.arange(len(persistent)), 2))
    ids = [np.flatnonzero(order.step == step) for step in range(2)]
    op, end = (np.concatenate([of_step[column] for of_step in ids]) for column in (persistent.op, persistent.end))
    return replace(twice, op=op, end=end).at(np.lexsort((op, twice.buffer)))


MOST_PER_CODE = 50
"""Maximum number of races of one code that are named; the rest are counted."""

SENDING, RECEIVING, FREED, UNORDERED, NEXT_STEP = "sending", "receiving", "freed", "unordered", "next step"
"""Kinds of races: each is a rule."""


@dataclass(frozen=True)
class Lifetimes:
    """Everything that is known of the buffers of one subject. ``races`` holds places in ``uses``."""

    subject: Subject
    order: Order
    uses: Uses
    races: Races

    @cached_property
    def in_order(self) -> Uses:
        """The uses of buffers that have no race, in the order in which they happen."""
        return settled(self.order, self.uses, self.races)

    @cached_property
    def covered_elsewhere(self) -> BoolColumn:
        """Mask of the entries of ``in_order`` that need no write before them, or whose write other rules check.

        A stage's gradient is zero when a step begins, and a buffer that only the
        optimizer writes existed before the first step; so did a sum that the
        end of the step prepares for the next. Other rules check what a backward
        reads from its forward, and a stage from the previous one on the same
        rank (PP121 to PP127).
        """
        graph, uses = self.subject.graph, self.in_order
        computes = graph.is_kind(COMPUTE_KINDS)[uses.op]
        kept = uses.is_kept & computes & (graph.kind[uses.op] != KIND_CODE[OpKind.FORWARD])
        local = computes & ~uses.changes & uses.is_made
        update = [KIND_CODE[OpKind.STEP], KIND_CODE[OpKind.GATHER_WEIGHT]]
        by_optimizer = np.isin(graph.kind[uses.op], update) | np.isin(graph.target_kind[uses.op], update)
        return np.asarray(kept | uses.is_gradient | local | by_optimizer | self._left_ready)

    @cached_property
    def unwritten(self) -> IntColumn:
        """Reads (indices in ``in_order``) before every write of a buffer that the program does write or free.

        Uses in ``covered_elsewhere`` count neither as such reads nor as writes.
        """
        uses, ignored = self.in_order, self.covered_elsewhere
        _, last = uses.last_change
        written_at_all = np.isin(uses.buffer, uses.buffer[uses.changes & ~ignored])
        return np.flatnonzero(uses.reads & (last == NONE) & written_at_all & ~ignored)

    @property
    def _left_ready(self) -> BoolColumn:
        """Mask of the first reads of buffers that the step leaves at zero, or as its optimizer sets them."""
        graph, uses = self.subject.graph, self.in_order
        kind = graph.kind[uses.op]
        writes = (uses.mode & WRITES) != 0
        resets = writes & ~uses.reads & (kind == KIND_CODE[OpKind.SCALE_GRAD]) & (graph.scale[uses.op] == 0)
        sets = (resets | (writes & (kind == KIND_CODE[OpKind.STEP]))) & (uses.buffer >= uses.first_named)
        changed = np.flatnonzero(uses.changes)
        last = changed[np.diff(uses.buffer[changed], append=NONE) != 0]  # of each buffer
        ready = np.isin(uses.buffer, uses.buffer[last[sets[last]]])
        return np.asarray(ready & uses.reads & (uses.last_change[1] == NONE))

    @cached_property
    def over_steps(self) -> tuple[Order, Uses, Races]:
        """Persistent buffers over two consecutive steps: races between a use and a use of the next step."""
        graph = self.subject.graph
        persistent = self.uses.at(np.flatnonzero(self.uses.buffer >= self.uses.first_persistent))
        persistent = persistent.at(np.flatnonzero(~np.isin(persistent.buffer, list(self.races.racing))))
        if not len(persistent):
            return self.order, persistent, Races()
        order = order_of(graph, self.subject.backend, num_steps=2)
        uses = repeated(persistent, order)

        def code_of(pair: Pair) -> str | None:
            first, second = (order.step[uses.op[index]] for index in pair)
            return NEXT_STEP if first != second else None

        return order, uses, find_races(order, uses, code_of, most=MOST_PER_CODE)

    @cached_property
    def unwaited(self) -> IntColumn:
        """Transfers on their default queues that have a partner and that nothing waits for.

        A transfer that is waited for before it is posted has a finding of its own
        (PP402) and is left out.
        """
        graph = self.subject.graph
        transfers = graph.is_kind(TRANSFER_KINDS) & (graph.queue == NONE) & (graph.match != NONE)
        waited = np.zeros(graph.num_ops, dtype=bool)
        waited[graph.waits_for[graph.waits_for != NONE]] = True
        ops = np.flatnonzero(transfers & ~waited)
        return ops if not len(ops) else ops[[not self.waited_too_early(op) for op in ops.tolist()]]

    @cached_property
    def _early_waits(self) -> frozenset[tuple[int, int, int, int]]:
        graph = self.subject.graph
        lost = np.flatnonzero((graph.kind == KIND_CODE[OpKind.WAIT]) & (graph.waits_for == NONE))
        columns = (graph.rank, graph.target_kind, graph.stage, graph.work_item)
        return frozenset(zip(*(column[lost].tolist() for column in columns), strict=True))

    def waited_too_early(self, op: int) -> bool:
        """Return True if the program waits for this operation only before it is posted."""
        graph = self.subject.graph
        name = tuple(int(column[op]) for column in (graph.rank, graph.kind, graph.stage, graph.work_item))
        return bool(self._early_waits) and name in self._early_waits


def lifetimes(subject: Subject) -> Lifetimes:
    """The analysis of a subject's buffers; see ``Subject.once``."""
    direct = () if subject.lowered is None else subject.lowered.direct
    order, uses = order_of(subject.graph, subject.backend), uses_of(subject.graph, direct)
    result = Lifetimes(subject, order, uses, Races())

    def code_of(pair: Pair) -> str | None:
        first, second = (int(uses.op[index]) for index in pair)
        if (uses.mode[pair[0]] | uses.mode[pair[1]]) & FREES:
            return FREED
        if order.rank[first] != order.rank[second] or order.queue[first] != NONE:
            return UNORDERED
        if result.waited_too_early(first):
            return None
        return RECEIVING if subject.graph.ops[first].kind in RECV_KINDS else SENDING

    return Lifetimes(subject, order, uses, find_races(order, uses, code_of, most=MOST_PER_CODE))
