"""Changes that turn one plan file into another, key by key and as lines of YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml


@dataclass(frozen=True, slots=True)
class Change:
    """Keys with new values by section, and keys to remove (dotted, or a section's name)."""

    set: Mapping[str, Mapping[str, Any]]
    remove: tuple[str, ...]

    def lines(self) -> list[str]:
        """The change as lines of a plan file; what goes away is in comments."""
        lines = [f"# remove {key}" for key in self.remove]
        for section, values in self.set.items():
            lines.append(f"{section}:")
            lines += [f"  {key}: {_flow(value)}" for key, value in values.items()]
        return lines


def change_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> Change:
    """From one plan to another, both as they are written; ``after`` has no section that is no mapping and new."""
    set_: dict[str, dict[str, Any]] = {}
    remove = [section for section in before if section not in after]
    for section, values in after.items():
        old = before.get(section, {})
        if values == old:
            continue
        set_[section] = {key: value for key, value in values.items() if key not in old or old[key] != value}
        remove += [f"{section}.{key}" for key in old if key not in values]
    return Change({section: values for section, values in set_.items() if values}, tuple(remove))


def _flow(value: Any) -> str:
    """A value on one line."""
    return str(yaml.safe_dump(value, default_flow_style=True, width=10**9)).removesuffix("...\n").strip()
