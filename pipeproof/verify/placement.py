"""11x: every layer is on one stage, in model order; roles of ranks and random numbers match their layers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from pipeproof.diagnostics.finding import ExampleKind, Finding, RuleDoc
from pipeproof.diagnostics.problems import grouped
from pipeproof.verify.declared_facts import RngDraw, RngFacts, RngRegion
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
        "declared and their gradients reduced, unlike in a plain list of layers."
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
        "Stages run in sequence and each runs its layers in the listed order: another order than the model's "
        "computes another function."
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
    explanation="An empty stage only passes tensors on: a rank and two transfers per micro-batch for nothing.",
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


# 11x: roles of a rank: the numbers of its layers, whether it embeds or computes the loss, its random numbers.
#
# The code that builds a stage decides both, outside of the op graph, and is
# wrong if it takes a stage for its rank or counts layers within the stage. The
# rules check what a person declares about that code (``Facts``).


def _example(ranks: str, facts: str) -> str:
    return (
        "from pipeproof.verify.declared_facts import Facts, LayerNumber, Role\n"
        "from pipeproof.verify.subject import program_subject\n\n"
        f"facts = {facts}\n"
        f"subject = program_subject({ranks!r}, facts=facts)"
    )


_TWO = "rank 0: 0F0\nrank 1: 1F0"

LAYER_NUMBERS = RuleDoc(
    code="PP117",
    title="the layers of the stages are not numbered as the model's",
    explanation=(
        "Code that depends on a layer's number (scaling by depth, attention windows, checkpoint names, the kind of "
        "block in a mixed model) needs the number in the whole model. Numbers that begin again on each stage, or an "
        "offset of rank times layers per rank with uneven stages, give two layers one number and skip other numbers."
    ),
    wrong=_example(_TWO, "Facts(num_layers=2, layer_numbers=(LayerNumber(0, 0, 0), LayerNumber(1, 0, 0)))"),
    right=_example(_TWO, "Facts(num_layers=2, layer_numbers=(LayerNumber(0, 0, 0), LayerNumber(1, 0, 1)))"),
    kind=ExampleKind.PYTHON,
)


def _check_layer_numbers(subject: Subject) -> Iterator[Finding]:
    facts = subject.facts
    if not facts.layer_numbers:
        return
    computed: dict[int, str] = {}
    in_order = sorted(facts.layer_numbers, key=lambda layer: (layer.stage, layer.place))
    for right, layer in enumerate(in_order):
        layer_text = f"layer {layer.place} of stage {layer.stage}"
        if layer.number != right:
            other = f", as {computed[layer.number]} does" if layer.number in computed else ""
            yield LAYER_NUMBERS.finding(
                f"{layer_text} computes as layer {layer.number} of the model{other}; by its place it is layer {right}",
                help="add the number of layers on all stages before it",
            )
        computed.setdefault(layer.number, layer_text)
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
        "stage without them, or computes a loss from values that are not logits."
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
            ranks = [subject.graph.global_rank[owner] for owner in owners[stage]]
            yield ROLE.finding(
                f"{subject.coords_text(rank)} builds the {what}, but holds {of}; the {what} belongs to stage {stage}",
                help=f"decide by stage: stage {stage} is on rank {', '.join(map(str, ranks))}",
            )
        for rank in sorted(set(owners[stage]) - has):
            yield ROLE.finding(
                f"{subject.coords_text(rank)} holds stage {stage} and builds no {what}",
                help=f"build the {what} on every rank of stage {stage}",
            )


# 119, 120: random numbers are drawn from a key of (layer, micro-batch, region), equal if the values are equal.
#
# Nothing here draws: a key represents the state of a generator, and equal keys
# give equal numbers. The facts come from a person or a log (``RngFacts``).


def _draw_example(*draws: str) -> str:
    return (
        "from pipeproof.comm.plan_context import Mesh\n"
        "from pipeproof.verify.declared_facts import Facts, RngDraw, RngFacts, RngRegion\n"
        "from pipeproof.verify.subject import program_subject\n\n"
        "regions = (RngRegion('dropout', differs_over=('tp',)),)  # of a tensor that is cut along the sequence\n"
        f"draws = ({', '.join(draws)})\n"
        "facts = Facts(rng=RngFacts(Mesh(('tp',), (2,)), regions, draws))\n"
        "subject = program_subject('rank 0: 0F0\\nrank 1: 0F0', facts=facts)"
    )


_DRAW = "RngDraw(0, 'layer.0', 0, 'dropout', 'a')"

REPLAY = RuleDoc(
    code="PP119",
    title="a recomputation draws other random numbers than its forward",
    explanation=(
        "Recomputed activations equal the forward's only if dropout masks repeat: the generator's state must "
        "be saved with the micro-batch and restored. Otherwise the backward belongs to another function than the "
        "forward, and the loss alone does not show it."
    ),
    wrong=_draw_example(_DRAW, "RngDraw(0, 'layer.0', 0, 'dropout', 'b', replay=True)"),
    right=_draw_example(_DRAW, "RngDraw(0, 'layer.0', 0, 'dropout', 'a', replay=True)"),
    kind=ExampleKind.PYTHON,
)


def _place(draw: RngDraw) -> tuple[int, str, int, str]:
    return draw.rank, draw.layer, draw.micro_batch, draw.region


def _check_replay(subject: Subject) -> Iterator[Finding]:
    rng = subject.facts.rng
    if rng is None:
        return
    forward = {_place(draw): draw.key for draw in rng.draws if not draw.replay}
    for draw in rng.draws:
        drawn = forward.get(_place(draw))
        if draw.replay and drawn != draw.key:
            first = f"the forward drew with `{drawn}`" if drawn is not None else "the forward drew nothing there"
            yield REPLAY.finding(
                f"{_text(draw)} is recomputed with the random state `{draw.key}`, and {first}",
                help="keep the generator's state at the forward and restore it for the recomputation",
            )


def _text(draw: RngDraw) -> str:
    return f"{draw.region} of {draw.layer}, micro-batch {draw.micro_batch}, on rank {draw.rank}"


RANKS = RuleDoc(
    code="PP120",
    title="random numbers agree where they must differ, or differ where they must agree",
    explanation=(
        "Ranks that hold one tensor together must drop the same elements of it; ranks that hold different parts, "
        "sequences or experts must draw independently, or their noise is correlated. And every layer, micro-batch "
        "and region draws its own: a repeated key repeats the mask."
    ),
    wrong=_draw_example(_DRAW, "RngDraw(1, 'layer.0', 0, 'dropout', 'a')"),
    right=_draw_example(_DRAW, "RngDraw(1, 'layer.0', 0, 'dropout', 'b')"),
    kind=ExampleKind.PYTHON,
)


def _check_ranks(subject: Subject) -> Iterator[Finding]:
    rng = subject.facts.rng
    if rng is None:
        return
    regions = _regions(rng)
    draws = [draw for draw in rng.draws if not draw.replay]
    yield from _check_agreement(rng, regions, draws)
    seen: dict[str, RngDraw] = {}
    for draw in draws:
        other = seen.setdefault(draw.key, draw)
        if other is not draw and _stream(rng, regions, other) != _stream(rng, regions, draw):
            yield RANKS.finding(
                f"{_text(draw)} draws the same numbers as {_text(other)}: both with the random state `{draw.key}`",
                help=f"make the key from the layer, micro-batch, region and the ranks along "
                f"{', '.join(sorted(regions[draw.region].differs_over)) or 'no axis'}",
            )


def _check_agreement(rng: RngFacts, regions: dict[str, RngRegion], draws: list[RngDraw]) -> Iterator[Finding]:
    """Draws of one stream have one key."""
    streams = grouped((_stream(rng, regions, draw), draw) for draw in draws)
    for together in streams.values():
        for one, other in pairwise(together):
            if one.key != other.key:
                yield RANKS.finding(
                    f"{_text(one)} draws with `{one.key}`, and rank {other.rank} with `{other.key}`, but both hold "
                    f"the same values there",
                    help="seed both from the same key; a draw that one rank alone makes (data loading) must not "
                    "advance the shared generator",
                )


def _stream(
    rng: RngFacts, regions: dict[str, RngRegion], draw: RngDraw
) -> tuple[str, int, str, tuple[tuple[str, int], ...]]:
    """Identity that the key of a draw must have: its place, and the coordinates over which it must differ."""
    coords = rng.mesh.coords(draw.rank)
    over = tuple(sorted((axis, coords[axis]) for axis in regions[draw.region].differs_over if axis in coords))
    return draw.layer, draw.micro_batch, draw.region, over


def _regions(rng: RngFacts) -> dict[str, RngRegion]:
    regions = {region.name: region for region in rng.regions}
    for draw in rng.draws:
        if draw.region not in regions:
            raise ValueError(f"a draw names the region {draw.region!r}, which is not among {sorted(regions)}")
        if not 0 <= draw.rank < rng.mesh.num_ranks:
            raise ValueError(f"a draw is made on rank {draw.rank}, and the mesh has {rng.mesh.num_ranks} ranks")
    return regions


RULES: tuple[Rule, ...] = (
    Rule(NO_OWNER, _check_no_owner, needs_plan=True),
    Rule(TWO_OWNERS, _check_two_owners, needs_plan=True),
    Rule(OUT_OF_ORDER, _check_order, needs_plan=True),
    Rule(EMPTY, _check_empty, needs_plan=True),
    Rule(REPLAY, _check_replay),
    Rule(RANKS, _check_ranks),
    Rule(LAYER_NUMBERS, _check_layer_numbers),
    Rule(ROLE, _check_roles),
)
