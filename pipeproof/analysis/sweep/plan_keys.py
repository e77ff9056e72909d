"""The dotted keys of a plan, so that a misspelt key is reported once and not by every point."""

from __future__ import annotations

from typing import Any, get_origin

from pydantic import BaseModel

from pipeproof.diagnostics.problems import nearest_name
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.section import sections_in


def unknown_part(key: str) -> str | None:
    """The part of ``schedule.kind`` and the like, from its beginning, that no plan has; None if all is known."""
    sections: tuple[type[BaseModel], ...] = (PlanSpec,)
    parts = key.split(".")
    for depth, part in enumerate(parts):
        fields = [section.model_fields[part] for section in sections if part in section.model_fields]
        if not fields:
            return ".".join(parts[: depth + 1])
        sections = tuple(section for field in fields for section in _sections_in(field.annotation))
    return None


def near_key(key: str) -> str | None:
    """The known dotted key that was probably meant."""
    known = [
        f"{section}.{name}"
        for section, field in PlanSpec.model_fields.items()
        for model in _sections_in(field.annotation)
        for name in model.model_fields
    ]
    last = key.rpartition(".")[2]
    return nearest_name(key, known) or next((other for other in known if other.endswith(f".{last}")), None)


def _sections_in(annotation: Any) -> tuple[type[BaseModel], ...]:
    """The sections that a key may hold; none for a plain value, and for a list, which is set as a whole."""
    return () if get_origin(annotation) is tuple else sections_in(annotation)
