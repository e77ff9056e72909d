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


def _true(value: object) -> bool:
    return value is True


def _more_than_one(value: object) -> bool:
    return type(value) is int and value > 1


def _one_of(*names: str) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and value in names


def _other_than(name: str) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and value != name


@dataclass(frozen=True, slots=True)
class Later:
    """A key, which of its values come later, and what they are for; ``now`` is what works already."""

    section: str
    key: str
    comes_later: Callable[[object], bool]
    feature: str
    now: str


_LATER_SCHEDULES = (
    "eager_1f1b", "looped_bfs", "zb_h1", "zb_h2", "interleaved_zb", "zb_v", "v_half", "v_min",
    "dualpipe", "dualpipe_v", "chimera", "seq1f1b", "optimal",
)  # fmt: skip

LATER: tuple[Later, ...] = (
    Later("model", "kind", _one_of("layers"), "models of your own layers", "use gpt"),
    Later("model", "layers", _anything, "models of your own layers", "remove the key and use kind: gpt"),
    Later("model", "num_kv_heads", _anything, "grouped-query attention", "remove the key"),
    Later("model", "tied_embedding", _true, "tied embeddings", "use false"),
    Later("model", "moe", _anything, "mixture of experts", "remove the key"),
    Later("model", "mtp", _anything, "multi-token prediction", "remove the key"),
    Later(
        "schedule",
        "kind",
        _one_of(*_LATER_SCHEDULES),
        "more schedules",
        "use gpipe, 1f1b or interleaved, or kind: file",
    ),
    Later("schedule", "variant", _other_than(""), "variants of schedules", "remove the key"),
    Later("schedule", "num_sequence_splits", _more_than_one, "sequence splits", "use 1"),
    Later("schedule", "placement", _one_of("v"), "other placements of stages", "use loop"),
    Later(
        "transport",
        "recv_post",
        _other_than("just_in_time"),
        "other times to post receives",
        "use just_in_time",
    ),
    Later(
        "cost",
        "analytic",
        _anything,
        "times computed from a device's data sheet",
        "give forward_us and backward_us",
    ),
    Later("cost", "profile", _anything, "times read from a profile", "give forward_us and backward_us"),
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
