"""A plan in the making: values with their origins, and what had to be assumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeproof.interop.imported import (
    Assumption,
    Flags,
    IgnoredSetting,
    Imported,
    ImportedSource,
    Origin,
    Retell,
)
from pipeproof.specs.finding import Finding, Location
from pipeproof.specs.problems import KeyPath, dotted

MOST = 2**40
"""More than any size or count of a plan may be."""


class Draft:
    """Collects what an importer finds out.

    A value of the command line (``flags.settings``) is there from the start
    and wins over every later one; a value that is set wins over an assumed
    one. Within one importer each key is set once, in any order; assumptions
    come after what is known.
    """

    def __init__(self, kind: str, flags: Flags) -> None:
        self.flags = flags
        self._kind = kind
        self._values: dict[KeyPath, object] = {("pipeproof",): 1}
        self._origins: dict[KeyPath, Origin] = {}
        self._assumptions: list[Assumption] = []
        self._ignored: list[IgnoredSetting] = []
        self._findings: list[Finding] = []
        for path, value in flags.settings.items():
            self._values[path] = value
            self._origins[path] = Origin(f"--set {dotted(path)}={value}")

    def __contains__(self, path: KeyPath) -> bool:
        """Whether the value, or something below or above it, is known."""
        return any(known[: len(path)] == path or path[: len(known)] == known for known in self._values)

    def get(self, *path: str | int, default: Any = None) -> Any:
        """The value at a path of plan keys, or ``default``."""
        return self._values.get(path, default)

    def number(self, *path: str | int, default: int) -> int:
        """The whole number at a path, if it is one that a size or a count can have; else ``default``.

        Whatever else the command line says there is refused with the plan.
        """
        value = self._values.get(path)
        return value if type(value) is int and 1 <= value <= MOST else default

    def set(self, path: KeyPath, value: object, setting: str, location: Location | None = None) -> None:
        """Take a value that the user's setting of that name gives."""
        if path not in self:
            self._values[path] = value
            self._origins[path] = Origin(setting, location)

    def assume(self, path: KeyPath, value: object, why: str, location: Location | None = None) -> None:
        """Take a value that nothing gives, unless one is known; the user is told."""
        if path not in self:
            self._values[path] = value
            self._assumptions.append(Assumption(path, value, why, location))

    def ignore(self, name: str, why: str, location: Location | None = None) -> None:
        """Note a setting that the plan does not show."""
        self._ignored.append(IgnoredSetting(name, why, location))

    def find(self, finding: Finding) -> None:
        """Note a finding about the files themselves."""
        self._findings.append(finding)

    def imported(self, file: str, lines: tuple[str, ...], retell: Retell | None = None) -> Imported:
        """The result; ``file`` and ``lines`` are the first file's, for the places of what no setting gave."""
        return Imported(
            self._kind,
            self._nested(),
            ImportedSource(file, lines, origins=dict(self._origins)),
            tuple(self._assumptions),
            tuple(self._ignored),
            tuple(self._findings),
            retell,
        )

    def _nested(self) -> Mapping[str, Any]:
        """The values as sections of a plan, in the order of a plan file."""
        first = {name: index for index, name in enumerate(("pipeproof", "model", "topology", "schedule"))}
        plan: dict[str, Any] = {}
        for path, value in sorted(self._values.items(), key=lambda item: first.get(str(item[0][0]), len(first))):
            section = plan
            for part in path[:-1]:
                section = section.setdefault(str(part), {})
            section[str(path[-1])] = value
        return plan
