"""Closed forms of schedules: what a schedule takes and holds, as a formula with its condition.

Formulas and conditions are Python expressions, evaluated as they stand on the
page. Their names are in ``NAMES``. ``known_forms`` has the forms.
"""  # noqa: INP001 - a directory of scripts, not a package

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from types import MappingProxyType
from typing import Any

from sizes_and_times import Case

from pipeproof.schedule.asap import Time, Timed
from pipeproof.schedule.ops import OpKind

NAMES = MappingProxyType(
    {
        "p": "ranks",
        "m": "micro-batches",
        "v": "stages on each rank",
        "k": "pieces of each sequence",
        "r": "the rank",
        "tf": "time of a forward, of one micro-batch on one stage",
        "ti": "time of a backward's part for inputs",
        "tw": "time of its part for weights",
        "tb": "time of a whole backward, `ti + tw`",
        "F": "times of a forward by stage, where stages differ",
        "B": "times of a whole backward by stage",
        "D": "time of a forward beside a whole backward, `tf + tb` unless it is given",
        "c": "time of a message between two ranks",
    }
)
"""What expressions may speak of, in the order in which pages explain it."""

_FUNCTIONS = MappingProxyType(
    {"min": min, "max": max, "sum": sum, "abs": abs, "range": range, "ceil": ceil, "__builtins__": {}}
)

_OF_RANK: Mapping[str, Callable[[Timed, int], Time]] = MappingProxyType(
    {
        "span of rank r": Timed.span,
        "peak activations of rank r": Timed.peak,
        "peak activations of rank r, freed by I": lambda timed, rank: timed.peak(rank, OpKind.BACKWARD_INPUT),
    }
)
_OF_ALL: Mapping[str, Callable[[Timed], Time]] = MappingProxyType(
    {
        "makespan": lambda timed: timed.makespan,
        "largest peak of a rank": lambda timed: max(map(timed.peak, range(len(timed.programs)))),
    }
)
"""What a form may be of: each rank, or all together."""


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """One formula.

    ``relation`` of the quantity to the formula is ``=``, ``>=`` or ``<=``.
    ``even`` forms are of stages with equal times. ``where`` has names of its
    own, in order. ``outside`` is a case beyond the condition for which the
    equation is false, or for a bound a case in which it is not reached.
    """

    quantity: str
    formula: str
    condition: str = "True"
    relation: str = "="
    even: bool = True
    where: tuple[tuple[str, str], ...] = ()
    inside: Case | None = None
    outside: Case | None = None

    @property
    def inside_case(self) -> Case:
        """A case in which it holds; ``known_forms.closed_forms`` gives every form one."""
        assert self.inside is not None
        return self.inside

    @property
    def by_rank(self) -> bool:
        """Whether the quantity is of each rank."""
        return self.quantity in _OF_RANK

    @property
    def names(self) -> tuple[str, ...]:
        """Those of ``NAMES`` that it speaks of."""
        text = " ".join([self.formula, self.condition, *(expression for _, expression in self.where)])
        words = set(re.findall(r"[A-Za-z]+", text))
        return tuple(name for name in NAMES if name in words)

    def fits(self, case: Case) -> bool:
        """Whether the condition is fulfilled."""
        if self.even and any(isinstance(times, tuple) for times in (case.f, case.i, case.w)):
            return False
        return bool(_value(self.condition, _names(case, 0, self.where)))

    def says(self, case: Case, rank: int = 0) -> Time:
        """What the formula gives, whether or not the condition is fulfilled."""
        value: Time = _value(self.formula, _names(case, rank, self.where))
        return value

    def true_value(self, timed: Timed, rank: int = 0) -> Time:
        """What the schedule has."""
        return _OF_RANK[self.quantity](timed, rank) if self.by_rank else _OF_ALL[self.quantity](timed)

    def holds(self, case: Case, timed: Timed) -> bool:
        """Whether the relation is true of every rank."""
        for rank in range(case.p if self.by_rank else 1):
            true, said = self.true_value(timed, rank), self.says(case, rank)
            if not {"=": true == said, ">=": true >= said, "<=": true <= said}[self.relation]:
                return False
        return True


def _value(expression: str, names: Mapping[str, Any]) -> Any:
    return eval(expression, dict(names))  # noqa: S307 - the expressions of this file: what is shown is what is computed


def _names(case: Case, rank: int, where: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    costs = case.costs
    names: dict[str, Any] = {
        **_FUNCTIONS, "p": case.p, "m": case.m, "v": case.num_chunks, "k": case.k, "r": rank, "c": case.c,
        "tf": costs.forward[0] * case.k, "ti": costs.backward_input[0] * case.k,
        "tw": costs.backward_weight[0] * case.k,
        "F": [time * case.k for time in costs.forward],
        "B": [(i + w) * case.k for i, w in zip(costs.backward_input, costs.backward_weight, strict=True)],
    }  # fmt: skip
    names["tb"] = names["ti"] + names["tw"]
    names["D"] = names["tf"] + names["tb"] if case.d is None else Fraction(case.d)
    for name, expression in where:
        names[name] = _value(expression, names)
    return names
