"""Which rules run: chosen by codes, or by what codes begin with."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeproof.specs.problems import listed

_PATTERN = re.compile(r"(?:PP)?(?:([1-9])(?:XX)?|([1-9][0-9])X?|([1-9][0-9]{2}))", re.ASCII | re.IGNORECASE)
"""``PP401``, ``PP40`` and ``40x``, ``PP4`` and ``4xx``; the letters may be missing."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The rules to run: those whose code begins with one of ``select`` (all, if it is empty) and none of ``ignore``."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def picks(self, code: str) -> bool:
        """Whether the rule of this code runs."""
        return (not self.select or code.startswith(self.select)) and not code.startswith(self.ignore)


ALL_RULES = Selection()
"""Leaves nothing out: only then can a certificate come of a check."""


def parse_codes(texts: Iterable[str], known: Sequence[str]) -> tuple[str, ...]:
    """The beginnings of codes that comma-separated lists such as ``PP401,3xx`` name.

    Raises:
        ValueError: something in them is no code, or no code of ``known`` begins so; the message says which are near.
    """
    return tuple(_beginning(part.strip(), known) for text in texts for part in text.split(","))


def _beginning(text: str, known: Sequence[str]) -> str:
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no code; examples: PP401, PP40, 4xx")
    digits = next(group for group in match.groups() if group is not None)
    beginning = f"PP{digits}"
    if any(code.startswith(beginning) for code in known):
        return beginning
    family = [code for code in known if code.startswith(beginning[:3])]
    if family:
        raise ValueError(f"`check` has no rule {text!r}; in that family are {listed(family, 'and')}")
    families = sorted({f"{code[2]}xx" for code in known})
    raise ValueError(f"`check` has no rule {text!r}; its families are {listed(families, 'and')}")
