"""Which dotted keys a plan has, so that a misspelt one is told at once and not by every point."""

from __future__ import annotations

from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from pipeproof.specs.later import later_keys
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.problems import nearest_name


def unknown_part(key: str) -> str | None:
    """The part of ``schedule.kind`` and the like, from its beginning, that no plan has; None if all is known."""
    model: type[BaseModel] | None = PlanSpec
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if model is None or part not in _names(model, parts[:depth]):
            return ".".join(parts[: depth + 1])
        field = model.model_fields.get(part)
        model = _section_in(field.annotation) if field is not None else None
        if field is None:  # of a later release, which says so itself, whatever is below it
            return None
    return None


def near_key(key: str) -> str | None:
    """The known dotted key that was probably meant."""
    known = [
        f"{section}.{name}"
        for section, field in PlanSpec.model_fields.items()
        if (model := _section_in(field.annotation)) is not None
        for name in model.model_fields
    ]
    last = key.rpartition(".")[2]
    return nearest_name(key, known) or next((other for other in known if other.endswith(f".{last}")), None)


def _names(model: type[BaseModel], section: list[str]) -> set[str]:
    return {*model.model_fields, *(later_keys(section[0]) if len(section) == 1 else ())}


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The model that a key holds; None for a plain value, and for a list, which is set as a whole."""
    choices = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    for candidate in (annotation, *choices):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
