"""What is wrong with a plan, before it has a place in a file.

Validators do not know where a key stands; they report a ``Problem`` with the
path of the key, and loading turns it into a ``Finding`` with line and column.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic_core import PydanticCustomError

KeyPath = tuple[str | int, ...]
"""Keys and list indices from the top of a plan: ``("cost", "forward_us", 2)``."""

PROBLEMS = "problems"
"""Type and context key of the pydantic error that carries problems through a validator."""

_MOST_SHOWN = 40
_MIN_PREFIX = 3


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a plan.

    ``path`` counts from the top of the plan or, inside a validator, from the
    section that it validates. ``at_key`` says that the key itself is at fault
    and not its value.
    """

    code: str
    path: KeyPath
    message: str
    help: str | None = None
    at_key: bool = False


def problems_error(problems: Sequence[Problem]) -> PydanticCustomError:
    """The error with which a validator reports all of ``problems`` at once."""
    summary = "; ".join(f"{problem.code}: {problem.message}" for problem in problems)
    return PydanticCustomError(PROBLEMS, "{summary}", {"summary": summary, PROBLEMS: tuple(problems)})


def dotted(path: Iterable[str | int]) -> str:
    """``cost.forward_us[2]``: a path as messages show it; the top is ``the plan``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text or "the plan"


def describe_value(value: object) -> str:
    """``integer 3``, ``string "x"``, ``a list of 2``: a value with its type, in the words of YAML."""
    if value is None:
        return "nothing (null)"
    for kind, form in _FORMS:
        if isinstance(value, kind):
            return form(value)
    return f"a Python `{type(value).__name__}`"


def shortened(text: str) -> str:
    """``text``, cut to a length that fits into a sentence."""
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


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant, or None.

    Case, hyphens and missing underscores do not count; otherwise the names
    must be similar, or one must begin with the other.
    """
    by_plain = {_plain(candidate): candidate for candidate in known}
    plain = _plain(name)
    close = get_close_matches(plain, by_plain, n=1, cutoff=0.7)
    if close:
        return by_plain[close[0]]
    if len(plain) >= _MIN_PREFIX:
        for candidate, original in by_plain.items():
            if candidate.startswith(plain) or plain.startswith(candidate):
                return original
    return None


def listed(items: Sequence[object], last: str = "or") -> str:
    """``a, b or c``."""
    texts = [f"{item}" for item in items]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} {last} {texts[-1]}"


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")
