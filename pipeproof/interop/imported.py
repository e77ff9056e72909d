"""What an importer gives: a plan, the place of each of its values in the user's files, and what was assumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeproof.specs.finding import Finding, Location
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.problems import KeyPath
from pipeproof.specs.source import SourceMap

Retell = Callable[[PlanSpec, tuple[Finding, ...]], tuple[Finding, ...]]
"""Puts the findings of ``check`` about the imported plan into the words of the user's own settings."""


@dataclass(frozen=True, slots=True)
class Flags:
    """What the command line says beside the files.

    ``settings`` are plan keys with their values (``--set``), which win over
    whatever a file says; ``model_config`` is a Hugging Face style
    ``config.json``; ``world_size`` the number of processes.
    """

    settings: Mapping[KeyPath, object] = field(default_factory=dict)
    model_config: Path | None = None
    world_size: int | None = None


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a plan value comes from: a setting as the user wrote it, and its place; a flag has none."""

    setting: str
    location: Location | None = None


@dataclass(frozen=True, slots=True)
class Assumption:
    """A plan value that nothing said, and why it is this one; ``location`` is what it follows from, if anything."""

    key: KeyPath
    value: object
    why: str
    location: Location | None = None


@dataclass(frozen=True, slots=True)
class IgnoredSetting:
    """A setting of the user's that the plan does not show, and why."""

    name: str
    why: str
    location: Location | None = None


@dataclass(frozen=True)
class ImportedSource(SourceMap):
    """Finds plan keys in the files that they were imported from; ``file`` and ``lines`` are those of the first file."""

    origins: Mapping[KeyPath, Origin] = field(default_factory=dict)

    def locate(self, path: KeyPath, *, key: bool = False) -> Location:
        """The place of the setting that the value at ``path`` comes from, else of the nearest one above or below it."""
        for length in range(len(path), 0, -1):
            origin = self.origins.get(path[:length])
            if origin is not None and origin.location is not None:
                return origin.location
        below = (origin.location for known, origin in self.origins.items() if path and known[: len(path)] == path)
        return next((place for place in below if place is not None), Location(self.file, 1, 1))


@dataclass(frozen=True)
class Imported:
    """A plan made from a user's files.

    ``plan`` has the keys of a plan file. ``source`` knows the origin of each
    value, so that findings of ``check`` point to the user's own lines.
    ``findings`` are the importer's own, about the files; ``assumptions`` and
    ``ignored`` become findings in ``pipeproof.interop.judge``.
    """

    kind: str
    plan: Mapping[str, Any]
    source: ImportedSource
    assumptions: tuple[Assumption, ...] = ()
    ignored: tuple[IgnoredSetting, ...] = ()
    findings: tuple[Finding, ...] = ()
    retell: Retell | None = None


Importer = Callable[[Sequence[Path], Flags], Imported]
"""Reads files of one kind.

Raises PlanFileError, with places in the files, for what cannot be read or can
be no plan.
"""
