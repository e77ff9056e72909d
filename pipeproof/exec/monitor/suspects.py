"""The ranks that probably left the common order, among ranks that wait for each other.

A rank is compared with its own past, and with the other ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from pipeproof.diagnostics.wait_graph import minority
from pipeproof.exec.monitor.ring import RingOp
from pipeproof.exec.monitor.waits import Analysis, at_text, ring_entry

_TAIL: Final = 64
"""Operations at the end of a ring that are compared with earlier ones, and the longest context."""
_ENOUGH: Final = 2
_POINTS_PARTED: Final = 4
_POINTS_DEVIATES: Final = 2
_POINTS_FEWER: Final = 1


def most_suspect(analysis: Analysis, candidates: Iterable[int]) -> tuple[int, ...]:
    """Return the candidates with the most signs that they left the common order; all of them without a difference."""
    ranks = sorted(set(candidates))
    points = dict.fromkeys(ranks, 0)
    odd = parted(analysis)
    issued = {
        rank: max(analysis.share(entry) for entry in analysis.blocking[rank])
        for rank in ranks
        if rank in analysis.blocking
    }
    # on the side of a rank that has ended are the members that did not issue the operation either
    shares = {rank: issued.get(rank, 1 - max(issued.values(), default=0.0)) for rank in ranks}
    for rank in ranks:
        points[rank] += _POINTS_PARTED * (rank in odd)
        points[rank] += _POINTS_DEVIATES * (_deviation(analysis.job.by_rank[rank].ring.ops) is not None)
        points[rank] += _POINTS_FEWER * (shares[rank] < max(shares.values()))
    most = max(points.values())
    return tuple(rank for rank in ranks if points[rank] == most)


def parted(analysis: Analysis) -> tuple[int, ...]:
    """Return the ranks that are not at the line of most at the first divergence; none without such a line."""
    return minority({rank: op.at for rank, op in _first_divergence(analysis).items()})


def reasons_for(analysis: Analysis, ranks: Iterable[int]) -> tuple[str, ...]:
    """Return what speaks for ranks as the cause, in sentences."""
    reasons = []
    first, odd = _first_divergence(analysis), parted(analysis)
    for rank in ranks:
        if rank in odd:
            op, other = first[rank], next(first[each] for each in first if each not in odd)
            text = f"rank {rank} issued collective #{op.number} of its group at {op.at}, "
            reasons.append(f"{text}most others at {other.at}: no step before had these lines together")
        ops = analysis.job.by_rank[rank].ring.ops
        deviating = _deviation(ops)
        if deviating is not None:
            reasons.append(
                f"rank {rank} issued {ring_entry(rank, 0, deviating).text}{at_text(deviating)} "
                "where its own earlier steps have another operation"
            )
    return tuple(reasons)


def _deviation(ops: Sequence[RingOp]) -> RingOp | None:
    """Return the first of the last operations that follows the operations before it nowhere else in the ring.

    The operations before it are the longest sequence that ends there and
    occurs elsewhere. Training repeats a step, so a rank that takes another
    branch than in all steps before is found; a rank that only waits for it is not.
    """
    signatures = [(op.op, op.group.name, op.peer, op.tag, op.num_inputs, op.num_outputs, op.at) for op in ops]
    for end in range(max(1, len(ops) - _TAIL), len(ops)):
        longest = 0
        successors: set[object] = set()
        for other in range(1, len(ops)):
            if other == end:
                continue
            length, most = 0, min(other, end, _TAIL)
            while length < most and signatures[other - 1 - length] == signatures[end - 1 - length]:
                length += 1
            if length > longest:
                longest, successors = length, set()
            if length and length == longest:
                successors.add(signatures[other])
        if longest >= _ENOUGH and signatures[end] not in successors:
            return ops[end]
    return None


def _first_divergence(analysis: Analysis) -> Mapping[int, RingOp]:
    """Return the operations of the first collective that ranks issued from other lines than ever before.

    Members of one collective often issue it from one line; where they do not,
    the same lines meet again in every step. After an extra collective of one
    rank, lines meet that never met. Returns the operation of each of its
    members, empty if there is none, or if there is no earlier collective to compare with.
    """
    by_group: dict[tuple[str, tuple[int, ...]], dict[int, dict[int, RingOp]]] = {}
    for now in analysis.job.ranks:
        for op in now.ring.ops:
            if not op.is_message and op.group.ranks:
                by_group.setdefault((op.group.name, op.group.ranks), {}).setdefault(op.number, {})[now.rank] = op
    candidates = []
    for (_, ranks), collectives in by_group.items():
        whole = [members for _, members in sorted(collectives.items()) if len(members) == len(ranks)]
        lines = [tuple(members[rank].at for rank in sorted(members)) for members in whole]
        counts = Counter(lines)
        usual = [index for index, line in enumerate(lines) if len(set(line)) == 1 or counts[line] >= _ENOUGH]
        after = usual[-1] + 1 if usual else len(lines)
        if usual and after < len(lines):
            candidates.append(whole[after])
    return min(candidates, key=lambda members: min(op.issued_ns for op in members.values()), default={})
