"""An imported plan as a plan file, with the origin of each value beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pipeproof.interop.imported import Imported
from pipeproof.specs.problems import KeyPath


def plan_text(imported: Imported, kind: str) -> str:
    """YAML text that ``load_plan`` reads as the imported plan; comments say where each value comes from."""
    head = [
        f"# Made by `pipeproof import {kind}`. A comment names the setting a value comes from, and its place.",
        *(f"# Not shown here: {setting.name} ({setting.why})" for setting in imported.ignored),
    ]
    return "\n".join([*head, *_lines(imported.plan, (), imported)]) + "\n"


def _lines(section: Mapping[str, Any], path: KeyPath, imported: Imported) -> Iterator[str]:
    for key, value in section.items():
        here = (*path, key)
        indent = "  " * len(path)
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _lines(value, here, imported)
        else:
            yield f"{indent}{key}: {json.dumps(value, ensure_ascii=False)}{_comment(here, imported)}"


def _comment(path: KeyPath, imported: Imported) -> str:
    origin = imported.source.origins.get(path)
    if origin is not None:
        place = origin.location
        text = origin.setting if place is None else f"{origin.setting}, {place.file}:{place.line}"
    else:
        text = next((f"assumed: {known.why}" for known in imported.assumptions if known.key == path), "")
    return f"  # {' '.join(text.split())}" if text else ""
