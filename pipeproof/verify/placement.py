"""11x: every layer is on exactly one stage, in model order, and no stage is empty."""

from __future__ import annotations

from collections.abc import Iterator

from pipeproof.diagnostics.finding import Finding, RuleDoc
from pipeproof.verify.subject import Rule, Subject

NO_OWNER = RuleDoc(
    code="PP112",
    title="a layer is on no stage",
    explanation="A layer that no stage holds is left out of the model: the run trains another network.",
    wrong="model: {num_layers: 2}\nstages: [[embed, layer.0], [norm, head]]",
    right="model: {num_layers: 2}\nstages: [[embed, layer.0], [layer.1, norm, head]]",
)


def _check_no_owner(subject: Subject) -> Iterator[Finding]:
    placed = {name for names in subject.plan.stages for name in names}
    for layer in subject.plan.layers:
        if layer.name not in placed:
            yield NO_OWNER.finding(
                f"layer `{layer.name}` is on no stage",
                location=subject.locate("stages"),
                help=f"add `{layer.name}` to one of the {len(subject.plan.stages)} stages",
            )


TWO_OWNERS = RuleDoc(
    code="PP113",
    title="a layer is listed twice",
    explanation=(
        "The layer would be applied twice, with two copies of its weights that drift apart: copies must be "
        "declared and their gradients reduced, which a plain list of layers does not do."
    ),
    wrong="model: {num_layers: 1}\nstages: [[embed, layer.0], [layer.0, norm, head]]",
    right="model: {num_layers: 1}\nstages: [[embed, layer.0], [norm, head]]",
)


def _check_two_owners(subject: Subject) -> Iterator[Finding]:
    first_place: dict[str, int] = {}
    for stage, names in enumerate(subject.plan.stages):
        for index, name in enumerate(names):
            if name in first_place:
                yield TWO_OWNERS.finding(
                    f"layer `{name}` is on stage {stage} and already on stage {first_place[name]}",
                    location=subject.locate("stages", stage, index),
                    help=f"remove `{name}` from one of them",
                )
            first_place.setdefault(name, stage)


OUT_OF_ORDER = RuleDoc(
    code="PP114",
    title="layers are not in model order",
    explanation=(
        "Stages run one after the other and each runs its layers in the order listed, so another order than the "
        "model's computes another function."
    ),
    wrong="model: {num_layers: 2}\nstages: [[embed, layer.1], [layer.0, norm, head]]",
    right="model: {num_layers: 2}\nstages: [[embed, layer.0], [layer.1, norm, head]]",
)


def _check_order(subject: Subject) -> Iterator[Finding]:
    model_order = {layer.name: i for i, layer in enumerate(subject.plan.layers)}
    previous: str | None = None
    for stage, names in enumerate(subject.plan.stages):
        for index, name in enumerate(names):
            if previous is not None and model_order[name] < model_order[previous]:
                yield OUT_OF_ORDER.finding(
                    f"layer `{name}` on stage {stage} comes after `{previous}`, but is before it in the model",
                    location=subject.locate("stages", stage, index),
                    help=f"the model's order is {', '.join(layer.name for layer in subject.plan.layers)}",
                )
            previous = name


EMPTY = RuleDoc(
    code="PP115",
    title="a stage holds no layer",
    explanation="An empty stage only hands tensors on: a rank and two transfers per micro-batch for nothing.",
    wrong="model: {num_layers: 1}\nstages: [[embed, layer.0, norm, head], []]",
    right="model: {num_layers: 1}\nstages: [[embed, layer.0], [norm, head]]",
)


def _check_empty(subject: Subject) -> Iterator[Finding]:
    for stage, names in enumerate(subject.plan.stages):
        if not names:
            yield EMPTY.finding(
                f"stage {stage} holds no layer",
                location=subject.locate("stages", stage),
                help="give it a layer, or use fewer stages (topology.pp)",
            )


RULES = (
    Rule(NO_OWNER, _check_no_owner, needs_plan=True),
    Rule(TWO_OWNERS, _check_two_owners, needs_plan=True),
    Rule(OUT_OF_ORDER, _check_order, needs_plan=True),
    Rule(EMPTY, _check_empty, needs_plan=True),
)
