"""Closed forms of schedules: what a schedule takes and holds, as a formula with its condition.

Formulas and conditions are Python expressions, evaluated as they stand on the
page. Their names are in ``NAMES``. The tests hold each against the schedule,
wherever its condition is fulfilled on a grid, and see that it fails for the
case beside it.
"""  # noqa: INP001 - a directory of scripts, not a package

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
        """A case in which it holds; ``closed_forms`` gives every form one."""
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


_PEAK, _PEAK_AT_I = "peak activations of rank r", "peak activations of rank r, freed by I"
_UNEVEN: tuple[Time, ...] = (1, 2, 1, 1)
_SLOW_W = {"f": 1, "i": 1, "w": 10}


def _forms_of(kind: str) -> tuple[ClosedForm, ...]:
    """The forms of one kind; () where there is none."""
    case = Case(kind)
    match kind:
        case "gpipe":
            return (
                ClosedForm("makespan", "(m + p - 1) * (tf + tb) + 2 * (p - 1) * c"),
                ClosedForm(
                    "makespan", "sum(F) + (m - 1) * max(F) + sum(B) + (m - 1) * max(B)", "c == 0",
                    even=False, inside=replace(case, f=_UNEVEN), outside=replace(case, f=_UNEVEN, c=1),
                ),
                ClosedForm(_PEAK, "m", even=False),
            )  # fmt: skip
        case "1f1b":
            return (
                ClosedForm("makespan", "(m + p - 1) * (tf + tb) + 2 * c * (p - 1 + (m - 1) * (p - 1) // p)",
                           inside=replace(case, c=1)),
                ClosedForm(
                    "makespan", "max(sum(F[:r]) + m * (F[r] + B[r]) + sum(B[:r]) for r in range(p))",
                    relation=">=", even=False, inside=replace(case, f=(1, 1, 1, 2)), outside=replace(case, f=_UNEVEN),
                ),
                ClosedForm(_PEAK, "min(m, p - r)", even=False),
            )  # fmt: skip
        case "eager_1f1b":
            return (
                ClosedForm("makespan", "(m + p - 1) * (tf + tb) + 2 * (p - 1) * c", "2 * c <= tf + tb",
                           inside=replace(case, c=1), outside=replace(case, c=2)),
                ClosedForm(_PEAK, "min(m, 2 * (p - 1 - r) + 1)", even=False),
            )  # fmt: skip
        case "interleaved":
            rounds = (("g", "m // max(1, m // p)"),)
            return (
                ClosedForm("makespan", "(v * m + p - 1 + (v - 1) * max(0, p - m)) * (tf + tb)", "c == 0",
                           outside=replace(case, c=1)),
                ClosedForm(_PEAK, "min(v * m, (v - 1) * g + 2 * (p - 1 - r) + 1)", even=False, where=rounds),
            )  # fmt: skip
        case "looped_bfs":
            two = replace(case, v=2)
            return (
                ClosedForm("makespan", "(v * m + p - 1) * (tf + tb)", "m >= p and c == 0",
                           inside=two, outside=replace(two, m=2)),
                ClosedForm(_PEAK, "v * m", even=False, inside=two),
            )  # fmt: skip
        case "zb_h1":
            return _zb_h1(case)
        case "zb_h2":
            return _zb_h2(case)
        case "interleaved_zb":
            return (
                ClosedForm("makespan", "v * m * (tf + ti + tw) + (p - 1) * max(tf, ti, tf + ti - tw)",
                           "m >= p and c == 0", outside=replace(case, m=2)),
                ClosedForm("largest peak of a rank", "v * p", "m % p == 0", even=False, outside=replace(case, m=10)),
            )  # fmt: skip
        case "zb_v":
            return _zb_v(case)
        case "dualpipe_v":
            return (
                ClosedForm(
                    "makespan",
                    "2 * p * tf + max(p * tf, (p - 1) * ti) + (2 * m - p - 2) * D + 2 * tb + p * ti + tw"
                    " + (p - 1) * max(ti, tw)",
                    "c == 0 and D >= max(tf, tb)",
                    inside=replace(case, d=2), outside=replace(case, d=Fraction(3, 2)),
                ),
                ClosedForm(_PEAK, "2 * p + 1", even=False),
            )  # fmt: skip
        case "dualpipe":
            return (
                ClosedForm(
                    "makespan",
                    "p * tf + max(q * tf, (q - 1) * ti) + (m - q - 2) * D + 2 * tb + q * ti + tw"
                    " + (q - 1) * max(ti, tw)",
                    "c == 0 and D >= max(tf, tb)", where=(("q", "p // 2"),),
                    inside=replace(case, p=6, m=12, d=2), outside=replace(case, p=6, m=12, d=Fraction(3, 2)),
                ),
                ClosedForm(_PEAK, "p + 1", even=False),
            )  # fmt: skip
        case "chimera":
            return _chimera(case)
        case "optimal":
            return (
                ClosedForm(
                    "makespan", "max(sum(F[:r]) + m * (F[r] + B[r]) for r in range(p))", "v == 1",
                    relation=">=", even=False,
                    inside=replace(case, memory_limit=4), outside=replace(case, memory_limit=2),
                ),
            )  # fmt: skip
        case "seq1f1b":
            cut = replace(case, k=2)
            return (
                ClosedForm("makespan", "(m * k + p - 1) * (tf + tb) / k", "c == 0",
                           inside=cut, outside=replace(cut, c=1)),
                ClosedForm(_PEAK, "min(m * k, p - r + k - 1)", even=False, inside=cut),
            )  # fmt: skip
        case _:
            return ()


