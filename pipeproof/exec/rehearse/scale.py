"""Which plan is rehearsed: the loaded one, two steps long, perhaps on another backend or device, or smaller."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from fractions import Fraction
from typing import Any

from pipeproof.exec.jobs import dump_plan
from pipeproof.exec.rehearse.codes import NO_SUCH_SCALE
from pipeproof.specs.finding import BadPlanError, Finding, Severity
from pipeproof.specs.load import LoadedPlan, PlanFileError, plan_from_dict
from pipeproof.verify.subject import make_subject

NUM_STEPS = 2
_MOST_TRIED = 64
"""Scales that are tried for a remedy."""


def rehearsed_plan(loaded: LoadedPlan, backend: str | None, device: str | None, scale: Fraction) -> LoadedPlan:
    """The plan to rehearse; ``backend`` and ``device`` replace what it says, where they are given.

    ``scale`` divides the length of sequences; where that does not go, the hidden size takes as little of it as does.

    Raises:
        PlanFileError: the plan makes no sense on that backend and device, or, PP916, at that scale.
    """
    data = dump_plan(loaded)
    data["run"]["steps"] = NUM_STEPS
    data["run"] |= {key: value for key, value in (("backend", backend), ("device", device)) if value is not None}
    try:
        plan = plan_from_dict(data)
    except PlanFileError as error:
        raise PlanFileError(*error.findings, source=loaded.source) from error
    if scale != 1:
        smaller = _smaller(data, scale) if loaded.spec.own_layers is None else None
        if smaller is None:
            raise PlanFileError(_refusal(loaded, data, scale), source=loaded.source)
        plan = smaller
    return LoadedPlan(plan.spec, loaded.source)


def _smaller(data: dict[str, Any], scale: Fraction) -> LoadedPlan | None:
    for length, hidden in _shares(scale):
        scaled = deepcopy(data)
        model, schedule = scaled["model"], scaled["schedule"]
        sizes = [model["seq_length"], *(schedule.get("seq_lengths") or ())]
        lengths, width = [n * length for n in sizes], model["hidden_size"] * hidden
        if any(n.denominator != 1 or n < 1 for n in (*lengths, width)):
            continue
        model["seq_length"], model["hidden_size"] = int(lengths[0]), int(width)
        if schedule.get("seq_lengths"):
            schedule["seq_lengths"] = [int(n) for n in lengths[1:]]
        try:
            plan = plan_from_dict(scaled)
            make_subject(plan)
        except BadPlanError:
            continue
        return plan
    return None


def _shares(scale: Fraction) -> Iterator[tuple[Fraction, Fraction]]:
    """(of lengths, of the hidden size), whose product is ``scale``; as much as can be is of lengths."""
    for divisor in range(1, scale.denominator + 1):
        if scale.denominator % divisor == 0:
            yield scale * divisor, Fraction(1, divisor)


def _refusal(loaded: LoadedPlan, data: dict[str, Any], scale: Fraction) -> Finding:
    def says(message: str, mend: str) -> Finding:
        return Finding(NO_SUCH_SCALE.code, Severity.ERROR, message, help=mend)

    if loaded.spec.own_layers is not None:
        return says(f"--scale {scale}: own layers declare their shapes", "rehearse the plan as it is")
    model = data["model"]
    nearest: list[str] = []
    wanted = [Fraction(1, n) for n in range(2, _MOST_TRIED + 2)]
    for other in sorted(wanted, key=lambda one: (max(one / scale, scale / one), one)):
        if len(nearest) < 2 and _smaller(data, other) is not None:
            nearest.append(str(other))
    return says(
        f"--scale {scale}: no shorter sequences and smaller hidden size, from {model['seq_length']} and "
        f"{model['hidden_size']}, make such a plan",
        f"nearest are {' and '.join(nearest)}" if nearest else "rehearse the plan as it is",
    )
