"""Problems of a plan before they have a location in a file, and texts and groups for their messages.

Validators do not know the line of a key; they report a ``Problem`` with the
path of the key, and loading converts it to a ``Finding`` with line and column.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic_core import PydanticCustomError

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

KeyPath = tuple[str | int, ...]
"""Keys and list indices from the top of a plan: ``("cost", "forward_us", 2)``."""

PROBLEMS = "problems"
"""Type and context key of the pydantic error that carries problems through a validator."""

_MOST_SHOWN = 40
_MIN_PREFIX = 3


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a plan.

    ``path`` begins at the top of the plan or, inside a validator, at the
    section that it validates. ``at_key`` is True if the key itself is at
    fault, not its value.
    """

    code: str
    path: KeyPath
    message: str
    help: str | None = None
    at_key: bool = False


def problems_error(problems: Sequence[Problem]) -> PydanticCustomError:
    """Return the error with which a validator reports all ``problems`` at once."""
    summary = "; ".join(f"{problem.code}: {problem.message}" for problem in problems)
    return PydanticCustomError(PROBLEMS, "{summary}", {"summary": summary, PROBLEMS: tuple(problems)})


def dotted(path: Iterable[str | int]) -> str:
    """Return a path as messages show it, such as ``cost.forward_us[2]``; the top is ``the plan``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text or "the plan"


def describe_value(value: object) -> str:
    """Return a value with its YAML type: ``integer 3``, ``string "x"``, ``a list of 2``."""
    if value is None:
        return "nothing (null)"
    for kind, form in _FORMS:
        if isinstance(value, kind):
            return form(value)
    return f"a Python `{type(value).__name__}`"


def shortened(text: str) -> str:
    """Return ``text``, shortened to fit into a sentence."""
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


def _integer(value: Any) -> str:
    return f"integer {shortened(str(value))}" if abs(value) < 10**100 else "an integer of more than 100 digits"


_FORMS: tuple[tuple[type | tuple[type, ...], Callable[[Any], str]], ...] = (
    (bool, lambda value: f"boolean {str(value).lower()}"),  # before int, which bool is
    (int, _integer),
    (float, lambda value: f"number {value!r}"),
    (str, lambda value: f"string {json.dumps(shortened(value), ensure_ascii=False)}"),
    ((list, tuple), lambda value: f"a list of {len(value)}"),
    (Mapping, lambda _: "a mapping"),
)


def nearest_name(name: str, candidates: Iterable[str], *, prefixes: bool = True) -> str | None:
    """Return the most similar known name, or None.

    Case, hyphens and missing underscores are ignored; apart from them, the
    names must be similar, or with ``prefixes`` one must begin with the other.
    """
    by_plain = {_plain(candidate): candidate for candidate in candidates}
    plain = _plain(name)
    close = get_close_matches(plain, by_plain, n=1, cutoff=0.7)
    if close:
        return by_plain[close[0]]
    if prefixes and len(plain) >= _MIN_PREFIX:
        for candidate, original in by_plain.items():
            if candidate.startswith(plain) or plain.startswith(candidate):
                return original
    return None


def listed(items: Sequence[object], last: str = "or") -> str:
    """Return ``a, b or c``."""
    texts = [f"{item}" for item in items]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} {last} {texts[-1]}"


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


def grouped(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """Return the values of each key; keys and values are in the order of the pairs."""
    groups: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


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
