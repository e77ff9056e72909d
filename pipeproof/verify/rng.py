"""119, 120: random numbers are drawn from a key of (layer, micro-batch, region), the same where values are the same.

Nothing here draws: a key represents the state of a generator, and equal keys
for equal numbers. The facts come from a person or a log (``RngFacts``).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.rule_doc import ExampleKind, RuleDoc
from pipeproof.verify.declared_facts import RngDraw, RngFacts, RngRegion
from pipeproof.verify.subject import Rule, Subject


def _example(*draws: str) -> str:
    return (
        "from pipeproof.comm.mesh import Mesh\n"
        "from pipeproof.verify.declared_facts import Facts, RngDraw, RngFacts, RngRegion\n"
        "from pipeproof.verify.subject import program_subject\n\n"
        "regions = (RngRegion('dropout', differs_over=('tp',)),)  # of a tensor that is cut along the sequence\n"
        f"draws = ({', '.join(draws)})\n"
        "facts = Facts(rng=RngFacts(Mesh(('tp',), (2,)), regions, draws))\n"
        "subject = program_subject('rank 0: 0F0\\nrank 1: 0F0', facts=facts)"
    )


REPLAY = RuleDoc(
    code="PP119",
    title="a recomputation draws other random numbers than its forward",
    explanation=(
        "Recomputed activations are those of the forward only if dropout masks repeat: the generator's state must "
        "be saved with the micro-batch and restored. Otherwise the backward belongs to another function than the "
        "forward, and the loss alone does not show it."
    ),
    wrong=_example("RngDraw(0, 'layer.0', 0, 'dropout', 'a')", "RngDraw(0, 'layer.0', 0, 'dropout', 'b', replay=True)"),
    right=_example("RngDraw(0, 'layer.0', 0, 'dropout', 'a')", "RngDraw(0, 'layer.0', 0, 'dropout', 'a', replay=True)"),
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
    wrong=_example("RngDraw(0, 'layer.0', 0, 'dropout', 'a')", "RngDraw(1, 'layer.0', 0, 'dropout', 'a')"),
    right=_example("RngDraw(0, 'layer.0', 0, 'dropout', 'a')", "RngDraw(1, 'layer.0', 0, 'dropout', 'b')"),
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
    streams: dict[object, list[RngDraw]] = {}
    for draw in draws:
        streams.setdefault(_stream(rng, regions, draw), []).append(draw)
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


RULES = (Rule(REPLAY, _check_replay), Rule(RANKS, _check_ranks))
