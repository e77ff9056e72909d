"""What crosses boundaries beside the activation where a plan declares it: words of a unit, taken and put in its place.

``tokens``, ``labels`` and ``mask`` (which positions count in the loss) have no gradient. A stage that receives one uses
it in place of its own, on its device: nothing waits for the host. What it changes is the main lane.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

import torch

from pipeproof.stages.common.units import Lane, Unit
from pipeproof.stages.describe.boundary import Boundary
from pipeproof.stages.describe.synthetic import IGNORED

Tensor: TypeAlias = torch.Tensor


def taken_from(unit: Unit, member: Boundary, *, batch_first: bool) -> Tensor:
    """What a member has of a unit, over all TP ranks, in the member's order of dims and of its type."""
    words = {"tokens": unit.tokens, "labels": unit.labels, "mask": unit.labels != IGNORED}[member.member]
    return _in_order(words, member, batch_first=batch_first).to(getattr(torch, member.dtype)).contiguous()


def put_into(unit: Unit, member: Boundary, received: Tensor, *, batch_first: bool) -> Unit:
    """The unit with what was received, all of it, in place of its own.

    Tokens stand in the labels, too: a position's label is the next token, but for the last one's.
    """
    words = _in_order(received, member, batch_first=batch_first)
    tokens, labels = unit.tokens, unit.labels
    if member.member == "labels":
        labels = words.to(torch.int64)
    elif member.member == "mask":
        labels = torch.where(words.bool(), labels, IGNORED)
    else:
        tokens, dim = words.to(torch.int64), 1 if batch_first else 0
        length = tokens.shape[dim]
        known, last = labels.split([length - 1, 1], dim)
        next_tokens = tokens.narrow(dim, 1, length - 1)
        labels = torch.cat([torch.where(known == IGNORED, IGNORED, next_tokens), last], dim)
    return replace(unit, lanes=(Lane(tokens, labels), *unit.lanes[1:]))


def _in_order(words: Tensor, member: Boundary, *, batch_first: bool) -> Tensor:
    """Between the member's order of dims and that of units."""
    return words if (member.dims == "bs") == batch_first else words.t()
