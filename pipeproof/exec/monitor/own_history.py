"""Comparisons of a rank with its own past, and of ranks with each other, to find out who left the common order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from pipeproof.exec.monitor.ring import RingOp

_TAIL: Final = 64
"""Operations at the end of a ring that are compared with earlier ones, and the longest context."""
_ENOUGH: Final = 2


def deviation(ops: Sequence[RingOp]) -> RingOp | None:
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


def first_divergence(ops_by_rank: dict[int, Sequence[RingOp]]) -> dict[int, RingOp]:
    """Return the operations of the first collective that ranks issued from other lines than ever before.

    Members of one collective often issue it from one line; where they do not,
    the same lines meet again in every step. After an extra collective of one
    rank, lines meet that never met. Returns the operation of each of its
    members, empty if there is none, or if there is no earlier collective to compare with.
    """
    by_group: dict[tuple[str, tuple[int, ...]], dict[int, dict[int, RingOp]]] = {}
    for rank, ops in ops_by_rank.items():
        for op in ops:
            if not op.is_message and op.group.ranks:
                by_group.setdefault((op.group.name, op.group.ranks), {}).setdefault(op.number, {})[rank] = op
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


def minority(keys: Mapping[int, object]) -> tuple[int, ...]:
    """Return the ranks whose key is not the most frequent one; all of them without a single most frequent key."""
    counts = Counter(keys.values()).most_common()
    if len(counts) < _ENOUGH or counts[0][1] == counts[1][1]:
        return tuple(sorted(keys))
    return tuple(sorted(rank for rank, key in keys.items() if key != counts[0][0]))
