"""Values of the plan format whose features come in a later release.

They are refused with a sentence that says so, rather than as unknown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pipeproof.specs.problems import Problem, shortened


def _one_of(*names: str) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and value in names


@dataclass(frozen=True, slots=True)
class Later:
    """A key, which of its values come later, and what they are for; ``now`` is what works already."""

    section: str
    key: str
    comes_later: Callable[[object], bool]
    feature: str
    now: str


LATER: tuple[Later, ...] = (
    Later("run", "backend", _one_of("torch"), "runs on PyTorch", "use paddle"),
    Later("run", "device", _one_of("gpu"), "runs on GPUs", "use cpu"),
    Later("run", "dtype", _one_of("bfloat16", "float16"), "16-bit types", "use float32 or float64"),
)


def later_problems(data: Mapping[str, object]) -> list[Problem]:
    """PP107 for every key of ``data`` (a plan before validation) whose feature comes later."""
    problems = []
    for row in LATER:
        section = data.get(row.section)
        if not isinstance(section, Mapping) or row.key not in section:
            continue
        value = section[row.key]
        if row.comes_later(value):
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
