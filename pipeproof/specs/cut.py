"""The keys that say where a model is cut into stages, and which layers only take a place in the cut."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, WithJsonSchema

from pipeproof.specs.problems import KeyPath, Problem, describe_value, dotted, problems_error

if TYPE_CHECKING:
    from pipeproof.specs.plan import PlanSpec

UNIFORM = "uniform"
"""Of all layers, equally many to each stage."""

BY_CLASS = "layer:"
"""What comes before the pattern of class names that are counted."""


class EmptyLayersSpec(BaseModel):
    """Layers that hand on what they get, and only take a place in the cut, as PaddleFleet's ``EmptyLayer``.

    They have no weights and cost nothing. Fleet's keys for them are
    ``num_empty_layers_add_in_head`` and ``_tail``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    head: int = Field(default=0, ge=0, le=100_000, description="Empty layers between the embedding and the blocks.")
    tail: int = Field(default=0, ge=0, le=100_000, description="Empty layers between the blocks and the head.")


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
    """A cut in one word, as Fleet's ``seg_method``."""
    if value == UNIFORM:
        return value
    if not value.startswith(BY_CLASS):
        raise problems_error([_not_a_cut("PP106", (), "a list of stages, `uniform` or `layer:REGEX`", value)])
    pattern = value.removeprefix(BY_CLASS)
    help_text = "write for example `layer:TransformerLayer|EmptyLayer`"
    if not pattern:
        message = "`stages: layer:` names no class of layers"
    elif ":" in pattern:
        message = f"the pattern of `stages` has a colon, and Fleet reads up to it: {describe_value(pattern)}"
        help_text = "write a pattern without colons"
    else:
        try:
            re.compile(pattern)
        except re.error as error:
            message = f"the pattern of `stages` is no regular expression: {error}"
        else:
            return value
    raise problems_error([Problem("PP106", (), message, help=help_text)])


def _not_a_cut(code: str, path: KeyPath, expected: str, found: object) -> Problem:
    return Problem(code, path, f"`{dotted(('stages', *path))}` must be {expected}, found {describe_value(found)}")


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
"""The layers of each global stage by name, or how Fleet would cut: ``uniform``, or ``layer:`` and a pattern."""


def check_cut(plan: PlanSpec) -> list[Problem]:
    """PP106: as in Fleet, ``uniform`` is for one chunk on a rank, or the two of DualPipeV."""
    if plan.stages != UNIFORM or plan.schedule.num_chunks == 1 or plan.schedule.kind == "dualpipe_v":
        return []
    message = f"`stages: uniform` is given together with schedule.num_chunks {plan.schedule.num_chunks}, which Fleet "
    message += "cuts by class only"
    mend = "write `layer:TransformerLayer|EmptyLayer`, or list the layers of each stage"
    return [Problem("PP106", ("stages",), message, help=mend)]
