"""Times and sizes as people read them: with a unit, and three significant digits.

JSON and CSV have the exact values.
"""

from __future__ import annotations

from fractions import Fraction

_TIMES = (("us", 1), ("ms", 10**3), ("s", 10**6))
_SIZES = ("B", "KiB", "MiB", "GiB")


def time_text(us: Fraction | float) -> str:
    """A time with its unit, us, ms or s, and three significant digits: ``12.3 ms``."""
    amount = abs(float(us))
    unit, length = next(((unit, length) for unit, length in _TIMES if amount < 999.5 * length), _TIMES[-1])
    return f"{'-' if us < 0 else ''}{_three_digits(amount / length)} {unit}"


def signed_time_text(us: Fraction | float) -> str:
    """A difference of times, with its sign: ``+12.3 ms``."""
    return f"{'+' if us > 0 else ''}{time_text(us)}"


def number_text(number: Fraction) -> str:
    """A time of a schedule, which has no unit: whole where it is whole, else three digits after the point."""
    return str(number.numerator) if number.denominator == 1 else f"{float(number):.3f}"


def size_text(num_bytes: float, power: int | None = None, *, unit: bool = True) -> str:
    """A size to three significant digits: ``31.2 GiB``; in the unit of ``power`` if one is given."""
    power = unit_of(num_bytes) if power is None else power
    value = num_bytes / 1024**power
    digits = 0 if power == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    text = _three_digits(value) if value >= 999.5 else f"{value:.{digits}f}"
    return f"{text} {_SIZES[power]}" if unit else text


def unit_of(num_bytes: float) -> int:
    """The power of 1024 in which a size is written, at most GiB's."""
    power = 0
    while power < len(_SIZES) - 1 and num_bytes >= 999.5 * 1024**power:  # a number has at most three digits before it
        power += 1
    return power


def unit_name(power: int) -> str:
    """``GiB`` for 3."""
    return _SIZES[power]


def _three_digits(value: float) -> str:
    """A number that is not negative, without trailing zeros: ``0.125``, ``2.5``, ``300``, ``1230``."""
    if value >= 999.5:
        return str(int(round(value, 3 - len(str(round(value))))))
    text = f"{value:.3g}"
    return f"{value:.9f}".rstrip("0").rstrip(".") if "e" in text else text
