"""Which layers stand on which stage."""

from __future__ import annotations

from pipeproof.specs.finding import BadPlanError, Finding, Severity
from pipeproof.specs.plan import PlanSpec


def stage_layers(plan: PlanSpec) -> tuple[tuple[str, ...], ...]:
    """Layer names by global stage: as ``stages`` says, else an even cut of the transformer layers.

    The even cut gives ``embed`` to the first stage, ``norm`` and ``head`` to
    the last, and the remainder of the division to the earliest stages, one
    layer each (the last stage has the head's work already).

    Raises:
        BadPlanError: PP110, fewer transformer layers than stages and no ``stages``.
    """
    if plan.stages is not None:
        return plan.stages
    num_layers, num_stages = plan.model.num_layers, plan.topology.pp
    if num_layers < num_stages:
        raise BadPlanError(
            Finding(
                "PP110",
                Severity.ERROR,
                f"{num_layers} transformer layers cannot be cut evenly onto {num_stages} stages: "
                "a stage would be empty",
                help=f"set topology.pp to at most {num_layers}, or list the layers of each stage under `stages`",
            )
        )
    share, remainder = divmod(num_layers, num_stages)
    cut: list[tuple[str, ...]] = []
    first = 0
    for stage in range(num_stages):
        last = first + share + (stage < remainder)
        cut.append(tuple(f"layer.{i}" for i in range(first, last)))
        first = last
    cut[0] = ("embed", *cut[0])
    cut[-1] = (*cut[-1], "norm", "head")
    return tuple(cut)
