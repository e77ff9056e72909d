"""Points of a sweep: checked, simulated, and the results.

This runs in worker processes: arguments and results can be pickled.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from typing import Any

from pipeproof.analysis.sweep.sweep_points import Point, Settings
from pipeproof.diagnostics.finding import Finding, PipeproofError, Severity
from pipeproof.diagnostics.source import SourceMap
from pipeproof.sim.simulate import Simulation, simulate
from pipeproof.sim.timeline import number_to_json
from pipeproof.specs.load_plan import LoadedPlan, plan_from_dict
from pipeproof.specs.plan import PlanSpec
from pipeproof.verify.check_plan import check
from pipeproof.version import __version__


class Status(StrEnum):
    """Status of a point."""

    OK = "ok"
    """It passed its check and was simulated."""
    REFUSED = "refused"
    """It is not a plan, or has errors; the result has the code and the message."""
    FAILED = "failed"
    """Its worker died, or an error occurred that is not the plan's fault."""


_EXACT = ("makespan", "sequence", "idle_ratio", "most_idle_ratio")
"""Exact numbers of a result, by their keys in JSON."""


@dataclass(frozen=True)
class PointResult:
    """Result of one point; it has figures if and only if ``status`` is ok.

    Times are exact microseconds: ``makespan`` of a step, ``sequence`` the same per sequence of the step's batch, over
    all data-parallel ranks. ``idle_ratio`` is the part of all ranks' time within the makespan in which they do not
    compute, ``most_idle_ratio`` the largest of one rank; ``peak_activations`` the most chunk activations of a
    micro-batch that a rank holds. ``warnings`` are the codes of warnings of the check. ``traceback`` has information
    about a failure, with paths of its worker: it is not compared. ``details`` are figures of another evaluation than
    ``evaluate``, as JSON data.
    """

    id: str
    settings: Settings
    status: Status
    makespan: Fraction | None = None
    sequence: Fraction | None = None
    idle_ratio: Fraction | None = None
    most_idle_ratio: Fraction | None = None
    peak_activations: int | None = None
    warnings: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    code: str | None = None
    message: str | None = None
    traceback: str | None = field(default=None, compare=False)

    def to_json(self) -> dict[str, Any]:
        """The result as JSON data: see ``docs/schemas/sweep.schema.json``."""
        result: dict[str, Any] = {"id": self.id, "set": dict(self.settings), "status": str(self.status)}
        if self.status is Status.OK:
            for key in _EXACT:
                result |= number_to_json(key, getattr(self, key))
            result |= {"peak_activations": self.peak_activations, "warnings": list(self.warnings)}
            return {**result, "details": dict(self.details)} if self.details else result
        result |= {"code": self.code, "message": self.message}
        return result if self.traceback is None else {**result, "traceback": self.traceback}


Evaluate = Callable[[Point, str], PointResult]


def evaluate_here(point: Point, plan_file: str, evaluate_point: Evaluate) -> tuple[str, PointResult]:
    """Evaluate a point in a worker: the version of pipeproof there, and the result; one that raises has failed."""
    try:
        return __version__, evaluate_point(point, plan_file)
    except Exception as error:  # noqa: BLE001 - a fault that is not the plan's is a result too
        message = f"{type(error).__name__}: {error}"
        return __version__, failed_point(point, message, traceback.format_exc())


def failed_point(point: Point, message: str, traceback_text: str | None = None) -> PointResult:
    """Return the result of a point whose worker died or that raised."""
    return PointResult(point.id, point.settings, Status.FAILED, message=message, traceback=traceback_text)


def evaluate(point: Point, plan_file: str) -> PointResult:
    """Check and simulate one point; schedule files that its plan names are relative to ``plan_file``.

    An error of the plan is a result, not an exception.
    """
    try:
        spec = plan_from_dict(point.plan).spec
        report = check(LoadedPlan(spec, SourceMap(plan_file, ())))
        if report.errors:
            return refused_point(point, report.errors)
        assert report.subject.lowered is not None
        simulation = simulate(report.subject.lowered)
    except PipeproofError as error:
        return refused_point(point, error.findings)
    warned = {finding.code for finding in report.findings if finding.severity is Severity.WARNING}
    return simulated_point(point, spec, simulation, tuple(sorted(warned)))


def refused_point(point: Point, findings: Sequence[Finding]) -> PointResult:
    """The result of a point that is not a plan, or has errors: its first finding."""
    first, more = findings[0], len(findings) - 1
    message = f"{first.message} (and {more} more)" if more else first.message
    return PointResult(point.id, point.settings, Status.REFUSED, code=first.code, message=message)


def simulated_point(point: Point, spec: PlanSpec, simulation: Simulation, warnings: tuple[str, ...]) -> PointResult:
    """The figures of a simulated point."""
    figures = simulation.figures
    idle = [rank.bubble_makespan_ratio for rank in figures]
    return PointResult(
        point.id,
        point.settings,
        Status.OK,
        makespan=simulation.makespan,
        sequence=simulation.makespan / num_sequences(spec),
        idle_ratio=sum(idle, Fraction(0)) / len(idle),
        most_idle_ratio=max(idle),
        peak_activations=max(rank.peak_activations for rank in figures),
        warnings=warnings,
    )


def num_sequences(spec: PlanSpec) -> int:
    """Sequences of a step, over all data-parallel and expert-parallel ranks, which have their own micro-batches."""
    schedule = spec.schedule
    last = schedule.last_micro_batch_size or schedule.micro_batch_size
    sequences = (schedule.num_micro_batches - 1) * schedule.micro_batch_size + last
    return sequences * spec.topology.dp * spec.topology.ep
