"""Peers of transfers, from the ranks that hold the neighbouring stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.problems import listed
from pipeproof.schedule.columns import NONE, Row
from pipeproof.schedule.formats.text_tokens import Findings
from pipeproof.schedule.ops import COMPUTE_KINDS, SEND_KINDS, TARGET_KINDS, TRANSFER_KINDS, Op
from pipeproof.specs.schedule import NO_PEER


def neighbour_stage(op: Op) -> int:
    """The stage at the other end of a transfer."""
    onward = (op.kind in SEND_KINDS) == op.is_forward
    return op.stage + 1 if onward else op.stage - 1


def holders(rows_by_rank: Sequence[Sequence[Row]]) -> Mapping[int, tuple[int, ...]]:
    """The ranks that compute each stage; of a stage that none computes, those that do anything for it."""
    computing: dict[int, dict[int, None]] = {}
    others: dict[int, dict[int, None]] = {}
    for rank, rows in enumerate(rows_by_rank):
        for row in rows:
            if row.op.kind in COMPUTE_KINDS:
                computing.setdefault(row.op.stage, {})[rank] = None
            elif row.op.kind not in TARGET_KINDS:
                others.setdefault(row.op.stage, {})[rank] = None
    return {stage: tuple(ranks) for stage, ranks in {**others, **computing}.items()}


_Work = tuple[int, int | None, int | None]
"""Stage, micro-batch and split."""


def _holders_of_work(rows_by_rank: Sequence[Sequence[Row]]) -> Mapping[_Work, tuple[int, ...]]:
    """The ranks that compute each work item of each stage."""
    computing: dict[_Work, dict[int, None]] = {}
    for rank, rows in enumerate(rows_by_rank):
        for op in (row.op for row in rows if row.op.kind in COMPUTE_KINDS):
            computing.setdefault((op.stage, op.micro_batch, op.split), {})[rank] = None
    return {work: tuple(ranks) for work, ranks in computing.items()}


def with_peers(
    rows_by_rank: Sequence[Sequence[Row]], origins: Sequence[Location], findings: Findings
) -> tuple[tuple[Row, ...], ...]:
    """The rows with a peer for every transfer that has none; where that is not one other rank, a finding (PP138)."""
    holders_of = holders(rows_by_rank)
    work = _holders_of_work(rows_by_rank)

    def with_peer(rank: int, row: Row) -> Row:
        if row.op.kind not in TRANSFER_KINDS or row.peer != NONE:
            return row
        stage = neighbour_stage(row.op)
        ranks = holders_of.get(stage, ())
        if len(ranks) > 1:  # copies: the one that has this micro-batch
            ranks = work.get((stage, row.op.micro_batch, row.op.split), ranks)
        if len(ranks) == 1 and ranks[0] != rank:
            return replace(row, peer=ranks[0])
        if not ranks:
            fault = f"no rank holds stage {stage}"
        elif len(ranks) > 1:
            fault = f"ranks {listed(ranks, 'and')} hold stage {stage}"
        else:
            fault = f"stage {stage} is on rank {rank} itself, where nothing has to travel"
        where = origins[row.origin] if row.origin != NONE else None
        findings.add(NO_PEER, where, f"{row.op} on rank {rank} has no other end: {fault}", _help(ranks, rank))
        return row

    return tuple(tuple(with_peer(rank, row) for row in rows) for rank, rows in enumerate(rows_by_rank))


def _help(ranks: tuple[int, ...], rank: int) -> str:
    if ranks == (rank,):
        return "remove it"
    return "correct its stage, or name the rank in the text form: `{peer=1}`"
