"""Exchanges: the collectives between the parts of a computation, and the seams among them.

A computation that takes turns with another one is cut at each of its collectives. Those that it issues together are
one exchange: the gathers of the router's outputs and of the tokens, and the sums of their gradients. An exchange of
tokens over ``ep`` is a *seam*: while it is under way, the other computation has its turn. The exchange of counts is
none. The host reads its result before it can send tokens, so the seam behind it is *late*: it is issued after the
other computation has launched what it computes in its turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeproof.stages.describe.layer import Collective, CollectiveKind


class Exchange(NamedTuple):
    """Number of collectives that are issued together, whether the computation hands over there, and how late."""

    num_collectives: int
    is_seam: bool
    is_late: bool = False


def exchanges(collectives: Sequence[Collective]) -> tuple[Exchange, ...]:
    """The exchanges of a computation with these collectives, in order."""
    result: list[Exchange] = []
    for place, collective in enumerate(collectives):
        if place and _goes_with(collectives[place - 1], collective):
            result[-1] = result[-1]._replace(num_collectives=result[-1].num_collectives + 1)
        else:
            is_seam = collective.axis == "ep" and collective.per_token
            result.append(Exchange(1, is_seam, is_seam and place > 0 and _announces(collectives[place - 1])))
    return tuple(result)


def _announces(collective: Collective) -> bool:
    """True for the exchange of counts."""
    return collective.kind is CollectiveKind.ALL_TO_ALL and not collective.per_token


def _goes_with(first: Collective, second: Collective) -> bool:
    """True for two of the all-gather dispatcher; a combine is of the other kind than the dispatch before and after."""
    together = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
    return first.axis == second.axis == "ep" and first.kind == second.kind and first.kind in together
