"""What happens to one parameter's gradient on one rank: its ledger, read entry by entry.

A ledger is read once for all ledgers with the same signature; parameters that
the same things happen to have equal views.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property

import numpy as np

from pipeproof.schedule.columns import REDUCTIONS
from pipeproof.schedule.ops import AXES, KIND_CODE, OpKind
from pipeproof.schedule.optable import NONE, IntColumn
from pipeproof.stages.describe.gradient_facts import TOKEN_AXES
from pipeproof.verify.gradients.coefficient import ONE, Coefficient, Factors, parse_scale
from pipeproof.verify.gradients.covers import REDUCING, Covers
from pipeproof.verify.gradients.ledgers import OVERWRITE, Ledgers, micro_batch_places
from pipeproof.verify.gradients.model import Model

_MAX, _AVG = REDUCTIONS.index("max"), REDUCTIONS.index("avg")
_REDUCE, _SCALE, _STEP = (KIND_CODE[kind] for kind in (OpKind.REDUCE_GRAD, OpKind.SCALE_GRAD, OpKind.STEP))


class What(Enum):
    """What a move does to the gradient that the rank holds."""

    ADD = auto()
    OVERWRITE = auto()
    SCALE = auto()
    REDUCE = auto()
    SPOIL = auto()
    """A reduction that is no sum: by maximum."""
    TOUCH = auto()
    """Reads and writes it in a way that the facts say nothing of."""
    STEP = auto()


@dataclass(frozen=True, slots=True)
class Move:
    """One move. ``axis`` of a reduction names the line of the grid that its group is, None for any other ``group``.

    A reduction without a ``group`` is over the whole line.
    """

    what: What
    addend: int = NONE
    factor: Coefficient = ONE
    axis: str | None = None
    group: int = NONE
    average: bool = False


@dataclass(frozen=True, eq=False)
class View:
    """The moves of one parameter's gradient on one rank, in program order.

    ``ops`` are the op ids of each move (all of an addition's). ``counts[a]``
    says how often addend ``a`` holds each micro-batch of the step, ``stages[a]``
    of which stage it is.
    """

    moves: tuple[Move, ...]
    ops: tuple[IntColumn, ...]
    counts: tuple[IntColumn, ...]
    stages: tuple[int, ...]

    def where(self, *whats: What) -> list[int]:
        """Places of the moves of these kinds."""
        return [i for i, move in enumerate(self.moves) if move.what in whats]


@dataclass(slots=True)
class _Draft:
    """A view that is being read."""

    moves: list[Move] = field(default_factory=list)
    ops: list[IntColumn] = field(default_factory=list)
    reduced: bool = False

    def add(self, move: Move, ops: IntColumn) -> None:
        self.moves.append(move)
        self.ops.append(ops)
        self.reduced |= move.what is What.REDUCE


@dataclass(frozen=True, eq=False)
class Reader:
    """Reads ledgers. ``unreadable`` collects op ids of rows whose scale means nothing, with the reason."""

    model: Model
    ledgers: Ledgers
    unreadable: dict[int, str] = field(default_factory=dict)

    def views(self, account: Sequence[int], parameters: Sequence[int]) -> list[View]:
        """One view for each parameter of the ledgers of one rank, whose moves are taken together."""
        entries, line, named, addends, segments = self._gathered(account)
        drafts = {p: _Draft() for p in parameters}
        counts: list[IntColumn] = []
        stages: list[int] = []
        for place in range(len(entries) + 1):
            for stage, ops, count in segments.get(place, ()):
                for p in parameters:
                    if stage in self.model.facts.parameters[p].stages:
                        drafts[p].add(Move(What.ADD, len(counts)), ops)
                counts.append(count)
                stages.append(stage)
            if place == len(entries):
                break
            op = int(entries[place])
            if place in addends:
                stage, count = addends[place]
                for p in parameters:
                    if stage in self.model.facts.parameters[p].stages:
                        drafts[p].add(self._own_addition(op, len(counts)), entries[place : place + 1])
                counts.append(count)
                stages.append(stage)
                continue
            names = self.ledgers.names[int(named[place])]
            for p, move in self._moves(op, int(line[place]), names, drafts):
                drafts[p].add(move, entries[place : place + 1])
        return [View(tuple(d.moves), tuple(d.ops), tuple(counts), tuple(stages)) for d in drafts.values()]

    def _gathered(
        self, account: Sequence[int]
    ) -> tuple[
        IntColumn,
        IntColumn,
        IntColumn,
        dict[int, tuple[int, IntColumn]],
        dict[int, list[tuple[int, IntColumn, IntColumn]]],
    ]:
        """Entries of some ledgers in program order with their lines and names, and the additions around them.

        Those are (stage, counts) by the place of an entry that is an addition
        of its own, and (stage, op ids, counts) by the place of the entry that follows.
        """
        ledgers, graph = self.ledgers, self.ledgers.graph
        slices = [ledgers.entries_of(ledger) for ledger in account]
        where = np.concatenate([np.arange(s.start, s.stop) for s in slices])
        where = where[np.argsort(ledgers.entries[where], kind="stable")]
        entries = ledgers.entries[where]
        micro_batches = len(ledgers.micro_batches)
        segments: dict[int, list[tuple[int, IntColumn, IntColumn]]] = {}
        for ledger in account:
            there = ledgers.adds_of(ledger)
            adds, place = ledgers.adds[there], ledgers.place[there]
            after = np.searchsorted(entries, adds)
            for segment in np.unique(after).tolist():
                mine = after == segment
                count = np.bincount(place[mine & (place != NONE)], minlength=micro_batches)
                segments.setdefault(segment, []).append((int(ledgers.stage[ledger]), adds[mine], count))
        addends: dict[int, tuple[int, IntColumn]] = {}
        alone = np.isin(graph.kind[entries], [KIND_CODE[kind] for kind in ledgers.add_kinds])
        for at in np.flatnonzero(alone).tolist():
            one = int(micro_batch_places(ledgers.micro_batches, graph.unit[entries[at : at + 1]])[0])
            count = np.bincount([] if one == NONE else [one], minlength=micro_batches)
            addends[at] = int(graph.stage[entries[at]]), count
        return entries, ledgers.line[where], ledgers.named[where], addends, segments

    def _own_addition(self, op: int, addend: int) -> Move:
        overwrites = int(self.model.graph.reduction[op]) == OVERWRITE
        factor = self._factor(op, self.model.block_sizes)
        return Move(What.OVERWRITE if overwrites else What.ADD, addend, factor)

    def _factor(self, op: int, sizes: Mapping[str, Coefficient]) -> Coefficient:
        """What the row multiplies by; 1, with a note of it, where that cannot be read."""
        text = self.model.graph.scales[int(self.model.graph.scale[op])]
        if not text:
            return ONE
        try:
            parsed: dict[str, Factors] = parse_scale(text)
            if set(parsed) != {""}:
                raise ValueError("only forwards scale one loss apart from the others")  # noqa: TRY301
            return self.model.product(parsed[""], sizes)
        except ValueError as error:
            self.unreadable[op] = str(error)
            return ONE

    def _moves(
        self, op: int, line: int, names: frozenset[str], drafts: Mapping[int, _Draft]
    ) -> Iterator[tuple[int, Move]]:
        """(parameter, move) for each parameter that an entry is about."""
        graph, facts = self.model.graph, self.model.facts
        kind, stage = int(graph.kind[op]), int(graph.stage[op])
        found = self.model.parameters_of.get(stage, ()) if names else self.model.settled(int(graph.rank[op]), stage)
        here = [p for p in found if p in drafts]
        if names:
            here = [p for p in here if facts.parameters[p].name in names]
            unknown = names - self._parameter_names
            if unknown:
                self.unreadable[op] = f"the model has no parameter {', '.join(f'`{name}`' for name in sorted(unknown))}"
        if kind == _STEP:
            yield from ((p, Move(What.STEP)) for p in here)
        elif kind == _SCALE:
            for p in here if names else [p for p in here if facts.parameters[p].made_by == "backward"]:
                sizes = self.model.rank_sizes(int(graph.unit[op]), reduced=drafts[p].reduced)
                yield p, Move(What.SCALE, factor=self._factor(op, sizes))
        elif kind == _REDUCE:
            axis = None if graph.axis[op] == NONE else AXES[int(graph.axis[op])]
            if int(graph.group[op]) != NONE or axis not in self._listed:
                owed = self._owed(stage, axis)
                yield from self._reductions(op, axis, line, here if names else [p for p in here if p in owed])
        elif kind in REDUCING:
            mine = here if names else [p for p in self._covers.of(op) if p in drafts]
            yield from self._reductions(op, AXES[int(graph.axis[op])], line, mine)

    def _owed(self, stage: int, axis: str | None) -> Sequence[int]:
        """The parameters of a stage that a reduction over an axis is about when it lists none."""
        facts, here = self.model.facts, self.model.parameters_of.get(stage, ())
        if axis is None:
            return here
        owed = [p for p in here if self.model.is_reduced(facts.parameters[p], axis)]
        return owed or (here if axis == "pp" or facts.guessed else ())

    def _reductions(
        self, op: int, axis: str | None, line: int, parameters: Sequence[int]
    ) -> Iterator[tuple[int, Move]]:
        graph, grid = self.model.graph, self.model.grid
        sources = (op, int(graph.parent[op])) if graph.parent[op] != NONE else (op,)
        how = int(graph.reduction[op])
        for p in parameters:
            parameter = self.model.facts.parameters[p]
            factor = ONE
            for source in sources:
                factor *= self._factor(source, self.model.rank_sizes(NONE, reduced=True))
            if self.model.facts.guessed and axis is not None and not self.model.is_reduced(parameter, axis):
                yield p, Move(What.TOUCH, axis=axis)
            elif how == _MAX:
                yield p, Move(What.SPOIL, axis=axis)
            elif line <= -2:
                yield p, Move(What.REDUCE, NONE, factor, None, -2 - line, how == _AVG)
            elif line != NONE:
                named = grid.axes[line] if line < len(grid.axes) else None
                if named is not None:
                    yield p, Move(What.REDUCE, NONE, factor, named, int(graph.group[op]), how == _AVG)
                elif factor != ONE:
                    yield p, Move(What.SCALE, NONE, factor)
            else:
                lines = [axis] if axis is not None else [a for a in TOKEN_AXES if a not in parameter.sharded_over]
                for i, one in enumerate(a for a in lines if a in grid.axes):
                    yield p, Move(What.REDUCE, NONE, factor if i == 0 else ONE, one, NONE, how == _AVG)

    @cached_property
    def _parameter_names(self) -> frozenset[str]:
        return frozenset(parameter.name for parameter in self.model.facts.parameters)

    @cached_property
    def _listed(self) -> frozenset[str]:
        """The axes whose reductions are rows of their own below some REDUCE_GRAD of the graph."""
        graph = self.model.graph
        entries = self.ledgers.entries
        children = entries[graph.target_kind[entries] == _REDUCE]
        return frozenset(AXES[axis] for axis in np.unique(graph.axis[children]).tolist())

    @cached_property
    def _covers(self) -> Covers:
        return Covers(self.model)
