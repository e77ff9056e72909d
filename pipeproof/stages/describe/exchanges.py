"""Exchanges: the collectives between the parts of a computation, and the seams among them.

A computation that takes turns with another one is cut at each of its collectives. Those that it issues together are
one exchange: the gathers of the router's outputs and of the tokens, and the sums of their gradients. An exchange of
tokens over ``ep`` is a *seam*: while it is under way, the other computation has its turn. The exchange of counts is
none, because the host reads its result before it can send tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeproof.stages.describe.layer import Collective, CollectiveKind


class Exchange(NamedTuple):
    """Number of collectives that are issued together, and whether the computation hands over there."""

    num_collectives: int
    is_seam: bool


def exchanges(collectives: Sequence[Collective]) -> tuple[Exchange, ...]:
    """The exchanges of a computation with these collectives, in order."""
    result: list[Exchange] = []
    for place, collective in enumerate(collectives):
        if place and _goes_with(collectives[place - 1], collective):
            result[-1] = Exchange(result[-1].num_collectives + 1, result[-1].is_seam)
        else:
            result.append(Exchange(1, collective.axis == "ep" and collective.per_token))
    return tuple(result)


def _goes_with(first: Collective, second: Collective) -> bool:
    """True for two of the all-gather dispatcher; a combine is of the other kind than the dispatch before and after."""
    together = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
    return first.axis == second.axis == "ep" and first.kind == second.kind and first.kind in together
