"""What the lifetime rules share about one subject: its order, the uses of its buffers, and what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeproof.schedule.derive import BoolColumn
from pipeproof.schedule.ops import COMPUTE_KINDS, KIND_CODE, RECV_KINDS, TRANSFER_KINDS, OpKind
from pipeproof.schedule.optable import NONE, IntColumn
from pipeproof.verify.lifetime.order import Order, order_of
from pipeproof.verify.lifetime.races import Pair, Races, find_races, repeated, settled
from pipeproof.verify.lifetime.tensors import FREES
from pipeproof.verify.lifetime.uses import Uses, uses_of
from pipeproof.verify.subject import Subject

MOST_PER_CODE = 50
"""As many races of one code are named; the rest are counted. One is enough to refuse a plan."""

SENDING, RECEIVING, FREED, UNORDERED, NEXT_STEP = "sending", "receiving", "freed", "unordered", "next step"
"""What a race is about: each is a rule."""


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
    def said_elsewhere(self) -> BoolColumn:
        """Which entries of ``in_order`` need no write before them, or none that is looked for here.

        A stage's gradient is zero when a step begins, and what the optimizer
        alone writes was there before the first step. What a forward keeps for
        its backward, and one stage for the next on the same rank, is a matter
        of completeness (PP121 to PP127).
        """
        graph, uses = self.subject.graph, self.in_order
        local = graph.is_kind(COMPUTE_KINDS)[uses.op] & ~uses.changes & uses.is_made
        update = [KIND_CODE[OpKind.STEP], KIND_CODE[OpKind.GATHER_WEIGHT]]
        by_optimizer = np.isin(graph.kind[uses.op], update) | np.isin(graph.target_kind[uses.op], update)
        return np.asarray(uses.is_kept | uses.is_gradient | local | by_optimizer)

    @cached_property
    def over_steps(self) -> tuple[Order, Uses, Races]:
        """The same for two steps in a row, of what lasts: races between a use and one of the next step."""
        graph = self.subject.graph
        lasting = self.uses.at(np.flatnonzero(self.uses.buffer >= self.uses.first_lasting))
        lasting = lasting.at(np.flatnonzero(~np.isin(lasting.buffer, list(self.races.racing))))
        if not len(lasting):
            return self.order, lasting, Races()
        order = order_of(graph, self.subject.backend, num_steps=2)
        uses = repeated(lasting, order)

        def code_of(pair: Pair) -> str | None:
            first, second = (order.step[uses.op[place]] for place in pair)
            return NEXT_STEP if first != second else None

        return order, uses, find_races(order, uses, code_of, most=MOST_PER_CODE)

    @cached_property
    def unwaited(self) -> IntColumn:
        """Transfers on their default queues that have a partner and that nothing waits for.

        One that is waited for before it is posted has a finding of its own
        (PP402) and is left out.
        """
        graph = self.subject.graph
        transfers = graph.is_kind(TRANSFER_KINDS) & (graph.queue == NONE) & (graph.match != NONE)
        waited = np.zeros(graph.num_ops, dtype=bool)
        waited[graph.waits_for[graph.waits_for != NONE]] = True
        found = np.flatnonzero(transfers & ~waited)
        return found if not len(found) else found[[not self.waited_too_early(op) for op in found.tolist()]]

    @cached_property
    def _early_waits(self) -> frozenset[tuple[int, int, int, int]]:
        graph = self.subject.graph
        lost = np.flatnonzero((graph.kind == KIND_CODE[OpKind.WAIT]) & (graph.waits_for == NONE))
        columns = (graph.rank, graph.target_kind, graph.stage, graph.unit)
        return frozenset(zip(*(column[lost].tolist() for column in columns), strict=True))

    def waited_too_early(self, op: int) -> bool:
        """Whether the program waits for this operation only where it is not under way yet."""
        graph = self.subject.graph
        name = tuple(int(column[op]) for column in (graph.rank, graph.kind, graph.stage, graph.unit))
        return bool(self._early_waits) and name in self._early_waits


def lifetimes(subject: Subject) -> Lifetimes:
    """The analysis of a subject's buffers; see ``Subject.once``."""
    order, uses = order_of(subject.graph, subject.backend), uses_of(subject.graph)
    found = Lifetimes(subject, order, uses, Races())

    def code_of(pair: Pair) -> str | None:
        first, second = (int(uses.op[place]) for place in pair)
        if (uses.mode[pair[0]] | uses.mode[pair[1]]) & FREES:
            return FREED
        if order.rank[first] != order.rank[second] or order.queue[first] != NONE:
            return UNORDERED
        if found.waited_too_early(first):
            return None
        return RECEIVING if subject.graph.ops[first].kind in RECV_KINDS else SENDING

    return Lifetimes(subject, order, uses, find_races(order, uses, code_of, most=MOST_PER_CODE))
