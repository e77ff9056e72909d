"""Cause of a gradient that is not the declared sum: the first change that explains it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

import numpy as np

from pipeproof.schedule.op_table import NONE, OpGraph
from pipeproof.schedule.ops import KIND_CODE, OpKind
from pipeproof.stages.describe.gradient_facts import MAIN_LOSS, ParameterGradient
from pipeproof.verify.gradients.coefficient import Coefficient
from pipeproof.verify.gradients.covered_ranges import REDUCING
from pipeproof.verify.gradients.expected_gradients import Model
from pipeproof.verify.gradients.parameter_view import ChangeKind, View
from pipeproof.verify.lifetime.happens_before import Order


class Cause(StrEnum):
    """Cause of a wrong update; the value is the code that reports it."""

    MISSING = "PP601"
    NEEDLESS = "PP602"
    WRONG_GROUP = "PP603"
    EARLY = "PP604"
    LOST = "PP605"
    MAIN_SCALE = "PP606"
    OTHER_SCALE = "PP607"
    COPIES = "PP608"
    EVALUATION = "PP609"
    UNREADABLE = "PP610"
    UNEXPECTED = "PP613"
    ELEMENTS = "PP614"


@dataclass(frozen=True, slots=True)
class Count:
    """Weight of a token that differs from its declared weight.

    ``tokens`` names the tokens. ``found`` and ``declared`` are in the tokens' own
    terms; ``declared`` is None if nothing is declared, and ``like`` names
    the tokens with another weight. ``ops`` are the rows with the wrong scales.
    """

    loss: str
    stage: int
    tokens: str
    found: Coefficient
    declared: Coefficient | None
    declared_text: str
    like: str = ""
    ops: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Problem:
    """One parameter (or, without one, one row) on one rank. ``key`` is equal for problems with one root.

    ``ops`` are the rows to look at; ``fact`` the part of the message for this
    cause; ``fix`` the suggested change. ``other_ranks`` have the same problem.
    """

    cause: Cause
    key: tuple[str, ...]
    rank: int
    stage: int
    fact: str
    fix: str
    parameter: str = ""
    ops: tuple[int, ...] = ()
    count: Count | None = None
    other_ranks: tuple[int, ...] = ()


_ADDS = (ChangeKind.ADD, ChangeKind.OVERWRITE)
_REDUCES = (ChangeKind.REDUCE, ChangeKind.UNEXPECTED)


@dataclass(frozen=True, eq=False)
class HeldGradient:
    """A parameter's gradient: the view of each rank; over ``folded`` axes one rank represents all."""

    parameter: ParameterGradient
    views: Mapping[int, View]
    folded: frozenset[str]


def repeated(view: View, elsewhere: Collection[int] = ()) -> list[int]:
    """Indices of repeated sums over one line of ranks; of two, the later one, or the one in ``elsewhere``."""
    seen: set[tuple[str, int]] = set()
    result = []
    for i in sorted(view.where(ChangeKind.REDUCE), key=lambda i: (i in elsewhere, i)):
        change = view.changes[i]
        if change.axis is not None and not change.average:
            if (change.axis, change.position) in seen:
                result.append(i)
            seen.add((change.axis, change.position))
    return result


def explain(
    model: Model, held: HeldGradient, rank: int, missing_terms: Sequence[str], counts: Sequence[Count]
) -> list[Problem]:
    """The causes of a sum that has ``missing_terms`` or whose tokens ``count`` otherwise; not empty.

    A change that is too early or lost explains all later faults, a reduction over
    other ranks explains missing addends, and all of these explain the weight of
    tokens. If the rank itself makes no mistake, a rank that it sums with does.
    """
    wrong = bool(counts) or "unexpected" in missing_terms
    for one in (rank, *(other for other in held.views if other != rank)):
        explanation = _SumExplanation(model, held, one)
        for causes in (
            [*explanation.early(), *explanation.lost()],
            [*explanation.wrong_groups(missing_terms), *explanation.unwanted(wrong), *explanation.left_out()],
            list(explanation.missing(missing_terms)) if one == rank else [],
        ):
            if causes:
                return causes
        if counts and one == rank:
            return [explanation.scale(count) for count in _apart(counts)]
    return [_SumExplanation(model, held, rank).incomplete()]


