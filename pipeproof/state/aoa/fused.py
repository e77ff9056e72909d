"""Merges, splits and the fused forms as one thing: parts of tensors along an axis, in another order.

The layouts are Paddle's (aoa/macros.py of its flex checkpoint). ``fused_qkv``: for each group its heads of queries,
then one of keys and one of values. ``fused_qkv_old``: for each of the ranks that tensor parallelism cut it for, its
queries, its keys, its values. ``fused_ffn``: for each of these ranks its part of the gate, then that of the up
projection.
"""

from __future__ import annotations

from math import lcm

from pipeproof.state.aoa.syntax import Fused, Statement
from pipeproof.state.aoa.values import Part, Regrouping


def needs_shards(statement: Statement) -> tuple[bool, bool]:
    """Whether the layout of the tensor to the left, and that to the right, depend on how they are kept."""
    fused = statement.fused
    if fused is None or fused.kind == "fused_qkv":
        return False, False
    return len(statement.left) == 1, len(statement.right) == 1


def regrouping_of(statement: Statement, shards_left: int, shards_right: int) -> Regrouping:
    """How a statement with several names, or a fused one, cuts and puts together.

    Raises:
        ValueError: heads do not divide into the parts that a tensor is kept in.
    """
    num_left, num_right = len(statement.left), len(statement.right)
    if statement.fused is None:
        if num_right == 1:
            return Regrouping((1,) * num_left, (tuple((number, 0) for number in range(num_left)),), even=False)
        return Regrouping((num_right,), tuple(((0, number),) for number in range(num_right)), even=True)
    counts = _counts(statement.fused, shards_left, shards_right)
    if statement.fused.kind == "fused_qkv":
        shards_left = shards_right = statement.fused.num_groups
    left = _layout(counts, shards_left) if num_left == 1 else None
    right = _layout(counts, shards_right) if num_right == 1 else None
    if left is None:
        places = {(component, index): (component, index) for component, index in _layout(counts, 1)}
        cuts = counts
    else:
        places = {part: (0, number) for number, part in enumerate(left)}
        cuts = (len(left),)
    if right is not None:
        return Regrouping(cuts, (tuple(places[part] for part in right),), even=True)
    outputs = (tuple(places[component, index] for index in range(count)) for component, count in enumerate(counts))
    return Regrouping(cuts, tuple(outputs), even=True)


def _counts(fused: Fused, shards_left: int, shards_right: int) -> tuple[int, ...]:
    """Of each component, how many parts it has."""
    if fused.kind == "fused_ffn":
        return (lcm(shards_left, shards_right),) * 2
    return (fused.num_heads, fused.num_groups, fused.num_groups)


def _layout(counts: tuple[int, ...], num_ranks: int) -> list[Part]:
    """Component and number of each part in a tensor that has the share of each rank beside the next one's."""
    for count in counts:
        if count % num_ranks:
            raise ValueError(f"{count} heads do not divide into the {num_ranks} parts that it is kept in")
    return [
        (component, index)
        for rank in range(num_ranks)
        for component, count in enumerate(counts)
        for index in range(rank * count // num_ranks, (rank + 1) * count // num_ranks)
    ]
