"""The plan that a function was given: a path, a dict, a ``PlanSpec`` or a loaded plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pipeproof.diagnostics.problems import KeyPath
from pipeproof.specs.load_plan import LoadedPlan, load_plan, plan_from_dict
from pipeproof.specs.plan import PlanSpec

GivenPlan = str | os.PathLike[str] | Mapping[str, object] | PlanSpec | LoadedPlan
"""Forms of a plan that functions take."""

Settings = Mapping[str, object]
"""Values by dotted key, such as ``{"topology.pp": 4}``, which replace the plan's."""


def load_given(plan: GivenPlan, settings: Settings | None = None) -> LoadedPlan:
    """Return the loaded plan, with other values for some keys.

    Raises:
        PlanFileError: it is not a valid plan; with all findings.
        TypeError: it is not a form of a plan.
    """
    changes: dict[KeyPath, object] = {tuple(key.split(".")): value for key, value in (settings or {}).items()}
    if isinstance(plan, str | os.PathLike):
        return load_plan(plan, changes)
    if isinstance(plan, Mapping):
        return plan_from_dict(plan, changes)
    if isinstance(plan, PlanSpec | LoadedPlan):
        loaded = plan if isinstance(plan, LoadedPlan) else LoadedPlan(plan)
        return plan_from_dict(plan_data(loaded), changes, source=loaded.source) if changes else loaded
    raise TypeError(f"a plan is a path, a dict, a PlanSpec or a loaded plan, found {type(plan).__name__}")


def plan_data(loaded: LoadedPlan) -> dict[str, object]:
    """Return the keys and values that a plan gives, as in its file."""
    return loaded.spec.model_dump(mode="json", exclude_unset=True)


def name_of(plan: object) -> str:
    """Name of a plan for titles: its file's name, or ``plan``."""
    if isinstance(plan, str | os.PathLike):
        return Path(plan).stem
    source = getattr(plan, "source", None)
    return "plan" if source is None else Path(source.file).stem
