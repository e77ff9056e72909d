"""pipeproof: prove, time and run pipeline-parallel training plans.

What most people need is here and is imported when first used:

    import pipeproof as pp

    assert not pp.check("plan.yaml").errors
    step = pp.simulate("plan.yaml")
    print(step, step.to_records()[0])
    step.save("timeline.html")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeproof.lazy_exports import lazy_exports
from pipeproof.version import __version__

if TYPE_CHECKING:
    from pipeproof.api.check_result import check
    from pipeproof.api.compare_result import compare
    from pipeproof.api.show_result import show
    from pipeproof.api.simulate_result import make_schedule, simulate
    from pipeproof.api.sweep_result import sweep
    from pipeproof.api.tune_result import tune
    from pipeproof.comm.lower import lower
    from pipeproof.diagnostics.finding import BadPlanError, Finding, PipeproofError
    from pipeproof.diagnostics.source import PlanFileError
    from pipeproof.interop.hang.diagnose_hang import diagnose_dumps as hang
    from pipeproof.interop.importers.import_kinds import import_files
    from pipeproof.specs.load_plan import load_plan, plan_from_dict
    from pipeproof.specs.plan import PlanSpec
    from pipeproof.verify.check_plan import check_graph, check_program

__all__ = [
    "BadPlanError",
    "Finding",
    "PipeproofError",
    "PlanFileError",
    "PlanSpec",
    "__version__",
    "check",
    "check_graph",
    "check_program",
    "compare",
    "hang",
    "import_files",
    "load_plan",
    "lower",
    "make_schedule",
    "plan_from_dict",
    "show",
    "simulate",
    "sweep",
    "tune",
]

_HOMES = {
    "BadPlanError": "diagnostics.finding",
    "Finding": "diagnostics.finding",
    "PipeproofError": "diagnostics.finding",
    "PlanFileError": "diagnostics.source",
    "PlanSpec": "specs.plan",
    "check": "api.check_result",
    "check_graph": "verify.check_plan",
    "check_program": "verify.check_plan",
    "compare": "api.compare_result",
    "hang": "interop.hang.diagnose_hang:diagnose_dumps",
    "import_files": "interop.importers.import_kinds",
    "load_plan": "specs.load_plan",
    "lower": "comm.lower",
    "make_schedule": "api.simulate_result",
    "plan_from_dict": "specs.load_plan",
    "show": "api.show_result",
    "simulate": "api.simulate_result",
    "sweep": "api.sweep_result",
    "tune": "api.tune_result",
}
"""Public name to the module that holds it: `import pipeproof` alone loads none of them."""

__getattr__ = lazy_exports(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
