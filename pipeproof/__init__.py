"""pipeproof: prove, time and run pipeline-parallel training plans.

What most people need is here and is imported when first used:

    from pipeproof import check, load_plan, lower, simulate

    report = check(load_plan("plan.yaml"))
    assert not report.errors
    print(simulate(report.subject.plan).makespan)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeproof.comm.lower import lower
    from pipeproof.diagnostics.finding import BadPlanError, Finding, PipeproofError
    from pipeproof.sim.simulate import simulate
    from pipeproof.specs.load_plan import load_plan, plan_from_dict
    from pipeproof.specs.plan import PlanSpec
    from pipeproof.verify.check_plan import check, check_graph, check_program

__version__ = "0.1.0"

__all__ = [
    "BadPlanError",
    "Finding",
    "PipeproofError",
    "PlanSpec",
    "__version__",
    "check",
    "check_graph",
    "check_program",
    "load_plan",
    "lower",
    "plan_from_dict",
    "simulate",
]

_HOMES = {
    "BadPlanError": "diagnostics.finding",
    "Finding": "diagnostics.finding",
    "PipeproofError": "diagnostics.finding",
    "PlanSpec": "specs.plan",
    "check": "verify.check_plan",
    "check_graph": "verify.check_plan",
    "check_program": "verify.check_plan",
    "load_plan": "specs.load_plan",
    "lower": "comm.lower",
    "plan_from_dict": "specs.load_plan",
    "simulate": "sim.simulate",
}
"""Public name to the module that holds it: `import pipeproof` alone loads none of them."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pipeproof' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pipeproof.{_HOMES[name]}"), name)
