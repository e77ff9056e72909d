"""``pipeproof.show``: the stages, layers and programs of a plan, with records and a page."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from pipeproof.api.given_plan import GivenPlan, Settings, load_given, name_of
from pipeproof.api.result import Records, Result, html_text
from pipeproof.comm.lower import lower_loaded
from pipeproof.comm.op_graph import LoweredPlan


class ShowResult(Result):
    """Result of ``show``: the lowered plan ``plan``, with the tables ``stages`` and ``ops`` (the pipeline programs)."""

    def __init__(self, plan: LoweredPlan, name: str) -> None:
        self.plan, self.name = plan, name

    def __repr__(self) -> str:
        """Return the sizes of the plan."""
        spec = self.plan.spec
        return (
            f"<plan: {self.name}, {spec.schedule.kind}, {spec.topology.num_ranks} ranks, {len(self.plan.stages)} "
            f"stages, {spec.schedule.num_micro_batches} micro-batches>"
        )

    def _dict(self) -> dict[str, Any]:
        return {"name": self.name, **self._tables()}

    def _tables(self) -> dict[str, Records]:
        plan = self.plan
        return {
            "stages": [
                {
                    "stage": stage,
                    "ranks": list(plan.ranks_of_stage(stage)),
                    "layers": list(names),
                    "parameters": sum(prod(one.shape) for layer in plan.layers_of(stage) for one in layer.parameters),
                }
                for stage, names in enumerate(plan.stages)
            ],
            "ops": [
                {"pp": rank, "place": position, "op": str(op)}
                for rank, program in enumerate(plan.programs)
                for position, op in enumerate(program)
            ],
        }

    def _parts(self) -> Iterator[str]:
        from pipeproof.views.plan_tables import render_show

        yield html_text(lambda console: render_show(self.plan, console))


def show(plan: GivenPlan, *, settings: Settings | None = None) -> ShowResult:
    """Show the contents of a lowered plan: stages, ranks, layers and programs.

    Args:
        plan: A path, a dict, a ``PlanSpec`` or a loaded plan.
        settings: Values by dotted key, which replace the plan's.

    Raises:
        BadPlanError: it is not a valid plan, or cannot be lowered.
    """
    return ShowResult(lower_loaded(load_given(plan, settings)), name_of(plan))
