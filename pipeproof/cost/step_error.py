"""Errors and intervals of predicted steps, from published trainings.

``step_errors.json`` has them by device, by whether the model has experts, and by what bounds the time of a stage. The
board of measurements writes it (``validation/board/intervals.py``), from predictions with constants that were fitted on
other systems: a time of the host, for example, is a property of a system.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeproof.specs.plan import PlanSpec

if TYPE_CHECKING:
    from pipeproof.cost.analytic_times import AnalyticCosts

TABLE = Path(__file__).with_name("step_errors.json")
_LINKS_SHARE = 0.25
"""Share of collectives from which on they bound a stage."""
FEW_MODELS = 5
"""Models below which an interval has to cover the models of other devices too."""
NOT_MEASURED = "how far the prediction is off is not known: no measured rows for this device"


@dataclass(frozen=True)
class StepError:
    """Errors of comparable steps: of 80 % of models ``within`` this share; ``mean`` is the mean of their sizes.

    The interval of a step t is t / (1 + within) to t (1 + within). ``kind`` names what is comparable.
    """

    kind: str
    num_models: int
    num_rows: int
    mean: float
    within: float

    def interval(self, step: float) -> tuple[float, float]:
        """Return the ends of the 80 % interval of a predicted step, in its unit."""
        return step / (1 + self.within), step * (1 + self.within)


def bound_of(costs: AnalyticCosts) -> str:
    """Return what bounds the slowest stage of a plan: ``host``, ``collectives`` or ``computations``."""
    slowest = max(costs.stages, key=lambda stage: sum(time.us for time in stage.values())).values()
    device_us, links_us = (sum(getattr(time, part) for time in slowest) for part in ("device_us", "links_us"))
    if sum(time.host_us for time in slowest) > device_us:
        return "host"
    return "collectives" if links_us > _LINKS_SHARE * device_us else "computations"


def step_error(device: str, *, has_experts: bool, bound: str = "") -> StepError | None:
    """Return the errors of steps with this bound, or with any where it has no rows; None without measured rows."""
    model = "experts" if has_experts else "dense"
    by_bound = _table().get(device, {}).get(model, {})
    chosen = bound if bound in by_bound else ""
    if chosen not in by_bound:
        return None
    kind = f"{device}, {model}" + (f", bound by {chosen}" if chosen else "")
    return StepError(kind, *by_bound[chosen])


def step_error_of(plan: PlanSpec) -> StepError | None:
    """Return the errors of steps like a plan's; None without measured rows, or without computed times."""
    analytic = plan.cost.analytic
    if analytic is None:
        return None
    from pipeproof.cost.analytic_times import AnalyticCosts

    return step_error(
        analytic.device, has_experts=plan.gpt.moe is not None, bound=bound_of(AnalyticCosts(plan, analytic))
    )


@cache
def _table() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    content: Mapping[str, Mapping[str, Mapping[str, Any]]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return content
