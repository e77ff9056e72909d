"""Values of the plan format whose features come in a later release.

They are refused with a sentence that says so, rather than as unknown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pipeproof.specs.problems import Problem, shortened


@dataclass(frozen=True, slots=True)
class Later:
    """A key, which of its values come later in a section, and what they are for; ``now`` is what works already."""

    section: str
    key: str
    values: tuple[str, ...]
    comes_later: Callable[[Mapping[str, object]], bool]
    feature: str
    now: str


def _with_paddle(run: Mapping[str, object]) -> bool:
    return run.get("backend", "paddle") == "paddle"


LATER: tuple[Later, ...] = (
    Later(
        "run",
        "dtype",
        ("bfloat16", "float16"),
        _with_paddle,
        "16-bit types with Paddle",
        "use float32 or float64, or `backend: torch`",
    ),
)


def later_problems(data: Mapping[str, object]) -> list[Problem]:
    """PP107 for every key of ``data`` (a plan before validation) whose feature comes later."""
    problems = []
    for row in LATER:
        section = data.get(row.section)
        if not isinstance(section, Mapping) or row.key not in section:
            continue
        value = section[row.key]
        if isinstance(value, str) and value in row.values and row.comes_later(section):
            problems.append(
                Problem(
                    "PP107",
                    (row.section, row.key),
                    f"`{row.section}.{row.key}: {_text(value)}` comes in a later release, which brings {row.feature}",
                    help=f"in this release, {row.now}",
                )
            )
    return problems


def _text(value: object) -> str:
    return shortened(value if isinstance(value, str) else json.dumps(value, default=str))
