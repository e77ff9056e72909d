"""Lowering a plan as it was loaded: the schedule that it names is read beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from pipeproof.comm.lower import lower
from pipeproof.comm.lowered import LoweredPlan
from pipeproof.comm.times import with_times
from pipeproof.schedule.formats.foreign import ForeignSchedule, custom_schedule, load_schedule_file
from pipeproof.schedule.formats.foreign_checks import Expected
from pipeproof.specs.finding import BadPlanAtError, BadPlanError
from pipeproof.specs.load import LoadedPlan, PlanFileError
from pipeproof.stages.describe.boundary import Boundary


def lower_loaded(loaded: LoadedPlan, *, boundary: Boundary | None = None) -> LoweredPlan:
    """Lower a plan with its own schedule, if it names one; ``boundary`` as for ``lower``.

    Raises:
        PlanFileError: the schedule or the profile cannot be read or does not
            fit, the layers cannot be put onto the stages, or the plan is too
            large.
    """
    with blaming_plan(loaded):
        return lower(from_here(loaded).spec, boundary=boundary, foreign=own_schedule(loaded))


@contextmanager
def blaming_plan(loaded: LoadedPlan) -> Iterator[None]:
    """Let what is found wrong with the plan inside name its place in the plan's file.

    Raises:
        PlanFileError: in place of any BadPlanError.
    """
    source = loaded.source
    try:
        yield
    except BadPlanAtError as error:
        location = source.locate(error.path) if source is not None else None
        raise PlanFileError(*(replace(f, location=location) for f in error.findings), source=source) from error
    except BadPlanError as error:
        raise PlanFileError(*error.findings, source=source) from error


def own_schedule(loaded: LoadedPlan) -> ForeignSchedule | None:
    """The schedule that a plan reads from a file or writes out; None where one is generated.

    Raises:
        ScheduleFileError: it cannot be read, or is not for the sizes of the plan.
    """
    spec, source = loaded.spec, loaded.source
    schedule = spec.schedule
    placed = schedule.placement if isinstance(schedule.placement, tuple) else None
    expected = Expected(
        spec.topology.pp, schedule.num_micro_batches, spec.num_stages, placed, schedule.num_sequence_splits
    )
    if schedule.programs is not None:
        if source is None:
            return custom_schedule(schedule.programs, expected)
        places = [
            [source.locate(("schedule", "programs", rank, index)) for index in range(len(program))]
            for rank, program in enumerate(schedule.programs)
        ]
        ends = [source.locate(("schedule", "programs", rank)) for rank in range(len(schedule.programs))]
        return custom_schedule(schedule.programs, expected, places=places, ends=ends)
    if schedule.path is None:
        return None
    return load_schedule_file(schedule_path(loaded), expected, format=schedule.format)


def schedule_path(loaded: LoadedPlan) -> Path:
    """Where the schedule file of a plan is: beside the plan file, or for a plan made in Python where the process is."""
    assert loaded.spec.schedule.path is not None
    return _folder(loaded) / loaded.spec.schedule.path


def absolute_build(loaded: LoadedPlan) -> str:
    """``model.build`` of own layers, with the file named wherever the process is that reads it."""
    assert loaded.spec.own_layers is not None
    file, function = loaded.spec.own_layers.file_and_function
    return f"{(_folder(loaded) / file).resolve()}:{function}"


def from_here(loaded: LoadedPlan) -> LoadedPlan:
    """The plan with its profile named from where the process is, which a plan file names from where it is itself."""
    profile = loaded.spec.cost.profile
    if profile is None:
        return loaded
    cost = loaded.spec.cost.model_copy(update={"profile": str(_folder(loaded) / profile)})
    return replace(loaded, spec=loaded.spec.model_copy(update={"cost": cost}))


def with_measured_times(loaded: LoadedPlan) -> LoadedPlan:
    """The plan with given times in place of ``cost.profile``, for what changes its stages; itself without one.

    Raises:
        BadPlanError: the profile cannot be read, or is of another plan.
    """
    if loaded.spec.cost.profile is None:
        return loaded
    return replace(loaded, spec=with_times(from_here(loaded).spec))


def _folder(loaded: LoadedPlan) -> Path:
    return Path() if loaded.source is None else Path(loaded.source.file).parent
