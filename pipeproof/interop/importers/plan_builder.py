"""Builder of an imported plan: values with their origins, and assumptions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from pipeproof.diagnostics.finding import Finding, Location
from pipeproof.diagnostics.problems import KeyPath, dotted
from pipeproof.interop.importers.imported import (
    Assumption,
    Flags,
    IgnoredSetting,
    Imported,
    ImportedSource,
    Origin,
    Rephrase,
)

MAX_NUMBER = 2**40
"""Upper bound of all sizes and counts of a plan."""

MAX_LAYERS = 100_000
"""Most blocks of a model, as in plans."""

_MISSPELT = 0.88
"""Least similarity of a misspelt name to the known one, by ``difflib``.

Of the 1,200 flags of Megatron-LM that are not read, only the listed ones are as similar to one that is read.
"""


def misspelt(name: str, candidates: Iterable[str]) -> str | None:
    """Return the known name that an unknown one is a misspelling of; None if none is that similar."""
    return next(iter(get_close_matches(name, candidates, n=1, cutoff=_MISSPELT)), None)


_FRAMEWORKS = MappingProxyType(
    {"megatron": "megatron", "torchtitan": "torch", "fleet": "paddle", "paddleformers": "paddle"}
)
"""The framework of a plan by the kind of its files, unless they leave it open."""


class PlanBuilder:
    """Collects the values, assumptions and findings of an importer.

    A value of the command line (``flags.settings``) is set from the start and
    overrides every later one; a set value overrides an assumed one. An importer
    sets each key once, in any order; assumptions come after known values.
    """

    def __init__(self, kind: str, flags: Flags) -> None:
        self.flags = flags
        self._kind = kind
        self._values: dict[KeyPath, object] = {("pipeproof",): 1}
        self._origins: dict[KeyPath, Origin] = {}
        self._assumptions: list[Assumption] = []
        self._ignored: list[IgnoredSetting] = []
        self._for_device: dict[KeyPath, tuple[object, Origin]] = {}
        self._findings: list[Finding] = []
        for path, value in flags.settings.items():
            self._values[path] = value
            self._origins[path] = Origin(f"--set {dotted(path)}={value}")

    def __contains__(self, path: KeyPath) -> bool:
        """Return True if the value, or one below or above it, is known."""
        return any(
            other_path[: len(path)] == path or path[: len(other_path)] == other_path for other_path in self._values
        )

    def get(self, *path: str | int, default: Any = None) -> Any:
        """Return the value at a path of plan keys, or ``default``."""
        return self._values.get(path, default)

    def number(self, *path: str | int, default: int = 1) -> int:
        """Return the integer at a path if it is a valid size or count; else ``default``.

        Other values are refused, with their key, when the plan is validated.
        """
        value = self._values.get(path)
        return value if type(value) is int and 1 <= value <= MAX_NUMBER else default

    def set(self, path: KeyPath, value: object, setting: str, location: Location | None = None) -> None:
        """Set a value from the user's setting of that name."""
        if path not in self:
            self._values[path] = value
            self._origins[path] = Origin(setting, location)

    def set_for_device(self, path: KeyPath, value: object, setting: str, location: Location | None = None) -> None:
        """Set a value that is used only if times are computed for a device."""
        if ("cost", "analytic", "device") in self:
            self.set(path, value, setting, location)
        elif path not in self:
            self._for_device[path] = value, Origin(setting, location)

    def assume(self, path: KeyPath, value: object, why: str, location: Location | None = None) -> None:
        """Set an assumed value unless one is known; the assumption is reported."""
        if path not in self:
            self._values[path] = value
            self._assumptions.append(Assumption(path, value, why, location))

    def adopt(self, other: PlanBuilder) -> None:
        """Set the values of another builder that are not known, and record its settings that the plan does not show."""
        for path, value in other._values.items():
            if path not in self:
                self._values[path], self._origins[path] = value, other._origins.get(path, Origin("the configuration"))
        self._ignored += other._ignored

    def ignore(self, name: str, why: str, location: Location | None = None) -> None:
        """Record a setting that the plan does not show."""
        self._ignored.append(IgnoredSetting(name, why, location))

    def find(self, finding: Finding) -> None:
        """Record a finding about the files."""
        self._findings.append(finding)

    def imported(self, file: str, lines: tuple[str, ...], rephrase: Rephrase | None = None) -> Imported:
        """Return the result; ``file`` and ``lines`` of the first file locate values without a setting."""
        if self._kind in _FRAMEWORKS:
            self.set(("schedule", "framework"), _FRAMEWORKS[self._kind], f"files of kind {self._kind}")
        return Imported(
            self._kind,
            self._nested(),
            ImportedSource(file, lines, origins=dict(self._origins)),
            tuple(self._assumptions),
            tuple(self._ignored),
            tuple(self._findings),
            rephrase,
            self._for_device,
            self.flags.settings,
        )

    def _nested(self) -> Mapping[str, Any]:
        """Return the values as sections of a plan, in the order of a plan file."""
        first = {name: index for index, name in enumerate(("pipeproof", "model", "topology", "schedule"))}
        plan: dict[str, Any] = {}
        for path, value in sorted(self._values.items(), key=lambda item: first.get(str(item[0][0]), len(first))):
            section = plan
            for part in path[:-1]:
                section = section.setdefault(str(part), {})
            section[str(path[-1])] = value
        return plan


def stages_of(sizes: Sequence[int], num_mtp: int = 0, *, reads_normed: bool = False) -> list[list[str]]:
    """Return the layers of each global stage: the blocks, with the embedding first, modules, norm and head last.

    With ``reads_normed`` the norm is where the last block is, and modules follow it.
    """
    stages: list[list[str]] = []
    block = 0
    for size in sizes:
        stages.append([f"layer.{index}" for index in range(block, block + size)])
        block += size
    last = max(index for index, stage in enumerate(stages) if stage or not index)
    stages[0].insert(0, "embed")
    modules = [f"mtp.{index}" for index in range(num_mtp)]
    if reads_normed:
        stages[last].append("norm")
    stages[-1] += [*modules, "head"] if reads_normed else [*modules, "norm", "head"]
    return stages
