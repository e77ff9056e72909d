"""What goes around a sub-layer of the ordered reference: one residual stream, or several, piece by piece."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from pipeproof.specs.model import ModelSpec
from pipeproof.stages.reference import streams
from pipeproof.stages.reference.pieces import Pieces


@dataclass(frozen=True)
class Residual:
    """What a sub-layer takes, and for each piece, what makes of its result what comes next."""

    taken: Pieces
    makers: Sequence[streams.Behind]

    def behind(self, made: Pieces) -> Pieces:
        """What stands behind the sub-layer."""
        return [behind(piece) for behind, piece in zip(self.makers, made, strict=True)]


def residual(x: Pieces, at: str, model: ModelSpec, weights: Mapping[str, Pieces]) -> Residual:
    """Around the sub-layer ``at``: the sum, or all streams; each piece of the sequence has copies of their weights."""
    spec = model.hyper_connections
    if spec is None:
        return Residual(x, [partial(operator.add, piece) for piece in x])
    of_pieces = zip(*(weights[f"{at}_streams.{end}"] for end in streams.WEIGHTS), strict=True)
    found = [streams.read(piece, own, spec) for piece, own in zip(x, of_pieces, strict=True)]
    return Residual([taken for taken, _ in found], [behind for _, behind in found])


def opened(x: Pieces, model: ModelSpec, number: int) -> Pieces:
    """What block ``number`` begins with: several streams for one, in the first block of a model that has them."""
    spec = model.hyper_connections
    return x if spec is None or number > 0 else [streams.widened(piece, spec) for piece in x]


def closed(x: Pieces, model: ModelSpec, number: int) -> Pieces:
    """What block ``number`` ends with: one stream for several, in the last block."""
    spec = model.hyper_connections
    return x if spec is None or number < model.num_layers - 1 else [streams.summed(piece, spec) for piece in x]