def _apart(counts: Sequence[Count]) -> list[Count]:
    """One count per loss, without losses with the error factor of the main loss: one scale is the root of all."""
    first: dict[tuple[str, int], Count] = {}
    for count in counts:
        first.setdefault((count.loss, count.stage), count)
    main = {
        count.found * count.declared.inverse for count in first.values() if count.loss == MAIN_LOSS and count.declared
    }
    return [
        count
        for count in first.values()
        if count.loss == MAIN_LOSS or not count.declared or count.found * count.declared.inverse not in main
    ]


class _SumExplanation:
    """Search in one rank's changes, one kind of mistake at a time."""

    def __init__(self, model: Model, held: HeldGradient, rank: int) -> None:
        self._model, self._held, self._rank = model, held, rank
        self._view = held.views[rank]
        self._stage = self._view.stages[0] if self._view.stages else held.parameter.stages[0]

    def _ops(self, index: int) -> tuple[int, ...]:
        """The first and the last op id of a change."""
        ops = self._view.ops[index]
        return tuple(sorted({int(ops[0]), int(ops[-1])}))

    def _name(self, index: int, *, last: bool = False) -> str:
        return str(self._model.graph.ops[int(self._view.ops[index][-1 if last else 0])])

    def _problem(self, cause: Cause, key: tuple[str, ...], fact: str, fix: str, ops: tuple[int, ...]) -> Problem:
        return Problem(cause, key, self._rank, self._stage, fact, fix, self._held.parameter.name, tuple(sorted(ops)))

    def early(self) -> Iterator[Problem]:
        """Reductions or the step before the last addition, reductions after the step."""
        view = self._view
        adds, reduces, steps = view.where(*_ADDS), view.where(*_REDUCES), view.where(ChangeKind.STEP)
        lates = {
            i: [a for a in adds if a > i and view.sums(view.changes[i], view.changes[a].addend)]
            for i in sorted((*reduces, *steps[:1]))
        }
        first = next((i for i, late in lates.items() if late), None)
        if first is not None:
            late = lates[first][0]
            yield self._problem(
                Cause.EARLY,
                ("add",),
                f"{self._name(first)} comes before {self._name(late, last=True)} has added its share",
                f"move {self._name(first)} behind {self._name(lates[first][-1], last=True)}",
                (*self._ops(first), *self._ops(late)),
            )
        elif steps and reduces and reduces[-1] > steps[0]:
            late = next(i for i in reduces if i > steps[0])
            yield self._problem(
                Cause.EARLY,
                ("step",),
                f"{self._name(steps[0])} reads the gradient before {self._name(late)} has summed it",
                f"move {self._name(steps[0])} behind {self._name(late)}",
                (*self._ops(steps[0]), *self._ops(late)),
            )

    def lost(self) -> Iterator[Problem]:
        """Values that are overwritten, and micro-batches that are added twice."""
        view = self._view
        adds = view.where(*_ADDS)
        for i in view.where(ChangeKind.OVERWRITE):
            before = [a for a in adds if a < i and view.counts[view.changes[a].addend].any()]
            if before:
                yield self._problem(
                    Cause.LOST,
                    ("overwritten",),
                    f"{self._name(i)} writes the gradient instead of adding to it: "
                    f"what {self._span(before)} added is lost",
                    f"let {self._name(i)} add",
                    (*self._ops(before[-1]), *self._ops(i)),
                )
        for stage in sorted(set(view.stages)):
            selected = [a for a in adds if view.stages[view.changes[a].addend] == stage]
            total = np.sum([view.counts[view.changes[a].addend] for a in selected], axis=0)
            twice = np.flatnonzero(total > 1)
            if len(twice):
                micro_batch = int(self._model.micro_batches[twice[0]])
                ops = [
                    int(op) for a in selected for op in view.ops[a] if self._model.graph.work_item[op] == micro_batch
                ]
                names = ", ".join(str(self._model.graph.ops[op]) for op in ops)
                yield self._problem(
                    Cause.LOST,
                    ("twice",),
                    f"micro-batch {self._model.graph.work_item_text(micro_batch)} is added "
                    f"{int(total[twice[0]])} times ({names})",
                    "add every micro-batch once",
                    tuple(ops),
                )

    def _span(self, places: Sequence[int]) -> str:
        first, last = self._name(places[0]), self._name(places[-1], last=True)
        return first if first == last else f"{first} .. {last}"

    def wrong_groups(self, missing_terms: Sequence[str]) -> Iterator[Problem]:
        """Reductions over ranks that are not a line of the mesh, if addends are missing or foreign."""
        if not missing_terms:
            return
        for i in self._view.where(ChangeKind.REDUCE):
            change = self._view.changes[i]
            if change.axis is None and not self._joins_copies(change.group):
                group = self._model.graph.groups[change.group]
                global_rank = self._model.graph.global_rank
                ranks = ", ".join(str(global_rank[rank]) for rank in group.ranks)
                yield self._problem(
                    Cause.WRONG_GROUP,
                    (group.axis,),
                    f"{self._name(i)} sums over ranks {ranks}"
                    + (f" ({group.copies} of each)" if group.copies > 1 else "")
                    + f", which is not the {group.axis} group of rank {global_rank[self._rank]}",
                    f"reduce over {self._line_text(group.axis)}",
                    self._ops(i),
                )

    def _joins_copies(self, group: int) -> bool:
        """Return True if a group has only ranks that hold a copy, this rank among them."""
        ranks = set(self._model.graph.groups[group].ranks)
        return self._rank in ranks and ranks <= self._held.views.keys() and self._model.graph.groups[group].axis == "pp"

    def _line_text(self, axis: str) -> str:
        grid, global_rank = self._model.grid, self._model.graph.global_rank
        if axis == "pp":
            return "the ranks that hold a copy"
        if axis in self._held.folded or axis not in grid.axes:
            return f"all ranks along {axis}"
        return f"ranks {', '.join(str(global_rank[rank]) for rank in grid.line(self._rank, axis))}"

    def unwanted(self, wrong: bool) -> Iterator[Problem]:
        """Reductions that do not belong to the gradient, or a repeated one, if the sum is wrong."""
        view, parameter = self._view, self._held.parameter
        elsewhere = [i for i in view.where(*_REDUCES) if self._is_elsewhere(i)]
        twice = repeated(view, elsewhere)
        needed = self._model.partial_axes(parameter, parameter.partial_axes())
        for i in view.where(*_REDUCES):
            change = view.changes[i]
            if change.kind is ChangeKind.UNEXPECTED and i in elsewhere and self._kind(i) not in REDUCING:
                fact, key = f"{self._name(i)} puts other ranks' gradients in place of this rank's", "exchanged"
            elif change.kind is ChangeKind.UNEXPECTED:
                fact, key = f"{self._name(i)} takes the maximum over {change.axis} where gradients are added", "max"
            elif change.axis in parameter.sharded_over and change.axis is not None and not self._model.facts.guessed:
                fact = f"{self._name(i)} adds up different parts of the weight, which is cut over {change.axis}"
                key = "cut"
            elif i in twice:
                fact = f"{self._name(i)} sums over {change.axis} what is summed over {change.axis} already"
                key = "twice"
            elif wrong and change.axis is not None and change.axis not in (*needed, "pp") and not change.average:
                size = self._model.grid.size(change.axis)
                fact = f"{self._name(i)} adds up {size} equal gradients: every {change.axis} rank has the whole of it"
                key = "equal"
            else:
                continue
            cause = Cause.UNEXPECTED if i in elsewhere else Cause.NEEDLESS
            fact += ", below no REDUCE_GRAD" if i in elsewhere else ""
            yield self._problem(cause, (key, str(change.axis)), fact, f"remove {self._name(i)}", self._ops(i))

    def _is_elsewhere(self, index: int) -> bool:
        """Return True if a reduction is a collective without a REDUCE_GRAD above it."""
        reduce, op = KIND_CODE[OpKind.REDUCE_GRAD], int(self._view.ops[index][0])
        return self._kind(index) != reduce and int(self._model.graph.target_kind[op]) != reduce

    def _kind(self, index: int) -> int:
        return int(self._model.graph.kind[int(self._view.ops[index][0])])

    def missing(self, missing_terms: Sequence[str]) -> Iterator[Problem]:
        """Reductions that are needed and missing: on the ranks that lack a reduction of other ranks."""
        for axis in missing_terms:
            if axis in ("unexpected", "lost"):
                continue
            without = [rank for rank in self._held.views if not self._takes_part(rank, axis)]
            absent = without if 0 < len(without) < len(self._held.views) else []
            explanation = _SumExplanation(self._model, self._held, absent[0]) if absent else self
            yield replace(explanation.lacks(axis, alone=bool(absent)), other_ranks=tuple(absent[1:]))

    def left_out(self) -> Iterator[Problem]:
        """Micro-batches that no reduction over an axis sums, where reductions are of single micro-batches."""
        view, summed = self._view, dict[str, set[int]]()
        for i in view.where(ChangeKind.REDUCE):
            summed.setdefault(str(view.changes[i].axis), set()).add(view.changes[i].position)
        for axis, positions in summed.items():
            for i in view.where(*_ADDS) if NONE not in positions else ():
                if not positions.intersection(np.flatnonzero(view.counts[view.changes[i].addend]).tolist()):
                    fact = f"nothing sums over {axis} what {self._name(i)} adds, as it does for other micro-batches"
                    fix = f"reduce it over {self._line_text(axis)} behind {self._name(i)}"
                    yield self._problem(Cause.MISSING, (axis, "one"), fact, fix, self._ops(i))

    def _takes_part(self, rank: int, axis: str) -> bool:
        """Return True if a rank has a reduction over an axis, or over a group along it."""
        groups = self._model.graph.groups
        return any(
            axis == (change.axis or groups[change.group].axis)
            for change in self._held.views[rank].changes
            if change.kind is ChangeKind.REDUCE
        )

    def lacks(self, axis: str, *, alone: bool) -> Problem:
        """Problem of a gradient that is not summed over an axis; ``alone`` if other ranks sum theirs."""
        steps = self._view.where(ChangeKind.STEP)
        ops = self._ops(steps[0] if steps else len(self._view.ops) - 1) if self._view.ops else ()
        if axis == "pp":
            stages = self._held.parameter.stages
            where = f"stages {', '.join(map(str, stages))}" if len(stages) > 1 else "several ranks"
            fact = f"the weight has copies on {where}, and their gradients are not summed"
            fact += " here, as other ranks do" if alone else ""
            fix = "reduce the gradient over the ranks that hold a copy before the optimizer step"
            return self._problem(Cause.COPIES, ("missing",), fact, fix, ops)
        if alone:
            fact = f"the rank has an addend of it, and does not take part in the sum over {axis} of other ranks"
        elif self._takes_part(self._rank, axis):
            fact = f"not every rank along {axis} takes part in the sum over {axis}"
        else:
            fact = f"each {axis} rank has an addend of it, and nothing sums them over {axis}"
        fix = f"reduce over {self._line_text(axis)} before the optimizer step"
        return self._problem(Cause.MISSING, (axis,), fact, fix, ops)

    def incomplete(self) -> Problem:
        """Problem of a sum that lacks contributions although each rank's changes are correct."""
        return self._problem(
            Cause.MISSING,
            ("share",),
            "the sum that the optimizer reads lacks what other ranks add",
            "let all ranks of a group reduce the same gradients in the same order",
            tuple(op for i in self._view.where(*_REDUCES) for op in self._ops(i)),
        )

    def scale(self, count: Count) -> Problem:
        """Problem of a sum in which only the weight of tokens is wrong."""
        of_main = count.loss == MAIN_LOSS or self._held.parameter.losses == ()
        cause = Cause.MAIN_SCALE if of_main else Cause.OTHER_SCALE
        problem = self._problem(cause, (count.loss, str(count.found)), "", "", ())
        return replace(problem, ops=count.ops, count=count)


_REDUCTIONS = (ChangeKind.REDUCE, ChangeKind.UNKNOWN)


def unordered(graph: OpGraph, order: Order, held: HeldGradient) -> Iterator[Problem]:
    """Pairs of a sum over copies and a neighbouring sum of the gradient that have no definite order."""
    for rank, view in held.views.items():
        for first, second in pairwise(view.where(*_REDUCTIONS)):
            axes = {view.changes[first].axis, view.changes[second].axis}
            if "pp" not in axes or len(axes) == 1:
                continue
            a, b = (int(view.ops[index][-1]) for index in (first, second))
            if order.definitely_before(np.array([a]), np.array([b]))[0] or order.before(a, b):
                continue
            earlier, later = str(graph.ops[a]), str(graph.ops[b])
            yield Problem(
                Cause.COPIES,
                ("unordered",),
                rank,
                int(graph.stage[a]),
                f"nothing keeps {later} from starting before {earlier} is done: they are on different queues",
                f"wait for {earlier} on the queue of {later} before it",
                held.parameter.name,
                (a, b),
            )
