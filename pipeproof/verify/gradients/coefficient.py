"""Weights of tokens in sums, products of fractions and named sizes, and the scales that travel with gradients."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

import numpy as np

from pipeproof.schedule.derive import BoolColumn, look_up
from pipeproof.schedule.op_table import NONE, IntColumn, OpGraph
from pipeproof.schedule.ops import OpKind

Powers = tuple[tuple[str, int], ...]
"""Named sizes with their exponents, sorted by name, none zero."""


@dataclass(frozen=True)
class Coefficient:
    """A sum of terms ``fraction * size^power * ..``; equal if and only if the values are equal for all sizes."""

    terms: tuple[tuple[Powers, Fraction], ...]

    @staticmethod
    def of(number: Fraction | int) -> Coefficient:
        """A plain number."""
        return _sum([((), Fraction(number))])

    @staticmethod
    def named(name: str) -> Coefficient:
        """A size by its name."""
        return Coefficient(((((name, 1),), Fraction(1)),))

    def __add__(self, other: Coefficient) -> Coefficient:
        return _sum([*self.terms, *other.terms])

    def __mul__(self, other: Coefficient) -> Coefficient:
        return _sum([(_times(a, b), x * y) for a, x in self.terms for b, y in other.terms])

    @cached_property
    def inverse(self) -> Coefficient:
        """The reciprocal.

        Raises:
            ZeroDivisionError: this is zero.
            ValueError: this has several terms.
        """
        if not self.terms:
            raise ZeroDivisionError("one over a coefficient of zero")
        if len(self.terms) > 1:
            raise ValueError(f"{self} has several terms")
        ((powers, factor),) = self.terms
        return Coefficient(((tuple((name, -power) for name, power in powers), 1 / factor),))

    @property
    def number(self) -> Fraction | None:
        """The value; None if it has a named size."""
        if not self.terms:
            return Fraction(0)
        return self.terms[0][1] if len(self.terms) == 1 and not self.terms[0][0] else None

    def where(self, name: str, value: Coefficient) -> Coefficient:
        """The coefficient with a size replaced."""
        result = ZERO
        for powers, factor in self.terms:
            term = Coefficient(((tuple(p for p in powers if p[0] != name), factor),))
            power = dict(powers).get(name, 0)
            for _ in range(abs(power)):
                term *= value if power > 0 else value.inverse
            result += term
        return result

    @property
    def names(self) -> frozenset[str]:
        """The sizes that occur."""
        return frozenset(name for powers, _ in self.terms for name, _ in powers)

    def __str__(self) -> str:
        return " + ".join(_term_text(powers, factor) for powers, factor in self.terms) or "0"


def _sum(terms: Iterable[tuple[Powers, Fraction]]) -> Coefficient:
    total: dict[Powers, Fraction] = {}
    for powers, factor in terms:
        total[powers] = total.get(powers, Fraction(0)) + factor
    return Coefficient(tuple(sorted((powers, factor) for powers, factor in total.items() if factor)))


def _times(first: Powers, second: Powers) -> Powers:
    if not first or not second:
        return first or second
    total = dict(first)
    for name, power in second:
        total[name] = total.get(name, 0) + power
    return tuple(sorted((name, power) for name, power in total.items() if power))


def _term_text(powers: Powers, factor: Fraction) -> str:
    above = [str(factor.numerator)] if factor.numerator != 1 else []
    below = [str(factor.denominator)] if factor.denominator != 1 else []
    for name, power in powers:
        (above if power > 0 else below).append(name if abs(power) == 1 else f"{name}^{abs(power)}")
    over = "*".join(above) or "1"
    if not below:
        return over
    return f"{over}/{below[0]}" if len(below) == 1 else f"{over}/({'*'.join(below)})"


ZERO = Coefficient(())
ONE = Coefficient.of(1)

Factors = tuple[tuple[str | Fraction, int], ...]
"""Numbers and names with exponent 1 or -1, as they are written."""

_ENTRY = re.compile(r"(?:([A-Za-z_][\w.]*):)?(.+)", re.ASCII)
_FACTOR = re.compile(r"(\d+(?:\.\d+)?)|([a-z_]+)", re.ASCII)


def parse_scale(text: str) -> dict[str, Factors]:
    """Read ``product``, or ``loss:product`` several times with commas; the key is the loss, ``""`` for none.

    ``product`` is ``factor { ("*" | "/") factor }``, a factor an integer, a
    decimal or a named size: ``1/global_tokens,aux:0.01/num_micro_batches``.

    Raises:
        ValueError: the text is something else, divides by zero, or names a loss twice.
    """
    result: dict[str, Factors] = {}
    for entry in text.split(","):
        match = _ENTRY.fullmatch(entry.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a scale; examples: 1/dp, 0.5/global_tokens, aux:0.01")
        loss = match[1] or ""
        if loss in result:
            raise ValueError(f"{text!r} scales {loss or 'the main loss'} twice")
        result[loss] = _product(match[2], text)
    return result


def single_product(text: str) -> Factors:
    """Read the scale of a row that is not a forward.

    Raises:
        ValueError: the text is not a product, or names a loss.
    """
    parsed = parse_scale(text)
    if set(parsed) != {""}:
        raise ValueError("only forwards scale one loss apart from the others")
    return parsed[""]


def _product(product: str, text: str) -> Factors:
    factors: list[tuple[str | Fraction, int]] = []
    exponent = 1
    for part in re.split(r"([*/])", product):
        if part in ("*", "/"):
            exponent = 1 if part == "*" else -1
            continue
        match = _FACTOR.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part!r} in the scale {text!r} is neither a number nor a size; example: 1/dp")
        factor = Fraction(match[1]) if match[1] else match[2]
        if factor == 0 and exponent < 0:
            raise ValueError(f"the scale {text!r} divides by zero")
        factors.append((factor, exponent))
    return tuple(factors)


# Scales of gradients on their way to earlier stages: the factors of I, SEND_B and RECV_B.
#
# The gradient of a loss goes from the stage of the loss to the previous stage,
# and so on to the first stage. A scale on this way is a factor of all
# contributions of earlier stages for that micro-batch. The way follows the data:
# from the rank that computes a stage, by the message that it sends, to the rank
# that receives it, or to the previous stage on the same rank.


TRAVELLING = frozenset({OpKind.BACKWARD_INPUT, OpKind.SEND_BACKWARD, OpKind.RECV_BACKWARD})
"""Kinds whose scale multiplies the gradient that goes to the stage before."""

_Table = tuple[IntColumn, IntColumn]
"""Sorted keys of (rank, stage, work item), and the row of each."""


@dataclass(frozen=True, eq=False)
class TravellingScales:
    """The ways of the gradients of a graph; ``values`` are its scales by their codes."""

    graph: OpGraph
    values: Mapping[int, Coefficient]
    _downward: dict[tuple[int, bytes], list[tuple[IntColumn, tuple[Coefficient, ...]]]] = field(default_factory=dict)

    def at(self, forwards: IntColumn, stage: int) -> tuple[IntColumn, tuple[Coefficient, ...]]:
        """(an index for each forward, products by index) of the scales from the forwards' stage down to ``stage``."""
        top = int(self.graph.stage[forwards[0]])
        key = top, forwards.tobytes()
        if key not in self._downward:
            self._downward[key] = list(self._products(forwards, top))
        return self._downward[key][top - stage]

    def rows(self, forward: int, stage: int) -> Iterator[tuple[int, Coefficient]]:
        """(row, its scale) of the scaled rows between the stage of a forward and ``stage``."""
        rank, item = self.graph.rank[[forward]], self.graph.work_item[[forward]]
        for current in range(int(self.graph.stage[forward]), stage, -1):
            steps = self._steps(rank, current, item)
            for row in steps[:, 0].tolist():
                if row != NONE and self.graph.scale[row]:
                    yield row, self._value(int(self.graph.scale[row]))
            rank = self._next_rank(rank, steps)

    def _products(self, forwards: IntColumn, top: int) -> Iterator[tuple[IntColumn, tuple[Coefficient, ...]]]:
        """The products at stage ``top``, which are 1, and at each stage before it."""
        rank, item = self.graph.rank[forwards], self.graph.work_item[forwards]
        code = np.zeros(len(forwards), dtype=np.int64)
        products: tuple[Coefficient, ...] = (ONE,)
        for stage in range(top, -1, -1):
            yield code, products
            steps = self._steps(rank, stage, item)
            scales = np.where(steps != NONE, self.graph.scale[steps], 0)
            if scales.any():
                seen, code = np.unique(np.stack([code, *scales], axis=1), axis=0, return_inverse=True)
                code = code.ravel()
                products = tuple(self._product(products[first], *others) for first, *others in seen.tolist())
            rank = self._next_rank(rank, steps)

    def _product(self, start: Coefficient, *codes: int) -> Coefficient:
        for code in codes:
            start *= self._value(code)
        return start

    def _value(self, code: int) -> Coefficient:
        return self.values.get(code, ONE)

    def _steps(self, rank: IntColumn, stage: int, item: IntColumn) -> IntColumn:
        """The I, the send and the receive by which gradients leave a stage, shape [3, n]; NONE where there is none."""
        key = self._key(rank, np.full_like(rank, stage), item)
        sends = look_up(*self._sends, key)
        return np.stack([look_up(*self._inputs, key), sends, self._received(sends)])

    def _next_rank(self, rank: IntColumn, steps: IntColumn) -> IntColumn:
        return np.where(steps[2] != NONE, self.graph.rank[steps[2]], rank)

    def _received(self, sends: IntColumn) -> IntColumn:
        return np.where(sends != NONE, self.graph.match[sends], NONE)

    @cached_property
    def _inputs(self) -> _Table:
        rows = np.flatnonzero(self.graph.is_kind(frozenset({OpKind.BACKWARD_INPUT})))
        return self._table(rows, self.graph.scale[rows] == 0)

    @cached_property
    def _sends(self) -> _Table:
        """The send for each stage and micro-batch; of several messages, one that changes the gradient."""
        graph = self.graph
        rows = np.flatnonzero(graph.is_kind(frozenset({OpKind.SEND_BACKWARD})) & (graph.index == NONE))
        received = self._received(rows)
        scales = np.stack([graph.scale[rows], np.where(received != NONE, graph.scale[received], 0)], axis=1)
        pairs, pair = np.unique(scales, axis=0, return_inverse=True)
        neutral = np.array([self._product(ONE, *codes) == ONE for codes in pairs.tolist()], dtype=bool)
        return self._table(rows, neutral[pair.ravel()])

    def _table(self, rows: IntColumn, last: BoolColumn) -> _Table:
        """Rows by their keys; for equal keys the first row that is not in ``last``, if there is one."""
        keys = self._key(self.graph.rank[rows], self.graph.stage[rows], self.graph.work_item[rows])
        order = np.lexsort((rows, last, keys))
        unique, first = np.unique(keys[order], return_index=True)
        return unique, rows[order][first]

    def _key(self, rank: IntColumn, stage: IntColumn, item: IntColumn) -> IntColumn:
        num_stages, num_items = (int(column.max(initial=0)) + 2 for column in (self.graph.stage, self.graph.work_item))
        return (rank * num_stages + stage) * num_items + item
