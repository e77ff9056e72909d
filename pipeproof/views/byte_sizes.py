"""Byte sizes in readable form."""

from __future__ import annotations

from pipeproof.sim.memory_curve import MemoryCurve

_UNITS = ("B", "KiB", "MiB", "GiB")


def unit_of(num_bytes: int) -> int:
    """The power of 1024 in which a size is written, at most that of GiB."""
    power = 0
    while power < len(_UNITS) - 1 and num_bytes >= 1000 * 1024**power:  # a number has at most three digits before it
        power += 1
    return power


def size_text(num_bytes: int, power: int | None = None, *, unit: bool = True) -> str:
    """A size to three significant digits: ``31.2 GiB``; in the unit of ``power`` if one is given."""
    power = unit_of(num_bytes) if power is None else power
    value = num_bytes / 1024**power
    digits = 0 if power == 0 or value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {_UNITS[power]}" if unit else f"{value:.{digits}f}"


def unit_name(power: int) -> str:
    """``GiB`` for 3."""
    return _UNITS[power]


def make_up_text(curve: MemoryCurve) -> str:
    """The parts of a peak, the largest first: ``activations 20.1 GiB, parameters 11.0 GiB``."""
    parts = sorted(curve.make_up.items(), key=lambda item: -item[1])
    return ", ".join(f"{part} {size_text(num_bytes)}" for part, num_bytes in parts if num_bytes)
