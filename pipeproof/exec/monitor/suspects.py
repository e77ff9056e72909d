"""The ranks that probably left the common order, among ranks that wait for each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from pipeproof.exec.monitor.own_history import deviation, first_divergence, minority
from pipeproof.exec.monitor.ring import RingOp
from pipeproof.exec.monitor.waits import Analysis, at_text, ring_entry

_POINTS_PARTED: Final = 4
_POINTS_DEVIATES: Final = 2
_POINTS_FEWER: Final = 1


def most_suspect(analysis: Analysis, candidates: Iterable[int]) -> tuple[int, ...]:
    """Return the candidates with the most signs that they left the common order; all of them without a difference."""
    ranks = sorted(set(candidates))
    points = dict.fromkeys(ranks, 0)
    _, odd = _first_divergence(analysis)
    issued = {
        rank: max(analysis.share(entry) for entry in analysis.blocking[rank])
        for rank in ranks
        if rank in analysis.blocking
    }
    # on the side of a rank that has ended are the members that did not issue the operation either
    shares = {rank: issued.get(rank, 1 - max(issued.values(), default=0.0)) for rank in ranks}
    for rank in ranks:
        points[rank] += _POINTS_PARTED * (rank in odd)
        points[rank] += _POINTS_DEVIATES * (deviation(analysis.job.by_rank[rank].ring.ops) is not None)
        points[rank] += _POINTS_FEWER * (shares[rank] < max(shares.values()))
    most = max(points.values())
    return tuple(rank for rank in ranks if points[rank] == most)


def _first_divergence(analysis: Analysis) -> tuple[Mapping[int, RingOp], tuple[int, ...]]:
    """Return the operation of each rank at the first divergence, and the ranks that are not where most are."""
    first = first_divergence({each.rank: each.ring.ops for each in analysis.job.ranks})
    odd = minority({rank: op.at for rank, op in first.items()}) if first else ()
    return first, odd if len(odd) < len(first) else ()


def reasons_for(analysis: Analysis, ranks: Iterable[int]) -> tuple[str, ...]:
    """Return what speaks for ranks as the cause, in sentences."""
    reasons = []
    first, odd = _first_divergence(analysis)
    for rank in ranks:
        if rank in odd:
            op, other = first[rank], next(first[each] for each in first if each not in odd)
            text = f"rank {rank} issued collective #{op.number} of its group at {op.at}, "
            reasons.append(f"{text}most others at {other.at}: no step before had these lines together")
        ops = analysis.job.by_rank[rank].ring.ops
        deviating = deviation(ops)
        if deviating is not None:
            reasons.append(
                f"rank {rank} issued {ring_entry(rank, 0, deviating).text}{at_text(deviating)} "
                "where its own earlier steps have another operation"
            )
    return tuple(reasons)
