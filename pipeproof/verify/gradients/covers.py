"""Which parameters a collective below a REDUCE_GRAD sums: by its place among its siblings, or by its elements."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeproof.schedule.derive import packed
from pipeproof.schedule.ops import AXES, KIND_CODE, OpKind
from pipeproof.schedule.optable import IntColumn
from pipeproof.verify.gradients.model import Model

REDUCING = frozenset(KIND_CODE[kind] for kind in (OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER))
"""Codes of the collectives that sum."""

_REDUCE = KIND_CODE[OpKind.REDUCE_GRAD]


class Covers:
    """Which parameters each collective below a REDUCE_GRAD sums, found for all collectives of its parent at once."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._known: dict[int, tuple[int, ...]] = {}
        graph = model.graph
        children = np.flatnonzero((graph.target_kind == _REDUCE) & np.isin(graph.kind, list(REDUCING)))
        families = packed(*(column[children] for column in (graph.rank, graph.stage, graph.axis, graph.parent)))
        order = np.argsort(families, kind="stable")
        self._children, self._families = children[order], families[order]
        self._family_of = dict(zip(children.tolist(), families.tolist(), strict=True))

    def of(self, op: int) -> tuple[int, ...]:
        """The parameters of one collective."""
        if op not in self._known:
            family = self._family_of[op]
            first, last = np.searchsorted(self._families, [family, family + 1])
            self._read(self._children[first:last])
        return self._known[op]

    def _read(self, children: IntColumn) -> None:
        graph, facts = self._model.graph, self._model.facts
        rank, stage = int(graph.rank[children[0]]), int(graph.stage[children[0]])
        axis = AXES[int(graph.axis[children[0]])]
        # What the rank holds with an earlier stage is not summed with this one, unless there are more sums than that.
        for here in (self._model.settled(rank, stage), self._model.parameters_of.get(stage, ())):
            owed: Sequence[int] = [p for p in here if self._model.is_reduced(facts.parameters[p], axis)]
            if (axis == "pp" and not owed) or len(owed) < len(children) == len(here):
                owed = here
            if len(children) <= len(owed):
                break
        index = graph.index[children].tolist()
        if facts.guessed:  # one gradient stands for all of the stage's
            cover = {i: tuple(here) for i in index if i == min(index)}
        elif len(children) < len(owed) and index == list(range(len(children))):
            cover = self._buckets(graph.stop[children].tolist(), owed)
        else:
            cover = {i: (p,) for i, p in enumerate(owed)}
        self._known.update({op: cover.get(i, ()) for op, i in zip(children.tolist(), index, strict=True)})

    def _buckets(self, wanted: Sequence[int], owed: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Each collective takes as many of the next parameters as have its number of elements."""
        result: dict[int, tuple[int, ...]] = {}
        at = 0
        for bucket, numel in enumerate(wanted):
            taken, last = 0, at
            while last < len(owed) and (taken < numel or last == at):
                taken += self._model.facts.parameters[owed[last]].numel or numel
                last += 1
            result[bucket], at = tuple(owed[at:last]), last
        return result
