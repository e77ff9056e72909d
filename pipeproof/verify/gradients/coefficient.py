"""Weight of a token in a sum: exact sums of products of fractions and named sizes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

Powers = tuple[tuple[str, int], ...]
"""Named sizes with their exponents, sorted by name, none zero."""


@dataclass(frozen=True)
class Coefficient:
    """A sum of terms ``fraction * size^power * ..``; equal exactly where the same for all sizes."""

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
        """One over this.

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
        """The value, where no named size is in it."""
        if not self.terms:
            return Fraction(0)
        return self.terms[0][1] if len(self.terms) == 1 and not self.terms[0][0] else None

    def where(self, name: str, value: Coefficient) -> Coefficient:
        """This with a size replaced."""
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
    """Read the scale of a row that is no forward.

    Raises:
        ValueError: the text is no product, or names a loss.
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
