"""3xx: a group call has no more sends and receives than the backend is known to take."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.rule_doc import RuleDoc
from pipeproof.schedule.derive import packed
from pipeproof.schedule.op_table import NONE
from pipeproof.schedule.ops import TRANSFER_KINDS
from pipeproof.verify.fifo_matching import rank_of
from pipeproof.verify.subject import Rule, Subject


def _example(num_sends: int) -> str:
    """Python code of a program that sends so many micro-batches in one group call."""
    return "\n".join(
        [
            "from pipeproof.comm.backends import table_named",
            "from pipeproof.verify.subject import program_subject",
            "",
            "def of_all(text):",
            f"    return ' '.join(text.replace('#', str(i)) for i in range({num_sends}))",
            "",
            "sender = of_all('0F#') + ' ' + of_all('0SEND_F#{batch=0}') + ' ' + of_all('WAIT(0SEND_F#)')",
            "receiver = of_all('1RECV_F# WAIT(1RECV_F#) 1F#')",
            "program = f'rank 0: {sender}\\nrank 1: {receiver}'",
            "subject = program_subject(program, backend=table_named('torch-nccl'))",
        ]
    )


TOO_MANY = RuleDoc(
    code="PP316",
    title="a group call has more sends and receives than the backend is known to take",
    explanation=(
        "The proofs presume that all transfers of a batch progress together. NCCL divides a large group call into "
        "several kernels, which run one after the other, and each rank divides its own list. A send may then be in a "
        "rank's first kernel and its receive in the peer's second one, while that one's first waits for something in "
        "the second kernel here: the job hangs. The limit is a row of the backend's table, "
        "`max_batched_transfers`; gloo has no group calls."
    ),
    wrong=_example(257),
    right=_example(256),
)


def _check_size(subject: Subject) -> Iterator[Finding]:
    graph, limit = subject.graph, subject.backend.max_batched_transfers
    rows = np.flatnonzero(graph.is_kind(TRANSFER_KINDS) & (graph.batch != NONE))
    if not limit or len(rows) <= limit:
        return
    _, number, counts = np.unique(packed(graph.rank[rows], graph.batch[rows]), return_inverse=True, return_counts=True)
    for call in np.flatnonzero(counts > limit).tolist():
        members = rows[number == call]
        first, beyond = int(members[0]), int(members[limit])
        yield TOO_MANY.finding(
            f"rank {rank_of(graph, first)} issues {len(members)} sends and receives in one batch, from "
            f"{graph.ops[first]} on, and {subject.backend.name} is known to take {limit}",
            help=f"begin another batch at {graph.ops[beyond]}, and at the matching transfer of its peer",
            witness=subject.witness(first, beyond),
        )


RULES = (Rule(TOO_MANY, _check_size),)
