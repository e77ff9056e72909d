"""Closed forms of schedules: formulas for times and memory, each with its condition.

Formulas and conditions are Python expressions, and are evaluated exactly as the
page shows them. ``NAMES`` lists their names; ``known_forms`` contains the forms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from types import MappingProxyType
from typing import Any

from sizes_and_times import Case

from pipeproof.schedule.ops import OpKind
from pipeproof.schedule.programs import Time, Timed

NAMES = MappingProxyType(
    {
        "p": "ranks",
        "m": "micro-batches",
        "v": "stages on each rank",
        "k": "splits of each sequence",
        "r": "the rank",
        "tf": "time of a forward, of one micro-batch on one stage",
        "ti": "time of a backward's part for inputs",
        "tw": "time of its part for weights",
        "tb": "time of a whole backward, `ti + tw`",
        "F": "times of a forward by stage, where stages differ",
        "B": "times of a whole backward by stage",
        "D": "time of a forward overlapped with a whole backward, `tf + tb` by default",
        "c": "time of a message between two ranks",
    }
)
"""The names that expressions may use, in the order in which pages explain them."""

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
"""The quantities that a form may have: of each rank, or of all ranks together."""


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """One formula.

    ``relation`` of the quantity to the formula is ``=``, ``>=`` or ``<=``.
    ``even`` forms hold for stages with equal times. ``where`` defines further
    names, in order. ``outside`` is a case outside the condition for which the
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
        """A case in which the form holds; ``known_forms.closed_forms`` sets it for every form."""
        assert self.inside is not None
        return self.inside

    @property
    def by_rank(self) -> bool:
        """True if the quantity belongs to each rank."""
        return self.quantity in _OF_RANK

    @property
    def names(self) -> tuple[str, ...]:
        """The entries of ``NAMES`` that the form uses."""
        text = " ".join([self.formula, self.condition, *(expression for _, expression in self.where)])
        words = set(re.findall(r"[A-Za-z]+", text))
        return tuple(name for name in NAMES if name in words)

    def fits(self, case: Case) -> bool:
        """Return whether the condition holds."""
        if self.even and any(isinstance(times, tuple) for times in (case.f, case.i, case.w)):
            return False
        return bool(_value(self.condition, _names(case, 0, self.where)))

    def formula_value(self, case: Case, rank: int = 0) -> Time:
        """Return the value of the formula, whether or not the condition holds."""
        value: Time = _value(self.formula, _names(case, rank, self.where))
        return value

    def true_value(self, timed: Timed, rank: int = 0) -> Time:
        """Return the value of the schedule itself."""
        return _OF_RANK[self.quantity](timed, rank) if self.by_rank else _OF_ALL[self.quantity](timed)

    def holds(self, case: Case, timed: Timed) -> bool:
        """Return whether the relation holds for every rank."""
        for rank in range(case.p if self.by_rank else 1):
            true, formula = self.true_value(timed, rank), self.formula_value(case, rank)
            if not {"=": true == formula, ">=": true >= formula, "<=": true <= formula}[self.relation]:
                return False
        return True


def _value(expression: str, names: Mapping[str, Any]) -> Any:
    return eval(expression, dict(names))


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
