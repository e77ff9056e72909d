"""Weights that stages share, as the ranks together know them, and the plan's names of a stage's weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pipeproof.exec.train.module_plan import stage_name

Tie = Mapping[int, str]
"""One weight that several stages use: its name in each of them, by global stage number."""


def merged_ties(reports: Iterable[Mapping[str, Mapping[str, str]]]) -> list[dict[int, str]]:
    """The ties of a model from those that each rank sees, by their key and by the stages as JSON has them."""
    by_key: dict[str, dict[int, str]] = {}
    for of_rank in reports:
        for key, names in of_rank.items():
            by_key.setdefault(key, {}).update({int(stage): name for stage, name in names.items()})
    return [dict(sorted(names.items())) for names in by_key.values() if len(names) > 1]


def names_in_plan(number: int, names: Iterable[str], ties: Sequence[Tie]) -> dict[str, str]:
    """The plan's name of each weight of a stage: a tied one has the name that its first stage gives it."""
    planned = {name: f"{stage_name(number)}.{name}" for name in names}
    for tie in ties:
        if number in tie:
            first = min(tie)
            planned[tie[number]] = f"{stage_name(first)}.{tie[first]}"
    return planned
