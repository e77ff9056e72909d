"""The proof before bytes move: what is on one side is what the other side needs, element by element.

Every map is held to be a bijection on global indices: the parts of each side
tile its tensors, the slabs of the map tile the target's, and every element of
the source goes somewhere. Work grows with the number of parts and slabs; what
is cut alike is looked at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pipeproof.specs.finding import Finding, Severity
from pipeproof.state.mapping import StateMap
from pipeproof.state.reshard.fit import fit
from pipeproof.state.reshard.moves import moves
from pipeproof.state.reshard.places import places
from pipeproof.state.reshard.sides import HeldPart, Side, without_collections
from pipeproof.state.reshard.tiling import BadCut, bad_cuts
from pipeproof.state.reshard.words import and_more, box_words
from pipeproof.verify.layouts.maps import NO_BIJECTION


def prove(source: Side, state_map: StateMap, target: Side) -> tuple[Finding, ...]:
    """What is wrong with making ``target`` of ``source`` by a map; nothing where all of it is proved.

    One finding for each kind of mistake, with the number of tensors and the first counter-example: tensor, rank, range.
    """
    with without_collections():
        return (
            *_parts(source),
            *_parts(target),
            *fit(source, state_map, target),
            *moves(source, state_map, target),
            *places(source),
            *places(target),
        )


def _parts(side: Side) -> Iterator[Finding]:
    """PP210: every element of a side stands in one part. The first of each kind of mistake."""
    kinds: dict[str, list[BadCut]] = {}
    for cut in bad_cuts(side):
        kinds.setdefault(_kind(cut), []).append(cut)
    for kind, cuts in kinds.items():
        name, box = cuts[0].tensors[0], cuts[0].fault.box
        more = sum(len(cut.tensors) for cut in cuts) - 1
        where = box_words(box, side.tensors[name].shape)
        holders = _holders(side.parts.get(name, ()), cuts[0].fault.holders)
        facts = {
            "missing": f"no part has {where}",
            "repeated": f"{where} stands in {cuts[0].fault.times} parts, {holders}",
            "outside": f"{holders} has a part that is not in it, {where}",
        }
        shape = list(side.tensors[name].shape)
        message = f"{side.name}: of `{name}` {shape} {facts[kind]}{and_more(more, 'tensor')}"
        mends = {
            "missing": "name a checkpoint that has all files of all ranks",
            "repeated": "each element must be saved by one rank: of those that hold it, the first",
            "outside": "offsets count in the whole tensor, as if there were one rank",
        }
        yield Finding(NO_BIJECTION.code, Severity.ERROR, message, help=mends[kind])


def _kind(cut: BadCut) -> str:
    if not cut.fault.times:
        return "missing"
    if cut.fault.times > 1:
        return "repeated"
    return "outside"


def _holders(parts: tuple[HeldPart, ...], numbers: Iterable[int]) -> str:
    return " and ".join(dict.fromkeys(parts[number].where for number in numbers))
