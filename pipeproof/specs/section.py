"""What all sections of a plan share: strict, frozen, and without unknown keys."""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticKnownError

from pipeproof.specs.problems import Problem, problems_error


def _tuple_of_list(value: object) -> object:
    """Files have lists where a frozen spec has tuples; nothing else is converted."""
    return tuple(value) if isinstance(value, list) else value


def sections_in(annotation: object) -> tuple[type[BaseModel], ...]:
    """The sections that a key may hold: itself, those of a choice, and those of the items of a list."""
    if isinstance(annotation, type):
        return (annotation,) if issubclass(annotation, BaseModel) else ()
    origin = get_origin(annotation)
    if origin is Annotated:
        return sections_in(get_args(annotation)[0])
    items = get_args(annotation) if origin in (Union, UnionType) else get_args(annotation)[:1]
    return tuple(section for item in items for section in sections_in(item))


FROM_LIST = BeforeValidator(_tuple_of_list)
"""For a field that is a tuple."""


def int_only(value: object) -> object:
    """``Literal[1]`` alone would accept ``true`` and 1.0, which equal 1."""
    if type(value) is not int:
        raise PydanticKnownError("int_type")
    return value


def refuse(problems: list[Problem]) -> None:
    """Raise what pydantic takes for an error of validation, if there are any problems."""
    if problems:
        raise problems_error(problems)


class Section(BaseModel):
    """A part of a plan; values are strict: a quoted number is none, and ``true`` is not 1."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
