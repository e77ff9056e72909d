"""Plan of a rehearsal: the loaded plan with two steps, optionally with another backend, device or scale."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from fractions import Fraction
from typing import Any

from pipeproof.diagnostics.finding import BadPlanError, Finding
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.exec.rank.job_files import dump_plan
from pipeproof.exec.store.run_codes import NO_SUCH_SCALE
from pipeproof.specs.load_plan import LoadedPlan, plan_from_dict
from pipeproof.verify.subject import make_subject

NUM_STEPS = 2
_MOST_TRIED = 64
"""Number of scales that are tried for the suggested fix."""


def rehearsed_plan(loaded: LoadedPlan, backend: str | None, device: str | None, scale: Fraction) -> LoadedPlan:
    """Return the plan to rehearse; ``backend`` and ``device`` replace the plan's, if they are given.

    ``scale`` divides the sequence length; where that is impossible, the hidden size takes as little of it as possible.

    Raises:
        PlanFileError: the plan is invalid with that backend and device, or (PP916) at that scale.
    """
    data = dump_plan(loaded)
    data["run"]["steps"] = NUM_STEPS
    data["run"] |= {key: value for key, value in (("backend", backend), ("device", device)) if value is not None}
    try:
        plan = plan_from_dict(data)
    except PlanFileError as error:
        raise PlanFileError(*error.findings, source=loaded.source) from error
    if scale != 1:
        smaller = _smaller(data, scale) if not loaded.spec.is_custom else None
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
    """Yield pairs (factor of lengths, factor of the hidden size) with the product ``scale``, short sequences first."""
    for divisor in range(1, scale.denominator + 1):
        if scale.denominator % divisor == 0:
            yield scale * divisor, Fraction(1, divisor)


def _refusal(loaded: LoadedPlan, data: dict[str, Any], scale: Fraction) -> Finding:
    if loaded.spec.is_custom:
        fact = f"--scale {scale}: custom layers declare their shapes"
        return NO_SUCH_SCALE.finding(fact, help="rehearse the plan without `--scale`")
    model = data["model"]
    nearest: list[str] = []
    scales = [Fraction(1, n) for n in range(2, _MOST_TRIED + 2)]
    for candidate in sorted(scales, key=lambda s: (max(s / scale, scale / s), s)):
        if len(nearest) < 2 and _smaller(data, candidate) is not None:
            nearest.append(str(candidate))
    return NO_SUCH_SCALE.finding(
        f"--scale {scale}: no smaller sequence length and hidden size, from {model['seq_length']} and "
        f"{model['hidden_size']}, give a valid plan",
        help=f"nearest are {' and '.join(nearest)}" if nearest else "rehearse the plan without `--scale`",
    )