def _zb_h1(case: Case) -> tuple[ClosedForm, ...]:
    return (
        ClosedForm("makespan", "m * (tf + ti + tw) + (p - 1) * max(tf, ti, tf + ti - tw)", "m >= p and c == 0",
                   outside=replace(case, m=2)),
        ClosedForm("span of rank r", "m * (tf + ti + tw) + (p - 1 - r) * max(ti, tf + ti - tw)", "m >= p and c == 0",
                   outside=replace(case, c=1)),
        ClosedForm(_PEAK, "min(m, p)", "m >= p", even=False),
        ClosedForm(_PEAK_AT_I, "min(m, p - r)", even=False),
    )  # fmt: skip


def _zb_h2(case: Case) -> tuple[ClosedForm, ...]:
    spare = (("n", "p - 1"), ("s", "min(m - p, n)"))
    return (
        ClosedForm(
            "makespan",
            "m * (tf + ti + tw) + max(n * tf + (n - s) * max(0, ti - tw), n * ti - s * tf, s * tf + (n - s) * ti,"
            " n * (tf + ti) - (n + s) * tw)",
            "m >= p and c == 0", where=spare, outside=replace(case, c=1),
        ),
        ClosedForm("span of rank r", "m * (tf + ti + tw)",
                   "m >= 2 * p - 1 and ti <= tf and tf + ti <= 2 * tw and c == 0", outside=replace(case, m=6)),
        ClosedForm(_PEAK, "min(m, p + min(p - 1 - r, s) + min(r, s))", "m >= p", even=False, where=spare),
        ClosedForm(_PEAK_AT_I, "p - r + min(p - 1 - r, s)", "m >= p", even=False, where=spare),
    )  # fmt: skip


def _zb_v(case: Case) -> tuple[ClosedForm, ...]:
    return (
        ClosedForm("makespan", "max(6 * m + p - 1, 4 * m + 4 * p - 2) * tf", "tf == ti == tw and c == 0",
                   outside=replace(case, **_SLOW_W)),
        ClosedForm(
            "makespan",
            "2 * m * (tf + ti + tw) + max(n * ti, 2 * n * (ti - tw), max(tf, ti) + (n - 1) * tw,"
            " (2 * n - 1) * tf - (n - 1) * ti + max(0, tf - ti - tw) + n * max(0, ti - 2 * tw))",
            "m >= 2 * p - 1 and p >= 2 and c == 0", where=(("n", "p - 1"),),
            inside=replace(case, **_SLOW_W), outside=replace(case, m=4),
        ),
        ClosedForm("span of rank r", "6 * m * tf", "tf == ti == tw and m >= 2 * p - 1 and c == 0",
                   outside=replace(case, m=6)),
        ClosedForm(_PEAK, "2 * p", "m >= 2 * p - 1", even=False, outside=replace(case, m=4)),
    )  # fmt: skip


def _chimera(case: Case) -> tuple[ClosedForm, ...]:
    return (
        ClosedForm("makespan", "m * (tf + tb) + (p - 2) * (max(tf, tb) + (m // p - 1) * abs(tb - tf))",
                   "m % p == 0 and c == 0", outside=replace(case, m=6)),
        ClosedForm("makespan", "p * (tf + tb) + 2 * (ceil(m / 2) - 1) * max(tf, tb)", "m <= p and c == 0",
                   inside=replace(case, m=3), outside=replace(case, m=5)),
        ClosedForm(_PEAK, "min(m, p, p // 2 + 1 + min(r, p - 1 - r))", "m >= p", relation="<=", even=False),
    )  # fmt: skip


def closed_forms(kind: str) -> tuple[ClosedForm, ...]:
    """The forms of a kind, each with a case inside of its condition."""
    return tuple(replace(form, inside=form.inside or Case(kind)) for form in _forms_of(kind))
