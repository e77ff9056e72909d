"""Elements of gradients that the collectives below a REDUCE_GRAD sum, and collectives that sum no gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeproof.schedule.columns import REDUCTIONS
from pipeproof.schedule.derive import packed
from pipeproof.schedule.op_table import NONE, IntColumn
from pipeproof.schedule.ops import AXES, KIND_CODE, OpKind
from pipeproof.verify.gradients.expected_gradients import Model
from pipeproof.verify.gradients.gradient_history import named_parameters

REDUCING = frozenset(KIND_CODE[kind] for kind in (OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER))
"""Codes of the collectives that sum."""

_REDUCE, _AVG = KIND_CODE[OpKind.REDUCE_GRAD], REDUCTIONS.index("avg")


@dataclass(frozen=True, slots=True)
class CoveredRange:
    """Elements ``start .. stop`` of a flattened gradient, and their collective.

    ``at`` is the position of the first element in the collective; None if padding leaves it open.
    """

    op: int
    start: int
    stop: int
    at: int | None


class CoveredRanges:
    """Parameters that each collective below a REDUCE_GRAD sums, found for all collectives of its parent at once.

    A gradient that several collectives sum in parts belongs to the last one. ``unexpected`` are, by op id, collectives
    that sum no gradient, with the reason.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._known: dict[int, tuple[int, ...]] = {}
        self._ranges: dict[tuple[int, int], list[CoveredRange]] = {}
        self._noted: set[int] = set()
        self.unexpected: dict[int, str] = {}

    @cached_property
    def _named(self) -> Mapping[int, set[str]]:
        """The gradients that rows name, by op id."""
        return named_parameters(self._model.graph)

    @cached_property
    def _columns(self) -> tuple[IntColumn, IntColumn, Mapping[int, int]]:
        """Collectives by family (the collectives of one parent), the family of each in that order, and by op id."""
        graph = self._model.graph
        children = np.flatnonzero((graph.target_kind == _REDUCE) & np.isin(graph.kind, list(REDUCING)))
        families = packed(*(column[children] for column in (graph.rank, graph.stage, graph.axis, graph.parent)))
        order = np.argsort(families, kind="stable")
        children, families = children[order], families[order]
        return children, families, dict(zip(children.tolist(), families.tolist(), strict=True))

    def of(self, op: int) -> tuple[int, ...]:
        """The parameters of one collective."""
        if op not in self._known:
            children, families, family_of = self._columns
            first, last = np.searchsorted(families, [family_of[op], family_of[op] + 1])
            self._read(children[first:last].tolist())
        return self._known[op]

    def ranges(self, op: int, parameter: int) -> Sequence[CoveredRange]:
        """The parts of a parameter that a collective and its siblings sum; none if not known."""
        self.of(op)
        return self._ranges.get((self._columns[2][op], parameter), ())

    def _read(self, children: Sequence[int]) -> None:
        graph, facts = self._model.graph, self._model.facts
        rank, stage = int(graph.rank[children[0]]), int(graph.stage[children[0]])
        axis = AXES[int(graph.axis[children[0]])]
        named = {name for op in children for name in self._named.get(op, ())}
        of_index: dict[int, int] = {}
        for op in children:
            if op not in self._named:
                of_index.setdefault(int(graph.index[op]), op)
        first = dict(enumerate(of_index.values())) if named else of_index  # unnamed calls have the remaining gradients
        calls = list(of_index.values())
        taken: dict[int, list[int]] = {op: [] for op in calls}
        self._known |= dict.fromkeys(children, ())
        for p in self._model.parameters_of.get(stage, ()):
            for op in children:
                if self._named.get(op) == {facts.parameters[p].name}:
                    self._note_one(op, p)
        if not calls:
            return
        # A parameter that the rank holds with an earlier stage is summed with this one only if there are more sums.
        for held in (self._model.settled(rank, stage), self._model.parameters_of.get(stage, ())):
            params = tuple(p for p in held if facts.parameters[p].name not in named)
            owed: Sequence[int] = [p for p in params if self._model.is_reduced(facts.parameters[p], axis)]
            if (axis == "pp" and not owed) or len(owed) < len(calls) == len(params):
                owed = params
            if len(calls) <= len(owed):
                break
        if facts.guessed:  # one gradient represents all of the stage's
            taken[first[min(first)]] += params
            self._note_guessed(calls, params, taken)
        elif self._is_flat(calls, params, stage):
            self._place(calls, params, taken, {op: int(graph.start[op]) for op in calls})
            self._explain([op for op in calls if op not in self._noted], params, owed, taken)
        elif len(calls) < len(owed) and list(first) == list(range(len(calls))):
            self._place(calls, owed, taken, None)
            empty = [op for op in calls if not taken[op] and op not in self._noted]
            if sum(map(self._numel, calls)) - sum(map(self._numel, empty)) == sum(n or 0 for n in self._numels(owed)):
                self._explain(empty, params, owed, taken)  # else the others are padded, and unknown
        else:
            extra = self._match(first, owed, taken)
            self._explain(extra, params, owed, taken)
        self._known.update(
            {op: tuple(taken[of_index[int(graph.index[op])]]) for op in children if op not in self._named}
        )

    def _numel(self, op: int) -> int:
        return int(self._model.graph.stop[op] - self._model.graph.start[op])

    def _numels(self, parameters: Sequence[int]) -> list[int | None]:
        return [self._model.facts.parameters[p].numel for p in parameters]

    def _note(self, parameter: int, covered: CoveredRange) -> None:
        self._ranges.setdefault((self._columns[2][covered.op], parameter), []).append(covered)
        self._noted.add(covered.op)

    def _note_guessed(self, calls: list[int], params: Sequence[int], taken: dict[int, list[int]]) -> None:
        """Note the elements of a stage's one gradient in its flat buffer; elements of two calls are repeated."""
        starts = self._model.graph.start
        if len(params) != 1 or not all(self._numel(op) for op in calls):
            return
        covered: list[tuple[int, int]] = []
        for op in calls:
            low, high = int(starts[op]), int(starts[op]) + self._numel(op)
            if starts[calls].any() and any(low < stop and start < high for start, stop in covered):
                taken[op] += params
            covered.append((low, high))
            self._note(params[0], CoveredRange(op, low, high, 0))

    def _is_flat(self, calls: list[int], params: Sequence[int], stage: int) -> bool:
        """Return True if the ranges of calls are offsets in the stage's flat buffer: no two of them begin at 0."""
        starts = self._model.graph.start[calls]
        one_at_0 = bool(starts.any()) and int((starts == 0).sum()) <= 1
        return one_at_0 and self._model.flat_starts(stage).keys() >= set(params)

    def _place(
        self, calls: Sequence[int], parameters: Sequence[int], taken: dict[int, list[int]], at: Mapping[int, int] | None
    ) -> None:
        """Assign to each call the parameters whose elements it has: from its offset on, else after the previous call.

        The last call takes the rest of a parameter that several calls have. Elements in two calls are summed twice.
        """
        numels = self._numels(parameters)
        if None in numels or not all(map(self._numel, calls)):
            for op, p in zip(calls, parameters, strict=False):
                taken[op].append(p)
            return
        ends = np.cumsum([numel or 0 for numel in numels])
        starts: Mapping[int, int] = dict(zip(parameters, (ends - numels).tolist(), strict=True))
        if at is None:
            before = np.cumsum([0, *map(self._numel, calls)]).tolist()
            exact = len(calls) == 1 or before[-1] == ends[-1]
            at = dict(zip(calls, before, strict=False))
        else:
            exact, starts = True, self._model.flat_starts(int(self._model.graph.stage[calls[0]]))
        for p, numel in zip(parameters, numels, strict=True):
            assert numel is not None
            covered: list[tuple[int, int]] = []
            last: int | None = None
            for op in calls:
                low, high = max(starts[p], at[op]), min(starts[p] + numel, at[op] + self._numel(op))
                if low >= high:
                    continue
                if any(low < stop and start < high for start, stop in covered):
                    taken[op].append(p)
                else:
                    last = op
                covered.append((low, high))
                self._note(p, CoveredRange(op, low - starts[p], high - starts[p], low - at[op] if exact else None))
            if last is not None:
                taken[last].append(p)

    def _match(self, first: Mapping[int, int], owed: Sequence[int], taken: dict[int, list[int]]) -> list[int]:
        """Assign one parameter to each call, by its number and its number of elements; return the calls left over."""
        unsized = None in self._numels(owed) or not all(map(self._numel, first.values()))
        left, calls = dict.fromkeys(owed), []
        for index, op in first.items():
            if index < len(owed) and (unsized or self._fits(op, owed[index])):
                del left[owed[index]]
                self._take(op, owed[index], taken)
            else:
                calls.append(op)
        for op in [] if unsized else list(calls):
            same = next((p for p in left if self._fits(op, p)), None)
            if same is not None:
                calls.remove(op)
                del left[same]
                self._take(op, same, taken)
        for op, p in [] if unsized else list(zip(calls, left, strict=False)):
            calls.remove(op)
            self._take(op, p, taken)
        return calls

    def _take(self, op: int, parameter: int, taken: dict[int, list[int]]) -> None:
        taken[op].append(parameter)
        self._note_one(op, parameter)

    def _note_one(self, op: int, parameter: int) -> None:
        """Note the elements of a call that sums one parameter."""
        numel, start = self._model.facts.parameters[parameter].numel, int(self._model.graph.start[op])
        if numel is not None and self._numel(op):
            self._note(parameter, CoveredRange(op, start, min(numel, start + self._numel(op)), 0))

    def _fits(self, op: int, parameter: int) -> bool:
        """Return True if a call has the elements of a parameter, padded for the ranks of its group or not."""
        numel, size = self._model.facts.parameters[parameter].numel, self.size(op)
        return numel is not None and self._numel(op) in (numel, -(-numel // size) * size)

    def size(self, op: int) -> int:
        """Members of the group of a call; 1 without a group."""
        graph = self._model.graph
        return 1 if graph.group[op] == NONE else graph.groups[int(graph.group[op])].size

    def _explain(
        self, extra: Sequence[int], params: Sequence[int], owed: Sequence[int], taken: dict[int, list[int]]
    ) -> None:
        """Assign a surplus call to the one gradient of its size: values decide if it is wrong.

        Without such a gradient, or with several, it is unexpected. An average is not: equal gradients stay equal.
        """
        graph, parameters = self._model.graph, self._model.facts.parameters
        for op in extra:
            if self.size(op) == 1 and graph.group[op] != NONE:
                continue
            axis, stage = AXES[int(graph.axis[op])], int(graph.stage[op])
            candidates = [p for p in params if self._fits(op, p)]
            if len(candidates) == 1:
                taken[op].append(candidates[0])
                continue
            is_sharded = any(axis in parameters[p].sharded_over for p in candidates)
            if candidates and graph.reduction[op] == _AVG and not is_sharded:
                continue
            candidates.sort(key=lambda p: p in owed)  # rather one that is not to be summed
            more = f" and {len(candidates) - 1} more have" if len(candidates) > 1 else " has"
            same = f", as many as `{parameters[candidates[0]].name}`{more}" if candidates else ""
            self.unexpected[op] = f"{graph.ops[op]} sums {self._numel(op)} elements{same}, of no gradient: " + (
                f"all {len(owed)} gradients of stage {stage} to be summed over {axis} have other collectives"
                if owed
                else f"no gradient of stage {stage} is to be summed over {axis}"
            )
