"""Names with ``$LAYER_ID``, ``$EXPERT_ID`` and ``*``: which names of many they fit, by number and not by string."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from pipeproof.specs.problems import nearest_name
from pipeproof.state.aoa.syntax import IDS, STAR, Name

_NUMBER = "(0|[1-9][0-9]*)"
_DIGITS = re.compile("[0-9]+")
_COUNTED = re.compile(r"(?:^|(?<=\.))[0-9]+(?=\.|$)", re.ASCII)
"""Numbers that stand alone between dots: those of layers and experts, and not that of `w1`."""
_LAST = chr(0x10FFFF)
OFFSET = "$LAYER_ID_OFFSET"

Ids = tuple[tuple[str, int], ...]
"""Numbers by what stands for them, in the order of ``IDS``."""


class NameList:
    """Names in order, so that those that begin alike are found without a look at the others."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted(names)

    def beginning(self, prefix: str) -> Sequence[str]:
        """All that begin so."""
        return self._names[bisect_left(self._names, prefix) : bisect_left(self._names, prefix + _LAST)]

    def ids_of(self, name: Name) -> list[Ids]:
        """The numbers for which names are there that fit, in the order of the numbers."""
        found = set()
        tags = name.ids
        text = name.text if name.numbers is None else f"{name.text}_{name.numbers[0]}"
        pattern = _regex(text)
        places = [index for index, tag in enumerate(_tags(text)) if tag != STAR]
        for candidate in self.beginning(_prefix(text)):
            match = pattern.fullmatch(candidate)
            if match is not None:
                numbers = dict(zip(tags, (int(match.groups()[place]) for place in places), strict=True))
                found.add(tuple((tag, numbers[tag]) for tag in IDS if tag in numbers))
        return sorted(found, key=lambda ids: [number for _, number in ids])

    def numbered(self, text: str) -> list[tuple[int, str]]:
        """The names that ``text`` with its ``*`` stands for, by their number."""
        pattern = _regex(text)
        matches = ((pattern.fullmatch(candidate), candidate) for candidate in self.beginning(_prefix(text)))
        return sorted((int(match[1]), candidate) for match, candidate in matches if match is not None)


def with_ids(text: str, ids: Ids, *, to_the_right: bool) -> str:
    """A name with its numbers."""
    for tag, number in ids:  # the longer tags come first
        text = text.replace(tag, str(number - 1 if to_the_right and tag == OFFSET else number))
    return text


def in_words(ids: Ids) -> str:
    """``$LAYER_ID=3, $EXPERT_ID=0``."""
    return ", ".join(f"{tag}={number}" for tag, number in ids)


def by_form(names: Iterable[str]) -> dict[str, list[str]]:
    """Names by what they are but for their numbers."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(_COUNTED.sub("0", name), []).append(name)
    return found


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant. Names that differ by numbers alone are looked at once."""
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
    """The first number that is missing between the first and the last."""
    return next((a + 1 for a, b in pairwise(numbers) if b != a + 1), None)
