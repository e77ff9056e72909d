"""All problems of a subject's gradients: histories are read, interpreted together and checked.

If all ranks of a stage do the same, one of them is checked for all; stages
with equal parameters and equal histories are run once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from pipeproof.schedule.op_table import NONE
from pipeproof.schedule.ops import OpKind
from pipeproof.verify.gradients.coefficient import Coefficient
from pipeproof.verify.gradients.expected_gradients import ADDS, Model, changes_gradients, model_of, read_sites
from pipeproof.verify.gradients.explain_sum import Cause, Count, HeldGradient, Problem, explain, unordered
from pipeproof.verify.gradients.gradient_history import GradientHistories, read_histories
from pipeproof.verify.gradients.kept_elements import KEPT, UNSUMMED, KeptElements
from pipeproof.verify.gradients.parameter_view import Change, Partners, Reader, State, interpret
from pipeproof.verify.gradients.verdict_of_update import UpdateChecker, Verdict
from pipeproof.verify.lifetime.races import lifetimes

if TYPE_CHECKING:
    from pipeproof.verify.subject import Subject


def diagnose(subject: Subject) -> tuple[Problem, ...]:
    """All faults of the gradients that the optimizer of each rank reads, or of the losses of an evaluation.

    Raises:
        ValueError: the facts that are given with the graph do not fit together.
    """
    model = model_of(subject)
    sites = read_sites(model)
    checker = UpdateChecker(model, sites)
    problems = [_unreadable(model, op, why) for op, why in sorted(sites.unreadable.items())]
    graph = model.graph
    if not graph.is_kind(ADDS).any():
        problems += [_of_evaluation(model, count) for count in checker.evaluation()]
        return tuple(problems)
    if not changes_gradients(graph):  # a program without operations on its gradients
        return tuple(problems)
    unexpected: dict[int, str] = {}
    for kinds, made_by in ((ADDS, "backward"), (frozenset({OpKind.FORWARD}), "forward")):
        selected = [p for p, parameter in enumerate(model.facts.parameters) if parameter.made_by == made_by]
        if selected:
            histories = read_histories(graph, model.grid, kinds, model.micro_batches)
            reader = Reader(model, histories)
            search = _Search(
                subject, model, checker, histories, reader, KeptElements(subject, model, reader.covered_ranges)
            )
            problems += search.problems(selected)
            problems += [_unreadable(model, op, why) for op, why in sorted(search.reader.unreadable.items())]
            unexpected |= search.reader.covered_ranges.unexpected
    problems += [_unexpected(model, op, why) for op, why in sorted(unexpected.items())]
    if any(problem.key[0] == UNSUMMED for problem in problems):  # elements that one rank lacks, another keeps in vain
        problems = [problem for problem in problems if problem.key[0] != KEPT]
    return tuple(problems)


def _unreadable(model: Model, op: int, why: str) -> Problem:
    graph = model.graph
    help_ = "name sizes that the plan has, and losses that its stages compute"
    return Problem(Cause.UNREADABLE, (why,), int(graph.rank[op]), int(graph.stage[op]), why, help_, ops=(op,))


def _unexpected(model: Model, op: int, why: str) -> Problem:
    """Problem of a collective that sums no gradient; ranks with the same collective share it."""
    graph, rank = model.graph, int(model.graph.rank[op])
    same = np.logical_and.reduce(
        [c == c[op] for c in (graph.kind, graph.stage, graph.axis, graph.index, graph.target_kind)]
    )
    others = tuple(one for one in np.unique(graph.rank[same]).tolist() if one != rank)
    help_ = f"remove {graph.ops[op]}, or name the gradient that it sums: writes=grad[NAME]"
    return Problem(Cause.UNEXPECTED, (why,), rank, int(graph.stage[op]), why, help_, ops=(op,), other_ranks=others)


def _of_evaluation(model: Model, count: Count) -> Problem:
    key = (count.loss, str(count.found))
    rank = int(model.graph.rank[count.ops[0]]) if count.ops else 0
    return Problem(Cause.EVALUATION, key, rank, count.stage, "", "", ops=count.ops, count=count)


@dataclass(frozen=True, eq=False)
class _Search:
    """Goes through the parameters of one kind of histories."""

    subject: Subject
    model: Model
    checker: UpdateChecker
    histories: GradientHistories
    reader: Reader
    elements: KeptElements
    _right: set[tuple[object, ...]] = field(default_factory=set)

    def problems(self, parameters: Sequence[int]) -> Iterator[Problem]:
        """All problems, by the stages of the parameters."""
        by_stages: dict[tuple[int, ...], list[int]] = {}
        for p in parameters:
            by_stages.setdefault(self.model.facts.parameters[p].stages, []).append(p)
        for stages, selected in sorted(by_stages.items()):
            indices_by_rank: dict[int, list[int]] = {}
            for stage in stages:
                for history in self.histories.by_stage.get(stage, ()):
                    indices_by_rank.setdefault(int(self.histories.rank[history]), []).append(history)
            if len(stages) == 1 and self._is_uniform(
                list(indices_by_rank), [one for a in indices_by_rank.values() for one in a]
            ):
                yield from self._of_uniform_stage(stages[0], indices_by_rank, selected)
            elif indices_by_rank:
                yield from self._of_ranks(
                    indices_by_rank, selected, self.model.grid.folded, self._partners_among(indices_by_rank)
                )

    def _is_uniform(self, ranks: Sequence[int], histories: Sequence[int]) -> bool:
        """Return True if the ranks are a whole grid except for ``pp``, and all do the same over whole lines of it."""
        grid, lines = self.model.grid, self.histories.line
        if not ranks or self.subject.facts.updates:
            return False
        others = [i for i, axis in enumerate(grid.axes) if axis != "pp"]
        places = np.unique(grid.coords[ranks][:, others], axis=0)
        expected = 1
        for axis in grid.axes:
            expected *= 1 if axis == "pp" or axis in grid.folded else int(grid.size(axis).number or 0)
        pp = grid.axes.index("pp") if "pp" in grid.axes else NONE
        entries = [self.histories.entries_of(one) for one in histories]
        return (
            len(places) == len(ranks) == expected
            and all(((lines[span] >= NONE) & ((lines[span] == NONE) | (lines[span] != pp))).all() for span in entries)
            and len({self.histories.signature(one) for one in histories}) == 1
        )

    def _of_uniform_stage(
        self, stage: int, indices_by_rank: Mapping[int, Sequence[int]], parameters: Sequence[int]
    ) -> Iterator[Problem]:
        """Check one rank for all of its stage, and equal stages once."""
        rank, *others = indices_by_rank
        types = tuple(
            (one.sharded_over, one.partial_over, one.numel, one.losses, len(one.stages), one.made_by)
            for one in (self.model.facts.parameters[p] for p in self.model.parameters_of[stage])
        )
        sites = tuple(map(id, self.checker.sites.reaching(stage, None)))
        key = (types, sites, self.histories.signature(indices_by_rank[rank][0]))
        if key in self._right and not self.histories.elsewhere:
            return
        axes = frozenset(self.model.grid.axes) - {"pp"}
        problems = list(
            self._of_ranks({rank: indices_by_rank[rank]}, parameters, axes, self._partners_in_line(rank), everyone=True)
        )
        if not problems and not self.reader.unreadable and not self.reader.covered_ranges.unexpected:
            self._right.add(key)
        yield from (replace(one, other_ranks=tuple(others)) if one.rank == rank else one for one in problems)

    def _of_ranks(
        self,
        indices_by_rank: Mapping[int, Sequence[int]],
        parameters: Sequence[int],
        folded: frozenset[str],
        partners: Callable[[int, Change], Partners],
        *,
        everyone: bool = False,
    ) -> Iterator[Problem]:
        """Run and check some parameters with the same stages on the ranks that hold them."""
        read = {rank: self.reader.views(indices, parameters) for rank, indices in indices_by_rank.items()}
        states: dict[tuple[tuple[Change, ...], ...], Mapping[int, State]] = {}
        verdicts: dict[tuple[object, ...], Verdict] = {}
        for i, p in enumerate(parameters):
            parameter = self.model.facts.parameters[p]
            held = HeldGradient(parameter, {rank: views[i] for rank, views in read.items()}, folded)
            changes = tuple(view.changes for view in held.views.values())
            if changes not in states:
                states[changes] = interpret(held.views, partners)
            yield from self.elements.problems(p, held, everyone=everyone)
            if self.histories.elsewhere:
                yield from unordered(self.model.graph, self.subject.once(lifetimes).order, held)
            yield from self._checked(held, states[changes], verdicts)

    def _checked(
        self, held: HeldGradient, states: Mapping[int, State], verdicts: dict[tuple[object, ...], Verdict]
    ) -> Iterator[Problem]:
        """Check each rank; ranks that read the same sum and hold the same shard of the weight are checked once."""
        grid, parameter = self.model.grid, held.parameter
        for rank, state in states.items():
            cut = tuple(grid.place(rank, axis) for axis in parameter.sharded_over)
            key = id(state), cut, parameter.sharded_over, parameter.partial_over, parameter.losses
            if key not in verdicts:
                verdicts[key] = self.checker.verdict(held, rank, state)
            verdict = verdicts[key]
            if verdict is not None:
                yield from explain(self.model, held, rank, *verdict)

    def _partners_in_line(self, rank: int) -> Callable[[int, Change], Partners]:
        """Partners of a rank that represents its whole stage."""
        grid = self.model.grid

        def partners(_: int, change: Change) -> Partners:
            assert change.axis is not None, "a uniform stage has only groups that are lines"
            size = grid.size(change.axis) if change.axis != "pp" else Coefficient.of(1)
            return Partners((rank,), (change.axis,), size, change.axis if change.axis != "pp" else None)

        return partners

    def _partners_among(self, indices_by_rank: Mapping[int, object]) -> Callable[[int, Change], Partners]:
        """Partners if all ranks are run."""
        grid, groups = self.model.grid, self.model.graph.groups

        def partners(rank: int, change: Change) -> Partners:
            if change.axis is not None and change.axis in grid.folded:
                return Partners((rank,), (change.axis, rank), grid.size(change.axis), change.axis)
            if change.axis is not None and (change.axis != "pp" or change.group == NONE):
                line = tuple(one for one in grid.line(rank, change.axis) if one in indices_by_rank)
                return Partners(line, (change.axis, line), Coefficient.of(len(grid.line(rank, change.axis))))
            group = groups[change.group]
            fold = f"{group.axis}*{group.copies}" if group.copies > 1 else None
            members = tuple(one for one in group.ranks if one in indices_by_rank)
            return Partners(
                members, ("group", change.group), Coefficient.of(group.size), fold, len(members) < len(group.ranks)
            )

        return partners
