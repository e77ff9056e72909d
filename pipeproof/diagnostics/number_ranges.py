"""Short texts for long lists of ranks and layers."""

from __future__ import annotations

from collections.abc import Sequence


def runs(values: Sequence[object]) -> list[tuple[int, int]]:
    """Return the first and last index of each run of equal values."""
    begins = [index for index in range(len(values)) if not index or values[index] != values[index - 1]]
    ends = [index - 1 for index in begins[1:]] + ([len(values) - 1] if values else [])
    return list(zip(begins, ends, strict=True))


def ranges_text(numbers: Sequence[int], separator: str = ",") -> str:
    """Return ``0-3,6`` for increasing numbers."""
    groups = runs([number - index for index, number in enumerate(numbers)])
    return separator.join(
        str(numbers[first]) if first == last else f"{numbers[first]}-{numbers[last]}" for first, last in groups
    )


def names_text(names: Sequence[str]) -> str:
    """Return ``embed, layer.0-3``: consecutive names that differ in a final number are one range."""
    parts = [name.rpartition(".") for name in names]
    stems = [
        (stem, int(end) - index) if end.isdecimal() else name
        for index, (name, (stem, _, end)) in enumerate(zip(names, parts, strict=True))
    ]
    return ", ".join(
        names[first] if first == last else f"{names[first]}-{parts[last][2]}" for first, last in runs(stems)
    )
