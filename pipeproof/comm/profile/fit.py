"""Whether a profile speaks of a plan: what its times depend on must be the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from pipeproof.specs.finding import BadPlanAtError, Finding, Severity
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.profile import OTHER_PLAN
from pipeproof.specs.profile_file import MeasuredPlan, Profile
from pipeproof.stages.describe.boundary import unit_sizes
from pipeproof.stages.describe.partition import stage_layers

_FREE = frozenset({"pp", "order"})
"""Keys of the topology that do not change what a rank of a stage computes."""
_MOST_NAMED = 5


def measured_sections(plan: PlanSpec) -> dict[str, Any]:
    """What a profile keeps of a plan beside its digest, by the names of ``MeasuredPlan``."""
    schedule, run = plan.schedule, plan.run
    return {
        "model": _given(plan.model),
        "topology": _given(plan.topology),
        "stages": stage_layers(plan),
        "schedule": schedule.kind,
        "num_micro_batches": schedule.num_micro_batches,
        "micro_batch_size": schedule.micro_batch_size,
        "uneven": len(unit_sizes(plan)[0]) > 1,
        "backend": run.backend,
        "device": run.device,
        "dtype": run.dtype,
        "optimizer": run.optimizer,
    }


def require_fit(profile: Profile, plan: PlanSpec) -> None:
    """Refuse a profile whose times are not those of the plan's stages.

    Raises:
        BadPlanAtError: PP162, with what differs; the layers cannot be put onto the stages.
    """
    differences = list(_differences(profile.plan, plan))
    if not differences:
        return
    shown = differences[:_MOST_NAMED]
    if len(differences) > len(shown):
        shown.append(f"{len(differences) - len(shown)} more")
    message = f"`{plan.cost.profile}` was measured on another plan: {'; '.join(shown)}"
    mend = "measure this plan: `pipeproof run PLAN --profile FILE`"
    raise BadPlanAtError(Finding(OTHER_PLAN.code, Severity.ERROR, message, help=mend), ("cost", "profile"))


def _given(section: BaseModel) -> dict[str, Any]:
    """The keys of a section that have other values than their defaults: later releases may have more keys."""
    return section.model_dump(mode="json", exclude_defaults=True)


def _differences(measured: MeasuredPlan, plan: PlanSpec) -> Iterator[str]:
    """What differs, in the words of a plan file."""
    own = measured_sections(plan)
    yield from _of_section("model", measured.model, own["model"])
    yield from _of_section("topology", measured.topology, own["topology"])
    yield from _of_stages(measured.stages, own["stages"])
    names = {"micro_batch_size": "schedule"} | dict.fromkeys(("backend", "device", "dtype", "optimizer"), "run")
    for name, section in names.items():
        yield from _of_value(f"{section}.{name}", getattr(measured, name), own[name])
    if measured.uneven or own["uneven"]:
        where = "there and here" if measured.uneven and own["uneven"] else "there" if measured.uneven else "here"
        yield f"micro-batches differ in size {where}, and a profile has one time for all"


def _of_section(name: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted((there.keys() | here.keys()) - (_FREE if name == "topology" else frozenset())):
        yield from _of_value(f"{name}.{key}", there.get(key), here.get(key))


def _of_value(name: str, there: object, here: object) -> Iterator[str]:
    if there != here:
        yield f"{name} is {_text(there)} there, {_text(here)} here"


def _of_stages(there: tuple[tuple[str, ...], ...], here: tuple[tuple[str, ...], ...]) -> Iterator[str]:
    if len(there) != len(here):
        yield f"it has {len(there)} stages there, {len(here)} here"
    elif there != here:
        stage = next(number for number, (a, b) in enumerate(zip(there, here, strict=True)) if a != b)
        yield f"stage {stage} has layers {', '.join(there[stage])} there, {', '.join(here[stage])} here"


def _text(value: object) -> str:
    if value is None:
        return "the default"
    return str(value).lower() if isinstance(value, bool) else str(value)
