"""The base class of all sections of a plan, and helpers of their validators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import isqrt
from types import UnionType
from typing import Annotated, Any, Self, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticKnownError

from pipeproof.diagnostics.problems import Problem, listed, problems_error


class Section(BaseModel):
    """A part of a plan. Values are strict: a quoted number is not a number, and ``true`` is not 1."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def _problems(self) -> Iterable[Problem]:
        """Contradictions between the keys of the section."""
        return ()

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        problems = [*self._problems()]
        if problems:
            raise problems_error(problems)
        return self


def _tuple_of_list(value: object) -> object:
    """Convert a list to the tuple of a frozen spec; other values stay."""
    return tuple(value) if isinstance(value, list) else value


FROM_LIST = BeforeValidator(_tuple_of_list)
"""Validator of a field that is a tuple."""


def shorthand_schema(
    schema: CoreSchema, handler: GetJsonSchemaHandler, plain: Callable[[dict[str, Any]], dict[str, Any]]
) -> JsonSchemaValue:
    """Return the schema of a section or its plain short form; ``plain`` has the section's schema."""
    mapping = handler.resolve_ref_schema(handler(schema))
    return {
        "title": mapping.pop("title"),
        "description": mapping.pop("description"),
        "anyOf": [plain(mapping), mapping],
    }


def int_only(value: object) -> object:
    """Refuse ``true`` and 1.0, which equal 1 and would pass as ``Literal[1]``."""
    if type(value) is not int:
        raise PydanticKnownError("int_type")
    return value


def sections_in(annotation: object) -> tuple[type[BaseModel], ...]:
    """Return the sections that a key may hold: one, the members of a union, or the items of a list."""
    if isinstance(annotation, type):
        return (annotation,) if issubclass(annotation, BaseModel) else ()
    origin = get_origin(annotation)
    if origin is Annotated:
        return sections_in(get_args(annotation)[0])
    items = get_args(annotation) if origin in (Union, UnionType) else get_args(annotation)[:1]
    return tuple(section for item in items for section in sections_in(item))


def multiples(size: int, unit: int) -> str:
    """Return the multiples of ``unit`` next to ``size``, as text."""
    below = size // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def divisors(size: int, near: int) -> str:
    """Return the divisors of ``size`` next to ``near``, which is not a divisor, as text."""
    small = [n for n in range(1, isqrt(size) + 1) if size % n == 0]
    candidates = {*small, *(size // n for n in small)}
    below = max((n for n in candidates if n < near), default=None)
    above = min((n for n in candidates if n > near), default=None)
    return listed([n for n in (below, above) if n is not None])
