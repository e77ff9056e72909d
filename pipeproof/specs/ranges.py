"""Long lists of ranks and layers in few words."""

from __future__ import annotations

from collections.abc import Sequence


def runs(values: Sequence[object]) -> list[tuple[int, int]]:
    """The first and last place of each run of equal values."""
    begins = [place for place in range(len(values)) if not place or values[place] != values[place - 1]]
    ends = [place - 1 for place in begins[1:]] + ([len(values) - 1] if values else [])
    return list(zip(begins, ends, strict=True))


def ranges_text(numbers: Sequence[int], separator: str = ",") -> str:
    """``0-3,6`` for numbers that grow."""
    together = runs([number - place for place, number in enumerate(numbers)])
    return separator.join(
        str(numbers[first]) if first == last else f"{numbers[first]}-{numbers[last]}" for first, last in together
    )


def names_text(names: Sequence[str]) -> str:
    """``embed, layer.0-3``: names that differ in a number at their end, one after the other, as one."""
    parts = [name.rpartition(".") for name in names]
    stems = [
        (stem, int(end) - place) if end.isdecimal() else name
        for place, (name, (stem, _, end)) in enumerate(zip(names, parts, strict=True))
    ]
    return ", ".join(
        names[first] if first == last else f"{names[first]}-{parts[last][2]}" for first, last in runs(stems)
    )
