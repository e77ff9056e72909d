"""Views of one parameter's gradient: its changes on one rank, read from its history, and all ranks executed together.

A history is read once for all histories with the same signature; parameters with
the same changes have equal views.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from math import prod

import numpy as np

from pipeproof.schedule.columns import REDUCTIONS
from pipeproof.schedule.op_table import NONE, IntColumn
from pipeproof.schedule.ops import AXES, KIND_CODE, OpKind
from pipeproof.stages.describe.gradient_facts import TOKEN_AXES
from pipeproof.verify.gradients.coefficient import ONE, Coefficient, single_product
from pipeproof.verify.gradients.covered_ranges import REDUCING, CoveredRanges
from pipeproof.verify.gradients.expected_gradients import Model
from pipeproof.verify.gradients.gradient_history import OVERWRITE, GradientHistories, micro_batch_places

_MAX, _AVG = REDUCTIONS.index("max"), REDUCTIONS.index("avg")
_REDUCE, _SCALE, _STEP = (KIND_CODE[kind] for kind in (OpKind.REDUCE_GRAD, OpKind.SCALE_GRAD, OpKind.STEP))
_ALL_TO_ALL, _BARRIER = KIND_CODE[OpKind.ALL_TO_ALL], KIND_CODE[OpKind.BARRIER]


_STRANGER = -2
"""Position of a reduction of a micro-batch that the step does not have."""


class ChangeKind(Enum):
    """Effect of a change on the gradient that the rank holds."""

    ADD = auto()
    OVERWRITE = auto()
    SCALE = auto()
    REDUCE = auto()
    UNEXPECTED = auto()
    """A reduction that is not a sum (a maximum), or an exchange of unequal gradients."""
    UNKNOWN = auto()
    """Reads and writes the gradient in a way that the facts do not describe."""
    STEP = auto()


@dataclass(frozen=True, slots=True)
class Change:
    """One change. ``axis`` of a reduction names the line of the grid that its group is, None for any other ``group``.

    A reduction without a ``group`` is over the whole line. One with a ``position`` sums the contribution of the
    micro-batch at that position in the step, one without it the whole gradient.
    """

    kind: ChangeKind
    addend: int = NONE
    factor: Coefficient = ONE
    axis: str | None = None
    group: int = NONE
    average: bool = False
    position: int = NONE


@dataclass(frozen=True, eq=False)
class View:
    """The changes of one parameter's gradient on one rank, in program order.

    ``ops`` are the op ids of each change (all of an addition's). ``counts[a]``
    is how often addend ``a`` holds each micro-batch of the step, ``stages[a]``
    its stage.
    """

    changes: tuple[Change, ...]
    ops: tuple[IntColumn, ...]
    counts: tuple[IntColumn, ...]
    stages: tuple[int, ...]

    def where(self, *kinds: ChangeKind) -> list[int]:
        """Places of the changes of these kinds."""
        return [i for i, change in enumerate(self.changes) if change.kind in kinds]

    def sums(self, change: Change, addend: int) -> bool:
        """Return True if a reduction sums an addend: any addend, or an addend of its micro-batch."""
        return change.position == NONE or (change.position != _STRANGER and bool(self.counts[addend][change.position]))


_Draft = list[tuple[Change, IntColumn]]
"""The changes of a view with their op ids, up to some row."""


@dataclass(frozen=True, eq=False)
class Reader:
    """Reads histories. ``unreadable`` collects op ids of rows whose scale is invalid, with the reason."""

    model: Model
    histories: GradientHistories
    unreadable: dict[int, str] = field(default_factory=dict)

    def views(self, indices: Sequence[int], parameters: Sequence[int]) -> list[View]:
        """One view for each parameter of the histories of one rank, whose changes are taken together."""
        entries, line, named, addends, segments = self._entries_and_additions(indices)
        drafts: dict[int, _Draft] = {p: [] for p in parameters}
        counts: list[IntColumn] = []
        stages: list[int] = []
        for index in range(len(entries) + 1):
            for stage, ops, count in segments.get(index, ()):
                for p in parameters:
                    if stage in self.model.facts.parameters[p].stages:
                        drafts[p].append((Change(ChangeKind.ADD, len(counts)), ops))
                counts.append(count)
                stages.append(stage)
            if index == len(entries):
                break
            op = int(entries[index])
            if index in addends:
                stage, count = addends[index]
                overwrites = int(self.model.graph.reduction[op]) == OVERWRITE
                factor = self._factor(op, self.model.block_sizes)
                own = Change(ChangeKind.OVERWRITE if overwrites else ChangeKind.ADD, len(counts), factor)
                for p in parameters:
                    if stage in self.model.facts.parameters[p].stages:
                        drafts[p].append((own, entries[index : index + 1]))
                counts.append(count)
                stages.append(stage)
                continue
            names = self.histories.names[int(named[index])]
            for p, change in self._changes(op, int(line[index]), names, drafts):
                drafts[p].append((change, entries[index : index + 1]))
        return [
            View(tuple(change for change, _ in draft), tuple(ops for _, ops in draft), tuple(counts), tuple(stages))
            for draft in drafts.values()
        ]

    def _entries_and_additions(
        self, indices: Sequence[int]
    ) -> tuple[
        IntColumn,
        IntColumn,
        IntColumn,
        dict[int, tuple[int, IntColumn]],
        dict[int, list[tuple[int, IntColumn, IntColumn]]],
    ]:
        """Entries of some histories in program order with their lines and names, and the additions around them.

        The additions are (stage, counts) by the index of an entry that is itself an
        addition, and (stage, op ids, counts) by the index of the next entry.
        """
        histories, graph = self.histories, self.histories.graph
        slices = [histories.entries_of(history) for history in indices]
        where = np.concatenate([np.arange(s.start, s.stop) for s in slices])
        where = where[np.argsort(histories.entries[where], kind="stable")]
        entries = histories.entries[where]
        micro_batches = len(histories.micro_batches)
        segments: dict[int, list[tuple[int, IntColumn, IntColumn]]] = {}
        for history in indices:
            there = histories.adds_of(history)
            adds, position = histories.adds[there], histories.place[there]
            after = np.searchsorted(entries, adds)
            for segment in np.unique(after).tolist():
                selected = after == segment
                count = np.bincount(position[selected & (position != NONE)], minlength=micro_batches)
                segments.setdefault(segment, []).append((int(histories.stage[history]), adds[selected], count))
        addends: dict[int, tuple[int, IntColumn]] = {}
        alone = np.isin(graph.kind[entries], [KIND_CODE[kind] for kind in histories.add_kinds])
        for at in np.flatnonzero(alone).tolist():
            one = int(micro_batch_places(histories.micro_batches, graph.work_item[entries[at : at + 1]])[0])
            count = np.bincount([] if one == NONE else [one], minlength=micro_batches)
            addends[at] = int(graph.stage[entries[at]]), count
        return entries, histories.line[where], histories.named[where], addends, segments

    def _factor(self, op: int, sizes: Mapping[str, Coefficient]) -> Coefficient:
        """Factor of a row; 1, with a note in ``unreadable``, if its scale cannot be read."""
        text = self.model.graph.scales[int(self.model.graph.scale[op])]
        if not text:
            return ONE
        try:
            return self.model.product(single_product(text), sizes)
        except ValueError as error:
            self.unreadable[op] = str(error)
            return ONE

    def _changes(
        self, op: int, line: int, names: frozenset[str], drafts: Mapping[int, _Draft]
    ) -> Iterator[tuple[int, Change]]:
        """(parameter, change) for each parameter that an entry changes."""
        graph, facts = self.model.graph, self.model.facts
        kind, stage = int(graph.kind[op]), int(graph.stage[op])
        of_stage = self.model.parameters_of.get(stage, ()) if names else self.model.settled(int(graph.rank[op]), stage)
        params = [p for p in of_stage if p in drafts]
        if names:
            params = [p for p in params if facts.parameters[p].name in names]
            unknown = names - self._parameter_names
            if unknown:
                self.unreadable[op] = f"the model has no parameter {', '.join(f'`{name}`' for name in sorted(unknown))}"
        if kind == _STEP:
            yield from ((p, Change(ChangeKind.STEP)) for p in params)
        elif kind == _SCALE:
            for p in params if names else [p for p in params if facts.parameters[p].made_by == "backward"]:
                reduced = any(change.kind is ChangeKind.REDUCE for change, _ in drafts[p])
                sizes = self.model.rank_sizes(int(graph.work_item[op]), reduced=reduced)
                yield p, Change(ChangeKind.SCALE, factor=self._factor(op, sizes))
        elif kind == _REDUCE:
            axis = None if graph.axis[op] == NONE else AXES[int(graph.axis[op])]
            if int(graph.group[op]) != NONE or axis not in self._listed:
                owed = self._owed(stage, axis)
                yield from self._reductions(op, axis, line, params if names else [p for p in params if p in owed])
        elif kind in REDUCING:
            selected = params if names else [p for p in self.covered_ranges.of(op) if p in drafts]
            yield from self._reductions(op, AXES[int(graph.axis[op])], line, selected)
        elif graph.target_kind[op] != _REDUCE and kind != _BARRIER:
            axis = AXES[int(graph.axis[op])]
            yield from (
                (p, Change(ChangeKind.UNEXPECTED, axis=axis))
                for p in params
                if not self._is_equal(p, kind, drafts[p], axis)
            )

    def _is_equal(self, p: int, kind: int, draft: _Draft, axis: str) -> bool:
        """Return True if an exchange of gradients over an axis brings each rank the values that it has."""
        if kind == _ALL_TO_ALL:
            return False
        parameter = self.model.facts.parameters[p]
        summed = any(change.kind is ChangeKind.REDUCE and change.axis == axis for change, _ in draft)
        return summed or (axis not in parameter.sharded_over and not self.model.is_reduced(parameter, axis))

    def _owed(self, stage: int, axis: str | None) -> Sequence[int]:
        """The parameters of a stage that a reduction over an axis sums if it lists none."""
        facts, params = self.model.facts, self.model.parameters_of.get(stage, ())
        if axis is None:
            return params
        owed = [p for p in params if self.model.is_reduced(facts.parameters[p], axis)]
        return owed or (params if axis == "pp" or facts.guessed else ())

    def _reductions(
        self, op: int, axis: str | None, line: int, parameters: Sequence[int]
    ) -> Iterator[tuple[int, Change]]:
        graph, grid = self.model.graph, self.model.grid
        sources = (
            (op, int(graph.parent[op])) if graph.target_kind[op] == _REDUCE and graph.parent[op] != NONE else (op,)
        )
        how, place = int(graph.reduction[op]), self._position(op)
        for p in parameters:
            parameter = self.model.facts.parameters[p]
            sizes = self.model.rank_sizes(NONE, reduced=True)
            factor = prod((self._factor(source, sizes) for source in sources), start=ONE)
            if self.model.facts.guessed and axis is not None and not self.model.is_reduced(parameter, axis):
                yield p, Change(ChangeKind.UNKNOWN, axis=axis)
            elif how == _MAX:
                yield p, Change(ChangeKind.UNEXPECTED, axis=axis)
            elif line <= -2:
                yield p, Change(ChangeKind.REDUCE, NONE, factor, None, -2 - line, how == _AVG, place)
            elif line != NONE:
                named = grid.axes[line] if line < len(grid.axes) else None
                if named is not None:
                    yield p, Change(ChangeKind.REDUCE, NONE, factor, named, int(graph.group[op]), how == _AVG, place)
                elif factor != ONE:
                    yield p, Change(ChangeKind.SCALE, NONE, factor)
            else:
                lines = [axis] if axis is not None else [a for a in TOKEN_AXES if a not in parameter.sharded_over]
                for i, one in enumerate(a for a in lines if a in grid.axes):
                    yield p, Change(ChangeKind.REDUCE, NONE, factor if i == 0 else ONE, one, NONE, how == _AVG, place)

    def _position(self, op: int) -> int:
        """The position of a REDUCE_GRAD's micro-batch in the step; ``NONE`` if it sums the whole gradient."""
        graph = self.model.graph
        if graph.work_item[op] == NONE or _REDUCE not in (graph.kind[op], graph.target_kind[op]):
            return NONE
        position = int(micro_batch_places(self.histories.micro_batches, graph.work_item[op : op + 1])[0])
        return _STRANGER if position == NONE else position

    @cached_property
    def _parameter_names(self) -> frozenset[str]:
        return frozenset(parameter.name for parameter in self.model.facts.parameters)

    @cached_property
    def _listed(self) -> frozenset[str]:
        """The axes whose reductions are rows of their own below some REDUCE_GRAD of the graph."""
        graph = self.model.graph
        entries = self.histories.entries
        children = entries[graph.target_kind[entries] == _REDUCE]
        return frozenset(AXES[axis] for axis in np.unique(graph.axis[children]).tolist())

    @cached_property
    def covered_ranges(self) -> CoveredRanges:
        """The parameters of each collective."""
        return CoveredRanges(self.model)


# Sums that the optimizers read: the views of one parameter on all ranks, executed together.
#
# A state is a linear combination of addends. Where one rank represents a whole
# line of ranks that do the same, a sum over the line is noted on the term.


Source = tuple[int, int, frozenset[str]]
"""(rank, addend of its view, axes over whose lines it is summed); rank ``NONE`` for values outside of the gradient."""

State = Mapping[Source, Coefficient]

UNEXPECTED: Source = (NONE, NONE, frozenset())


@dataclass(frozen=True, slots=True)
class Partners:
    """Participants of a reduction of one rank.

    ``ranks`` are the graph's ranks with a copy of the parameter; ``key`` is
    equal for all of them. ``fold`` names the axis whose line each represents.
    ``size`` counts the members; ``unexpected`` is True if some hold no copy.
    """

    ranks: tuple[int, ...]
    key: tuple[object, ...]
    size: Coefficient
    fold: str | None = None
    unexpected: bool = False


@dataclass(slots=True)
class _Runner:
    """One rank on its way through its view."""

    view: View
    at: int = 0
    state: State = field(default_factory=dict)
    final: State | None = None
    calls: dict[tuple[object, ...], int] = field(default_factory=dict)


def interpret(views: Mapping[int, View], partners: Callable[[int, Change], Partners]) -> dict[int, State]:
    """The state that the optimizer of each rank reads, or the last one where there is none.

    The k-th reduction of a rank with some partners meets their k-th with it.
    If ranks wait for each other in a cycle, which other rules report, the
    first of them continues without its partners.
    """
    runners = {rank: _Runner(view) for rank, view in views.items()}
    calls_of_rank = {
        rank: [partners(rank, change) if change.kind is ChangeKind.REDUCE else None for change in view.changes]
        for rank, view in views.items()
    }
    totals = {
        rank: {key: keys.count(key) for key in keys}
        for rank, of_rank in calls_of_rank.items()
        for keys in [[one.key for one in of_rank if one is not None]]
    }
    arrived: dict[tuple[object, ...], set[int]] = {}
    todo = list(runners)
    stuck: dict[int, None] = {}
    while todo or stuck:
        forced = not todo
        rank = todo.pop() if todo else next(iter(stuck))
        stuck.pop(rank, None)
        runner = runners[rank]
        _advance(rank, runner)
        if runner.at == len(runner.view.changes):
            continue
        partners_of_call = calls_of_rank[rank][runner.at]
        assert partners_of_call is not None
        turn = runner.calls.get(partners_of_call.key, 0)
        waiting = arrived.setdefault((partners_of_call.key, turn), set())
        waiting.add(rank)
        expected = {
            one for one in partners_of_call.ranks if totals.get(one, {}).get(partners_of_call.key, 0) > turn
        } | {rank}
        if not forced and waiting < expected:
            stuck[rank] = None
            continue
        met = waiting & expected
        waiting -= met
        _meet([(one, runners[one]) for one in sorted(met)], partners_of_call, views)
        for one in met:
            runners[one].calls[partners_of_call.key] = turn + 1
            stuck.pop(one, None)
            todo.append(one)
    return {rank: runner.state if runner.final is None else runner.final for rank, runner in runners.items()}


def _advance(rank: int, runner: _Runner) -> None:
    """Execute the changes that need no other rank."""
    changes = runner.view.changes
    while runner.at < len(changes) and changes[runner.at].kind is not ChangeKind.REDUCE:
        change = changes[runner.at]
        match change.kind:
            case ChangeKind.ADD:
                runner.state = {**runner.state, (rank, change.addend, frozenset()): change.factor}
            case ChangeKind.OVERWRITE:
                runner.state = {(rank, change.addend, frozenset()): change.factor}
            case ChangeKind.SCALE:
                runner.state = {source: factor * change.factor for source, factor in runner.state.items()}
            case ChangeKind.UNEXPECTED:
                runner.state = {**runner.state, UNEXPECTED: ONE}
            case ChangeKind.STEP:
                runner.final = runner.state if runner.final is None else runner.final
            case _:
                pass
        runner.at += 1


def _meet(together: Sequence[tuple[int, _Runner]], partners_of_call: Partners, views: Mapping[int, View]) -> None:
    total: dict[Source, Coefficient] = {UNEXPECTED: ONE} if partners_of_call.unexpected else {}
    kept: dict[int, State] = {}  # what a sum of one micro-batch leaves as it is
    for rank, runner in together:
        change = runner.view.changes[runner.at]
        others = {one for one in runner.state if one[0] != NONE and not views[one[0]].sums(change, one[1])}
        kept[rank] = {one: runner.state[one] for one in others}
        for (source, addend, summed), factor in runner.state.items():
            target = (source, addend, summed)
            if target in others:
                continue
            if partners_of_call.fold is not None and source != NONE:
                if partners_of_call.fold in summed:
                    factor *= partners_of_call.size
                target = (source, addend, summed | {partners_of_call.fold})
            total[target] = total.get(target, Coefficient(())) + factor
    shared: dict[Coefficient, State] = {}
    for rank, runner in together:
        change = runner.view.changes[runner.at]
        factor = change.factor * (partners_of_call.size.inverse if change.average else ONE)
        if factor not in shared:
            shared[factor] = total if factor == ONE else {source: f * factor for source, f in total.items()}
        runner.state = shared[factor] if not kept[rank] else _added(shared[factor], kept[rank])
        runner.at += 1


def _added(one: State, other: State) -> State:
    total = dict(one)
    for source, factor in other.items():
        total[source] = total.get(source, Coefficient(())) + factor
    return total
