"""Which layers stand on which stage."""

from __future__ import annotations

import difflib

from pipeproof.specs.codes import RuleDoc
from pipeproof.specs.finding import BadPlanAtError, Finding, Severity
from pipeproof.specs.plan import PlanSpec

TOO_FEW_LAYERS = RuleDoc(
    code="PP110",
    title="fewer transformer layers than stages",
    severity="error",
    explanation=(
        "Without `stages` the transformer layers are cut evenly, at least one to a stage. With fewer layers than "
        "stages, some stage would be empty."
    ),
    wrong="model: {num_layers: 2}\ntopology: {pp: 4}",
    right="model: {num_layers: 4}\ntopology: {pp: 4}",
)
UNKNOWN_LAYER = RuleDoc(
    code="PP111",
    title="`stages` names a layer that the model does not have",
    severity="error",
    explanation="The layers of a GPT are `embed`, `layer.0` to `layer.(num_layers - 1)`, `norm` and `head`.",
    wrong="model: {num_layers: 2}\nstages: [[embed, layer0], [layer.1, norm, head]]",
    right="model: {num_layers: 2}\nstages: [[embed, layer.0], [layer.1, norm, head]]",
)
PARTITION_CODES = (TOO_FEW_LAYERS, UNKNOWN_LAYER)


def stage_layers(plan: PlanSpec) -> tuple[tuple[str, ...], ...]:
    """Layer names by global stage: as ``stages`` says, else an even cut of the transformer layers.

    The even cut gives ``embed`` to the first stage, ``norm`` and ``head`` to
    the last, and the remainder of the division to the earliest stages, one
    layer each (the last stage has the head's work already).

    Raises:
        BadPlanAtError: PP110, fewer transformer layers than stages and no
            ``stages``; PP111, ``stages`` names a layer that is not there.
    """
    if plan.stages is not None:
        _require_known(plan.stages, plan.model.num_layers)
        return plan.stages
    return _even_cut(plan.model.num_layers, plan.num_stages)


def _require_known(stages: tuple[tuple[str, ...], ...], num_layers: int) -> None:
    known = ["embed", *(f"layer.{i}" for i in range(num_layers)), "norm", "head"]
    for stage, names in enumerate(stages):
        for index, name in enumerate(names):
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean `{near[0]}`? " if near else ""
                raise BadPlanAtError(
                    Finding(
                        UNKNOWN_LAYER.code,
                        Severity.ERROR,
                        f"stage {stage} names the layer `{name}`, which a model of {num_layers} layers does not have",
                        help=f"{hint}the layers are embed, layer.0 to layer.{num_layers - 1}, norm, head",
                    ),
                    ("stages", stage, index),
                )


def _even_cut(num_layers: int, num_stages: int) -> tuple[tuple[str, ...], ...]:
    if num_layers < num_stages:
        raise BadPlanAtError(
            Finding(
                TOO_FEW_LAYERS.code,
                Severity.ERROR,
                f"{num_layers} transformer layers cannot be cut evenly onto {num_stages} stages: "
                "a stage would be empty",
                help=f"set topology.pp to at most {num_layers}, or list the layers of each stage under `stages`",
            ),
            ("topology", "pp"),
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
