"""Names with ``$LAYER_ID``, ``$EXPERT_ID`` and ``*``: the names that they match, in numeric order."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from pipeproof.diagnostics.problems import nearest_name
from pipeproof.state.aoa.statements import IDS, STAR, Name

_NUMBER = "(0|[1-9][0-9]*)"
_DIGITS = re.compile("[0-9]+")
_COUNTED = re.compile(r"(?:^|(?<=\.))[0-9]+(?=\.|$)", re.ASCII)
"""Numbers between dots: those of layers and experts, not the one in `w1`."""
_LAST = chr(0x10FFFF)
OFFSET = "$LAYER_ID_OFFSET"

Ids = tuple[tuple[str, int], ...]
"""Numbers by placeholder, in the order of ``IDS``."""


class NameList:
    """Sorted names, so that those with a common prefix are found without a scan."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted(names)

    def beginning(self, prefix: str) -> Sequence[str]:
        """Return all names with a prefix."""
        return self._names[bisect_left(self._names, prefix) : bisect_left(self._names, prefix + _LAST)]

    def ids_of(self, name: Name) -> list[Ids]:
        """Return the numbers for which matching names exist, in numeric order."""
        combinations = set()
        tags = name.ids
        text = name.text if name.numbers is None else f"{name.text}_{name.numbers[0]}"
        pattern = _regex(text)
        places = [index for index, tag in enumerate(_tags(text)) if tag != STAR]
        for candidate in self.beginning(_prefix(text)):
            match = pattern.fullmatch(candidate)
            if match is not None:
                numbers = dict(zip(tags, (int(match.groups()[place]) for place in places), strict=True))
                combinations.add(tuple((tag, numbers[tag]) for tag in IDS if tag in numbers))
        return sorted(combinations, key=lambda ids: [number for _, number in ids])

    def numbered(self, text: str) -> list[tuple[int, str]]:
        """Return the names that match ``text`` with its ``*``, by number."""
        pattern = _regex(text)
        matches = ((pattern.fullmatch(candidate), candidate) for candidate in self.beginning(_prefix(text)))
        return sorted((int(match[1]), candidate) for match, candidate in matches if match is not None)


def with_numbers(text: str, ids: Ids, *, to_the_right: bool) -> str:
    """Return a name with its placeholders replaced by numbers."""
    for tag, number in ids:  # the longer tags come first
        text = text.replace(tag, str(number - 1 if to_the_right and tag == OFFSET else number))
    return text


def ids_text(ids: Ids) -> str:
    """``$LAYER_ID=3, $EXPERT_ID=0``."""
    return ", ".join(f"{tag}={number}" for tag, number in ids)


def by_form(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names that differ by numbers only."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_COUNTED.sub("0", name), []).append(name)
    return groups


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant. Names that differ by numbers only are compared once."""
    forms = by_form(known)
    near = nearest_name(_COUNTED.sub("0", name), forms)
    if near is None:
        return None
    numbers = _DIGITS.findall(name)
    return min(forms[near], key=lambda other: (_differing(numbers, _DIGITS.findall(other)), len(other), other))


def _differing(one: Sequence[str], other: Sequence[str]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=False)) + abs(len(one) - len(other))


def _regex(text: str) -> re.Pattern[str]:
    return re.compile("".join(_NUMBER if part in (*IDS, STAR) else re.escape(part) for part in _parts(text)), re.ASCII)


def _prefix(text: str) -> str:
    return re.split(r"[*$]", text, maxsplit=1)[0]


def _parts(text: str) -> list[str]:
    return re.split("(" + "|".join(re.escape(tag) for tag in (*IDS, STAR)) + ")", text)


def _tags(text: str) -> Iterator[str]:
    return (part for part in _parts(text) if part in (*IDS, STAR))


def gap_in(numbers: Sequence[int]) -> int | None:
    """Return the first missing number between the first and the last."""
    return next((a + 1 for a, b in pairwise(numbers) if b != a + 1), None)
