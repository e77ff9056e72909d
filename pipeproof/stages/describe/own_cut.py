"""Which own layers stand on which stage."""

from __future__ import annotations

from collections.abc import Sequence

from pipeproof.specs.finding import BadPlanAtError, Finding, Severity
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.problems import nearest_name


def own_stages(plan: PlanSpec) -> tuple[tuple[str, ...], ...]:
    """Layer names by global stage: as ``stages`` says, else equally many, the remainder to the earliest stages.

    Raises:
        BadPlanAtError: PP110, fewer layers than stages; PP111, ``stages`` names a layer that is not declared.
    """
    declared = plan.own_layers
    assert declared is not None, "asked only of plans with own layers"
    names = [layer.name for layer in declared.layers]
    if plan.stages is not None:
        assert not isinstance(plan.stages, str), "refused when the plan is read"
        for stage, listed in enumerate(plan.stages):
            for index, name in enumerate(listed):
                if name not in names:
                    raise _unknown(name, names, stage, index)
        return plan.stages
    if len(names) < plan.num_stages:
        message = f"{len(names)} layers cannot be cut onto {plan.num_stages} stages: a stage would be empty"
        mend = f"set topology.pp to at most {len(names)}, or declare more layers"
        raise BadPlanAtError(Finding("PP110", Severity.ERROR, message, help=mend), ("topology", "pp"))
    share, remainder = divmod(len(names), plan.num_stages)
    ends = [share * (stage + 1) + min(stage + 1, remainder) for stage in range(plan.num_stages)]
    return tuple(tuple(names[begin:end]) for begin, end in zip([0, *ends], ends, strict=False))


def _unknown(name: str, names: Sequence[str], stage: int, index: int) -> BadPlanAtError:
    near = nearest_name(name, names)
    hint = f"did you mean `{near}`? " if near else ""
    return BadPlanAtError(
        Finding(
            "PP111",
            Severity.ERROR,
            f"stage {stage} names the layer `{name}`, which model.layers does not have",
            help=f"{hint}the layers are {', '.join(names)}",
        ),
        ("stages", stage, index),
    )
