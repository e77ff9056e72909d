"""Keys and values of the plan format whose features come in a later release.

They are refused with a sentence that says so, rather than as unknown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pipeproof.specs.problems import Problem, shortened


def _anything(_: object) -> bool:
    return True


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
    Later("model", "kind", _one_of("layers"), "models of your own layers", "use gpt"),
    Later("model", "layers", _anything, "models of your own layers", "remove the key and use kind: gpt"),
    Later("model", "mtp", _anything, "multi-token prediction", "remove the key"),
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
            whole_key = row.comes_later is _anything
            key = f"{row.section}.{row.key}"
            what = f"`{key}`" if whole_key else f"`{key}: {_text(value)}`"
            problems.append(
                Problem(
                    "PP107",
                    (row.section, row.key),
                    f"{what} comes in a later release, which brings {row.feature}",
                    help=f"in this release, {row.now}",
                    at_key=whole_key,
                )
            )
    return problems


def _text(value: object) -> str:
    return shortened(value if isinstance(value, str) else json.dumps(value, default=str))


def later_keys(section: str) -> tuple[str, ...]:
    """The keys of ``section`` that are refused whatever their value."""
    return tuple(row.key for row in LATER if row.section == section and row.comes_later is _anything)
