"""515, 516: copies of activations to host memory and back, without the other half."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.rule_doc import RuleDoc
from pipeproof.schedule.derive import BoolColumn, packed
from pipeproof.schedule.op_table import IntColumn, OpGraph
from pipeproof.schedule.ops import COPY_KINDS, KIND_CODE, OpKind
from pipeproof.verify.lifetime.race_rules import about
from pipeproof.verify.subject import Rule, Subject

_ROUND_TRIP = (
    "rank 0: 0F0 WAIT(0F0){queue=offload} 0OFFLOAD0{queue=offload} WAIT(0OFFLOAD0) FREE(0OFFLOAD0) "
    "0RELOAD0{queue=offload} WAIT(0RELOAD0) 0B0 0STEP"
)

NOTHING_TO_COPY = RuleDoc(
    code="PP515",
    title="a copy of activations that are not there",
    explanation=(
        "`OFFLOAD` copies what a forward keeps for its backward into host memory, and `RELOAD` copies that back. A "
        "reload without an offload of the same work item on its rank, or an offload without a forward, reads memory "
        "that nothing has written: the backward computes from an earlier step's values, or from none."
    ),
    wrong="rank 0: 0F0 0RELOAD0 0B0 0STEP",
    right=_ROUND_TRIP,
)

NEVER_FREED = RuleDoc(
    code="PP516",
    title="offloaded activations stay on the device",
    severity="warning",
    explanation=(
        "`FREE(0OFFLOAD0)`, after the wait for the copy, gives the device's memory back; the copy alone saves none. "
        "Without it, the device holds the activations twice once they are reloaded."
    ),
    wrong=_ROUND_TRIP.replace(" FREE(0OFFLOAD0)", ""),
    right=_ROUND_TRIP,
)


def _check_source(subject: Subject) -> Iterator[Finding]:
    graph = subject.graph
    for copy, source in ((OpKind.OFFLOAD, OpKind.FORWARD), (OpKind.RELOAD, OpKind.OFFLOAD)):
        for op_id in _without(graph, graph.kind == KIND_CODE[copy], graph.kind == KIND_CODE[source]).tolist():
            op = graph.ops[op_id]
            missing = op._replace(kind=source)
            fact = f"{op} copies what {missing} would have put there, and the rank has no {missing}"
            yield about(
                subject,
                NOTHING_TO_COPY,
                f"{subject.coords_text(int(graph.rank[op_id]))}: {fact}",
                (op_id,),
                f"add {missing} before {op}, or remove {op}",
            )


def _check_freed(subject: Subject) -> Iterator[Finding]:
    graph = subject.graph
    if not graph.is_kind(COPY_KINDS).any():
        return
    frees = (graph.kind == KIND_CODE[OpKind.FREE]) & (graph.target_kind == KIND_CODE[OpKind.OFFLOAD])
    for op_id in _without(graph, graph.kind == KIND_CODE[OpKind.OFFLOAD], frees).tolist():
        op = graph.ops[op_id]
        yield about(
            subject,
            NEVER_FREED,
            f"{subject.coords_text(int(graph.rank[op_id]))}: {op} saves no memory, for nothing frees its original",
            (op_id,),
            f"add FREE({op}) after WAIT({op})",
        )


def _without(graph: OpGraph, these: BoolColumn, those: BoolColumn) -> IntColumn:
    """Operations of ``these`` (a mask) without one of ``those`` for the same rank, stage and work item."""
    if not these.any():
        return np.flatnonzero(these)
    key = packed(graph.rank, graph.stage, graph.work_item)
    return np.flatnonzero(these & ~np.isin(key, key[those]))


RULES = (Rule(NOTHING_TO_COPY, _check_source), Rule(NEVER_FREED, _check_freed))
