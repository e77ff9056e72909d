"""The key ``stages``: the partition of the layers into stages."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from pipeproof.diagnostics.problems import KeyPath, Problem, describe_value, dotted, problems_error

UNIFORM = "uniform"
"""The method that gives each stage the same number of layers."""

BY_CLASS = "layer:"
"""The prefix of a pattern of class names; only matching layers are counted."""


def _validate_cut(value: object) -> tuple[tuple[str, ...], ...] | str:
    if isinstance(value, str):
        return _method(value)
    if not isinstance(value, list | tuple):
        raise problems_error([_not_a_cut("PP105", (), "a list of stages, `uniform` or `layer:REGEX`", value)])
    problems = []
    for stage, names in enumerate(value):
        if not isinstance(names, list | tuple):
            problems.append(_not_a_cut("PP105", (stage,), "a list of layers", names))
            continue
        for index, name in enumerate(names):
            if not isinstance(name, str):
                problems.append(_not_a_cut("PP105", (stage, index), "a string", name))
            elif not name:
                problems.append(_not_a_cut("PP106", (stage, index), "the name of a layer", name))
    if problems:
        raise problems_error(problems)
    return tuple(tuple(names) for names in value)


def _method(value: str) -> str:
    """Validate a method of partition: a string, as Fleet's ``seg_method``."""
    if value == UNIFORM:
        return value
    if not value.startswith(BY_CLASS):
        raise problems_error([_not_a_cut("PP106", (), "a list of stages, `uniform` or `layer:REGEX`", value)])
    pattern = value.removeprefix(BY_CLASS)
    fix = "write for example `layer:TransformerLayer|EmptyLayer`"
    if not pattern:
        message = "`stages: layer:` names no class of layers"
    elif ":" in pattern:
        message = f"the pattern of `stages` has a colon, and Fleet stops reading there: {describe_value(pattern)}"
        fix = "write a pattern without colons"
    else:
        try:
            re.compile(pattern)
        except re.error as error:
            message = f"the pattern of `stages` is not a regular expression: {error}"
        else:
            return value
    raise problems_error([Problem("PP106", (), message, help=fix)])


def _not_a_cut(code: str, path: KeyPath, expected: str, value: object) -> Problem:
    return Problem(code, path, f"`{dotted(('stages', *path))}` must be {expected}, found {describe_value(value)}")


def _to_json(value: tuple[tuple[str, ...], ...] | str) -> str | list[list[str]]:
    return value if isinstance(value, str) else [list(names) for names in value]


StageCut = Annotated[
    tuple[tuple[str, ...], ...] | str,
    PlainValidator(_validate_cut),
    PlainSerializer(_to_json, when_used="json"),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "items": {"type": "array", "items": {"type": "string", "minLength": 1}}},
                {"type": "string", "pattern": "^(uniform|layer:[^:]+)$"},
            ]
        }
    ),
]
"""The layers of each global stage by name, or Fleet's method: ``uniform``, or ``layer:`` and a pattern."""
