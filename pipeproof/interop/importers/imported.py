"""Result of an importer: a plan, the location of each of its values in the user's files, and assumptions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeproof.diagnostics.finding import Finding, Location
from pipeproof.diagnostics.problems import KeyPath
from pipeproof.diagnostics.source import SourceMap
from pipeproof.specs.cost import DeviceName
from pipeproof.specs.plan import PlanSpec

Rephrase = Callable[[PlanSpec, tuple[Finding, ...]], tuple[Finding, ...]]
"""Rewrites the findings of ``check`` about the imported plan in terms of the user's settings."""


@dataclass(frozen=True, slots=True)
class Flags:
    """Options of the command line in addition to the files.

    ``settings`` are plan keys with their values (``--set``), which replace a
    file's; ``model_config`` is a Hugging Face style ``config.json``;
    ``world_size`` the number of processes.
    """

    settings: Mapping[KeyPath, object] = field(default_factory=dict)
    model_config: Path | None = None
    world_size: int | None = None


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a plan value: a setting as the user wrote it, and its location; a flag has none."""

    setting: str
    location: Location | None = None


@dataclass(frozen=True, slots=True)
class Assumption:
    """A plan value that no setting gave, with the reason; ``location`` is its cause in the files, if there is one."""

    key: KeyPath
    value: object
    why: str
    location: Location | None = None


@dataclass(frozen=True, slots=True)
class IgnoredSetting:
    """A setting of the user that the plan does not show, and why."""

    name: str
    why: str
    location: Location | None = None


@dataclass(frozen=True)
class ImportedSource(SourceMap):
    """Source map of plan keys to the imported files; ``file`` and ``lines`` are of the first file."""

    origins: Mapping[KeyPath, Origin] = field(default_factory=dict)

    def locate(self, path: KeyPath, *, key: bool = False) -> Location:
        """Return the location of the setting of ``path``, else of the nearest key above or below it."""
        for length in range(len(path), 0, -1):
            origin = self.origins.get(path[:length])
            if origin is not None and origin.location is not None:
                return origin.location
        below = (
            origin.location for other_path, origin in self.origins.items() if path and other_path[: len(path)] == path
        )
        return next((location for location in below if location is not None), Location(self.file))


@dataclass(frozen=True)
class Imported:
    """A plan from a user's files.

    ``plan`` has the keys of a plan file. ``source`` has the origin of each
    value: findings of ``check`` point to the user's lines.
    ``findings`` are the importer's own, about the files; ``assumptions`` and
    ``ignored`` become findings in ``pipeproof.interop.importers.check_imported``.
    """

    kind: str
    plan: Mapping[str, Any]
    source: ImportedSource
    assumptions: tuple[Assumption, ...] = ()
    ignored: tuple[IgnoredSetting, ...] = ()
    findings: tuple[Finding, ...] = ()
    rephrase: Rephrase | None = None
    for_device: Mapping[KeyPath, tuple[object, Origin]] = field(default_factory=dict)
    """Values that a plan has only if its times are computed for a device."""
    settings: Mapping[KeyPath, object] = field(default_factory=dict)
    """Values of the command line, which ``plan`` has already; findings about them name ``--set``."""
    again: Callable[[Mapping[KeyPath, object]], Imported] | None = None
    """Imports the same files with further values of plan keys; None if they cannot be imported again."""


Importer = Callable[[Sequence[Path], Flags], Imported]
"""Reader of files of one kind.

Raises PlanFileError, with places in the files, if they cannot be read or do
not form a plan.
"""


def repeatable(read: Callable[[Flags], Imported], flags: Flags) -> Imported:
    """Return ``read(flags)`` with ``again``, which imports it with other values of plan keys."""
    return replace(read(flags), again=lambda settings: read(replace(flags, settings={**flags.settings, **settings})))


def with_device(imported: Imported, device: DeviceName) -> Imported:
    """Return the plan with times that are computed for a device.

    Products are in bfloat16 unless the files or ``--set`` name a type of weights: trainings on such devices are in a
    16-bit type, and float16 has the same peak.
    """
    plan = dict(imported.plan)
    origins = dict(imported.source.origins)
    for path, (value, origin) in imported.for_device.items():
        set_at(plan, path, value)
        origins[path] = origin
    cost = dict(plan.get("cost", {}))
    analytic = {**cost.get("analytic", {}), "device": device}
    origins["cost", "analytic", "device"] = Origin(f"--device {device}")
    dtype = plan.get("run", {}).get("dtype")
    if dtype in (None, "float16") and "dtype" not in analytic:
        analytic["dtype"] = "bfloat16"
        why = "float16 has the same peak" if dtype else "assumed: the files name no type of weights"
        origins["cost", "analytic", "dtype"] = Origin(why)
    attention = plan.get("memory", {}).get("attention")
    if attention is not None:
        analytic.setdefault("attention", attention)
    plan["cost"] = {**cost, "analytic": analytic}
    return replace(imported, plan=plan, source=replace(imported.source, origins=origins))


def set_at(plan: dict[str, Any], path: KeyPath, value: object) -> None:
    """Set a value of a plan unless it has one; sections on the way are copied, or made."""
    section = plan
    for part in path[:-1]:
        section[str(part)] = section = dict(section.get(str(part), {}))
    section.setdefault(str(path[-1]), value)


def plan_text(imported: Imported, kind: str) -> str:
    """Return the imported plan as YAML text for ``load_plan``; comments give the origin of each value."""
    head = [
        f"# Made by `pipeproof import plan --from {kind}`. A comment names the setting of a value, and its place.",
        *(f"# Not shown here: {setting.name} ({setting.why})" for setting in imported.ignored),
    ]
    return "\n".join([*head, *plan_lines(imported.plan, lambda path: _comment(path, imported))]) + "\n"


def plan_lines(section: Mapping[str, Any], comment_of: Callable[[KeyPath], str], path: KeyPath = ()) -> Iterator[str]:
    """Yield the lines of a plan in YAML; a value is followed by the comment of its key, if there is one."""
    for key, value in section.items():
        key_path = (*path, key)
        indent = "  " * len(path)
        if isinstance(value, Mapping) and value:
            yield f"{indent}{key}:"
            yield from plan_lines(value, comment_of, key_path)
        else:
            comment = " ".join(comment_of(key_path).split())
            yield f"{indent}{key}: {json.dumps(value, ensure_ascii=False)}" + (f"  # {comment}" if comment else "")


def _comment(path: KeyPath, imported: Imported) -> str:
    origin = imported.source.origins.get(path)
    if origin is not None:
        location = origin.location
        text = origin.setting if location is None else f"{origin.setting}, {location}"
    else:
        text = next((f"assumed: {assumption.why}" for assumption in imported.assumptions if assumption.key == path), "")
    return text
