"""11x: roles of a rank: the numbers of its layers, and whether it embeds or computes the loss.

The code that builds a stage decides both, outside of the op graph, and is
wrong if it takes a stage for its rank or counts layers within the stage. The
rules check what a person declares about that code (``Facts``).
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.rule_doc import ExampleKind, RuleDoc
from pipeproof.verify.subject import Rule, Subject


def _example(ranks: str, facts: str) -> str:
    return (
        "from pipeproof.verify.declared_facts import Facts, LayerNumber, Role\n"
        "from pipeproof.verify.subject import program_subject\n\n"
        f"facts = {facts}\n"
        f"subject = program_subject({ranks!r}, facts=facts)"
    )


LAYER_NUMBERS = RuleDoc(
    code="PP117",
    title="the layers of the stages are not numbered as the model's",
    explanation=(
        "What depends on a layer's number (scaling by depth, attention windows, checkpoint names, the kind of block "
        "in a mixed model) needs the number in the whole model. Numbers that begin again on each stage, or an "
        "offset of rank times layers per rank where stages are uneven, give two layers one number and leave others "
        "out."
    ),
    wrong=_example(
        "rank 0: 0F0\nrank 1: 1F0", "Facts(num_layers=2, layer_numbers=(LayerNumber(0, 0, 0), LayerNumber(1, 0, 0)))"
    ),
    right=_example(
        "rank 0: 0F0\nrank 1: 1F0", "Facts(num_layers=2, layer_numbers=(LayerNumber(0, 0, 0), LayerNumber(1, 0, 1)))"
    ),
    kind=ExampleKind.PYTHON,
)


def _check_layer_numbers(subject: Subject) -> Iterator[Finding]:
    facts = subject.facts
    if not facts.layer_numbers:
        return
    computed: dict[int, str] = {}
    in_order = sorted(facts.layer_numbers, key=lambda layer: (layer.stage, layer.place))
    for right, layer in enumerate(in_order):
        here = f"layer {layer.place} of stage {layer.stage}"
        if layer.number != right:
            other = f", as {computed[layer.number]} does" if layer.number in computed else ""
            yield LAYER_NUMBERS.finding(
                f"{here} computes as layer {layer.number} of the model{other}; by its place it is layer {right}",
                help="add the number of layers on all stages before it",
            )
        computed.setdefault(layer.number, here)
    if len(facts.layer_numbers) != facts.num_layers:
        yield LAYER_NUMBERS.finding(
            f"the stages hold {len(facts.layer_numbers)} layers, and the model has {facts.num_layers}",
            help="give each layer of the model to one stage",
        )


ROLE = RuleDoc(
    code="PP118",
    title="the embedding or the loss is not where its stage is",
    explanation=(
        "The first stage begins with the embedding and the last one ends with the loss, wherever the placement puts "
        "them: in a V schedule both are on rank 0. Code that asks for the first and last rank instead leaves the "
        "stage without them, or computes a loss from what is no logit."
    ),
    wrong=_example("rank 0: 0F0 3F0\nrank 1: 1F0 2F0", 'Facts(roles=(Role(0, "embedding"), Role(1, "loss")))'),
    right=_example("rank 0: 0F0 3F0\nrank 1: 1F0 2F0", 'Facts(roles=(Role(0, "embedding"), Role(0, "loss")))'),
    kind=ExampleKind.PYTHON,
)


def _check_roles(subject: Subject) -> Iterator[Finding]:
    owners = subject.stage_owners
    if not subject.facts.roles or not owners:
        return
    stage_of = {"embedding": min(owners), "loss": max(owners)}
    for what, stage in stage_of.items():
        has = {role.rank for role in subject.facts.roles if role.what == what}
        for rank in sorted(has - set(owners[stage])):
            held = [str(s) for s, ranks in owners.items() if rank in ranks]
            of = f"stage {' and '.join(held)}" if held else "no stage"
            yield ROLE.finding(
                f"{subject.coords_text(rank)} builds the {what}, but holds {of}; the {what} belongs to stage {stage}",
                help=f"decide by stage: stage {stage} is on rank {_listed(subject, owners[stage])}",
            )
        for rank in sorted(set(owners[stage]) - has):
            yield ROLE.finding(
                f"{subject.coords_text(rank)} holds stage {stage} and builds no {what}",
                help=f"build the {what} on every rank of stage {stage}",
            )


def _listed(subject: Subject, ranks: tuple[int, ...]) -> str:
    return ", ".join(str(subject.graph.global_rank[rank]) for rank in ranks)


RULES = (Rule(LAYER_NUMBERS, _check_layer_numbers), Rule(ROLE, _check_roles))
