"""Points of a sweep: checked, simulated, and the results.

This runs in worker processes: what goes in and comes out can be pickled.
"""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from typing import Any, Self

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
    """It is no plan, or not a right one; the result has the code and the message."""
    FAILED = "failed"
    """Its worker died, twice, or something broke that is not the plan's fault."""


_EXACT = ("makespan", "sequence", "idle_ratio", "most_idle_ratio")
"""Exact numbers of a result, by their keys in JSON."""
_FRACTION = re.compile(r"[0-9]+/[1-9][0-9]*")


@dataclass(frozen=True)
class PointResult:
    """Result of one point; it has figures if and only if ``status`` is ok.

    Times are exact microseconds: ``makespan`` of a step, ``sequence`` the same per sequence of the step's batch, over
    all data-parallel ranks. ``idle_ratio`` is the part of all ranks' time within the makespan in which they do not
    compute, ``most_idle_ratio`` that of the rank with most; ``peak_activations`` the most chunk activations of a
    micro-batch that a rank holds. ``warnings`` are the codes of warnings of the check. ``traceback``, or what else is
    known about the failure of a point, has paths of its worker: it is not compared. ``details`` are figures of another
    evaluation than ``evaluate``, as JSON data.
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
        """The line of a results file; ``from_json`` reads it back."""
        result: dict[str, Any] = {"id": self.id, "set": dict(self.settings), "status": str(self.status)}
        if self.status is Status.OK:
            for key in _EXACT:
                result |= number_to_json(key, getattr(self, key))
            result |= {"peak_activations": self.peak_activations, "warnings": list(self.warnings)}
            return {**result, "details": dict(self.details)} if self.details else result
        result |= {"code": self.code, "message": self.message}
        return result if self.traceback is None else {**result, "traceback": self.traceback}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what ``to_json`` wrote.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: it is something else.
        """
        name, settings, status = str(data["id"]), dict(data["set"]), Status(data["status"])
        if status is not Status.OK:
            return cls(
                name,
                settings,
                status,
                code=data["code"],
                message=str(data["message"]),
                traceback=data.get("traceback"),
            )
        exact = {key: _exact_number(data.get(f"{key}_exact", data[key])) for key in _EXACT}
        return cls(
            name,
            settings,
            status,
            makespan=exact["makespan"],
            sequence=exact["sequence"],
            idle_ratio=exact["idle_ratio"],
            most_idle_ratio=exact["most_idle_ratio"],
            peak_activations=int(data["peak_activations"]),
            warnings=tuple(map(str, data["warnings"])),
            details=dict(data.get("details", {})),
        )


def _exact_number(value: Any) -> Fraction:
    """Return a number of a results file: an integer, a float as it is, or the text of a fraction.

    Raises:
        ValueError: it is none, or not finite.
    """
    is_number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    if not is_number and not (isinstance(value, str) and _FRACTION.fullmatch(value)):
        raise ValueError("a figure is not a finite number")
    return Fraction(value)


Evaluate = Callable[[Point, str], PointResult]


def evaluate_chunk(
    points: Sequence[Point], plan_file: str, evaluate_point: Evaluate
) -> tuple[str, list[dict[str, Any]]]:
    """Evaluate points one after the other; the version of pipeproof here, and a JSON value per point.

    The value is that of the result, or the message of the exception and its traceback. Values of another version can be
    read up to the comparison of the versions, since they contain no classes.
    """
    return __version__, [_outcome(point, plan_file, evaluate_point) for point in points]


def _outcome(point: Point, plan_file: str, evaluate_point: Evaluate) -> dict[str, Any]:
    try:
        return evaluate_point(point, plan_file).to_json()
    except Exception as error:  # noqa: BLE001 - one point of a chunk must not cost the others
        return {"raised": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


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
    """The result of a point that is no plan, or not a right one: the first of its findings."""
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
