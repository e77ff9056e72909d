"""Builds the op table from rows that people, files and tests write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipeproof.schedule.columns import Row, columns_of
from pipeproof.schedule.ops import TRANSFER_KINDS
from pipeproof.schedule.optable import Group, OpGraph, TensorSpec


def build_graph(
    rows_by_rank: Sequence[Sequence[Row]], tensors: Iterable[TensorSpec], groups: Iterable[Group]
) -> OpGraph:
    """Give every row an id and derive channels, FIFO positions and edges. Linear in rows.

    Nothing is judged here: unmatched transfers simply have no match edge, a
    wait for a transfer that is not there waits for ``NONE``.

    Raises:
        ValueError: a row names a tensor or group that is not in the lists, a transfer has no peer, or a group has
            no members, one twice or one that is not a rank.
    """
    all_tensors, all_groups = tuple(tensors), tuple(groups)
    for index, group in enumerate(all_groups):
        _check_group(index, group, len(rows_by_rank))
    for rank, rows in enumerate(rows_by_rank):
        for row in rows:
            _check(rank, row, len(all_tensors), len(all_groups), len(rows_by_rank))
    return OpGraph(columns_of(rows_by_rank), all_tensors, all_groups)


def _check(rank: int, row: Row, num_tensors: int, num_groups: int, num_ranks: int) -> None:
    if row.tensor >= num_tensors:
        raise ValueError(f"rank {rank}, {row.op}: tensor {row.tensor}, but the graph has {num_tensors}")
    if row.group >= num_groups:
        raise ValueError(f"rank {rank}, {row.op}: group {row.group}, but the graph has {num_groups}")
    if row.op.kind in TRANSFER_KINDS and not 0 <= row.peer < num_ranks:
        raise ValueError(f"rank {rank}, {row.op}: peer {row.peer} is not a rank 0..{num_ranks - 1}")


def _check_group(index: int, group: Group, num_ranks: int) -> None:
    if not group.ranks:
        raise ValueError(f"group {index} ({group.axis}) has no members")
    if len(set(group.ranks)) < len(group.ranks):
        raise ValueError(f"group {index} ({group.axis}) has a member twice: {list(group.ranks)}")
    if not all(0 <= rank < num_ranks for rank in group.ranks):
        raise ValueError(f"group {index} ({group.axis}) has a member that is not a rank 0..{num_ranks - 1}")
