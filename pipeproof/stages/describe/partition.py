"""Which layers stand on which stage."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from pipeproof.specs.codes import RuleDoc
from pipeproof.specs.cut import BY_CLASS, UNIFORM
from pipeproof.specs.finding import BadPlanAtError, Finding, Severity
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.problems import KeyPath, listed
from pipeproof.specs.ranges import names_text
from pipeproof.stages.describe.order import CLASS_NAMES, first_word, layer_order, takes_a_place
from pipeproof.stages.describe.own_cut import own_stages
from pipeproof.stages.describe.segments import cut_behind, even_shares, is_matched, uniform_cut

TOO_FEW_LAYERS = RuleDoc(
    code="PP110",
    title="fewer layers than stages",
    severity="error",
    explanation=(
        "Without `stages` the transformer layers, and the empty layers among them, are cut evenly, at least one to a "
        "stage; `stages: uniform` does so with all layers. With fewer of them than stages, some stage would be empty."
    ),
    wrong="model: {num_layers: 2}\ntopology: {pp: 4}",
    right="model: {num_layers: 4}\ntopology: {pp: 4}",
)
UNKNOWN_LAYER = RuleDoc(
    code="PP111",
    title="`stages` names a layer that the model does not have",
    severity="error",
    explanation=(
        "The layers of a GPT are `embed`, `layer.0` to `layer.(num_layers - 1)`, `norm` and `head`, and "
        "`empty.0` on where `model.empty_layers` asks for them."
    ),
    wrong="model: {num_layers: 2}\nstages: [[embed, layer0], [layer.1, norm, head]]",
    right="model: {num_layers: 2}\nstages: [[embed, layer.0], [layer.1, norm, head]]",
)
UNEVEN_MATCHES = RuleDoc(
    code="PP143",
    title="the layers that `stages: layer:REGEX` counts do not divide into the stages",
    severity="error",
    explanation=(
        "The pattern is looked for in the class names that PaddleFleet's layers have, and each stage gets equally "
        "many of the layers that it is found in. Fleet refuses to build a model where that cannot be. Empty layers "
        "fill up what is missing: `model.empty_layers`."
    ),
    wrong="model: {num_layers: 3}\ntopology: {pp: 2}\nstages: layer:TransformerLayer",
    right=(
        "model: {num_layers: 3, empty_layers: {tail: 1}}\ntopology: {pp: 2}\nstages: layer:TransformerLayer|EmptyLayer"
    ),
)
PARTITION_CODES = (TOO_FEW_LAYERS, UNKNOWN_LAYER, UNEVEN_MATCHES)


def stage_layers(plan: PlanSpec) -> tuple[tuple[str, ...], ...]:
    """Layer names by global stage: as ``stages`` says, else an even cut.

    The even cut counts transformer layers and empty layers, and gives the
    remainder of the division to the earliest stages, one layer each (the last
    stage has the head's work already). Every stage ends right behind the last
    layer that counts for it; what is not counted joins what comes after it,
    behind the last counted layer the last stage.

    Raises:
        BadPlanAtError: PP110, fewer layers to cut than stages; PP111,
            ``stages`` names a layer that is not there; PP143, the layers that
            ``layer:REGEX`` finds do not divide into the stages.
    """
    if plan.own_layers is not None:
        return own_stages(plan)
    names = layer_order(plan.model)
    if plan.stages is None:
        return _even_cut(plan, names)
    if plan.stages == UNIFORM:
        _require_enough(plan, names, "layers")
        return uniform_cut(names, plan.num_stages)
    if isinstance(plan.stages, str):
        return _cut_by_class(plan, names, plan.stages.removeprefix(BY_CLASS))
    _require_known(plan.stages, names)
    return plan.stages


def _require_known(stages: Sequence[Sequence[str]], known: Sequence[str]) -> None:
    for stage, names in enumerate(stages):
        for index, name in enumerate(names):
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean `{near[0]}`? " if near else ""
                raise BadPlanAtError(
                    Finding(
                        UNKNOWN_LAYER.code,
                        Severity.ERROR,
                        f"stage {stage} names the layer `{name}`, which the model does not have",
                        help=f"{hint}the layers are {names_text(known)}",
                    ),
                    ("stages", stage, index),
                )


def _even_cut(plan: PlanSpec, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    counted = [takes_a_place(name) for name in names]
    _require_enough(
        plan,
        [name for name in names if takes_a_place(name)],
        "transformer and empty layers" if any(plan.model.num_empty) else "transformer layers",
    )
    return cut_behind(names, counted, even_shares(sum(counted), plan.num_stages))


def _require_enough(plan: PlanSpec, names: Sequence[str], what: str) -> None:
    if len(names) < plan.num_stages:
        message = f"{len(names)} {what} cannot be cut evenly onto {plan.num_stages} stages: a stage would be empty"
        mend = f"set topology.pp to at most {len(names)}, or list the layers of each stage under `stages`"
        place: KeyPath = ("topology", "pp")
        raise BadPlanAtError(Finding(TOO_FEW_LAYERS.code, Severity.ERROR, message, help=mend), place)


def _cut_by_class(plan: PlanSpec, names: Sequence[str], pattern: str) -> tuple[tuple[str, ...], ...]:
    classes = [CLASS_NAMES[first_word(name)] for name in names]
    counted = [is_matched(pattern, one) for one in classes]
    number, num_stages = sum(counted), plan.num_stages
    if number and number % num_stages == 0:
        return cut_behind(names, counted, even_shares(number, num_stages))
    if not number:
        message = f"no layer of the model is of a class that `{pattern}` is found in"
        mend = f"the classes are {listed(list(dict.fromkeys(classes)), 'and')}"
    else:
        message = f"`{pattern}` is found in {number} layers, which do not divide into {num_stages} stages"
        missing = -number % num_stages
        mend = f"count {missing} more, as `model.empty_layers` and `EmptyLayer` in the pattern do, or list the stages"
    raise BadPlanAtError(Finding(UNEVEN_MATCHES.code, Severity.ERROR, message, help=mend), ("stages",))
