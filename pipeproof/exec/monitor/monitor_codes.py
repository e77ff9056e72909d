"""The codes that only rings of watched jobs show: PP952 to PP955."""

from __future__ import annotations

from pipeproof.diagnostics.finding import ExampleKind, RuleDoc

UNREADABLE_RING = RuleDoc(
    code="PP952",
    title="a ring of a watched job cannot be read",
    explanation=(
        "The file is truncated, is not a ring or was written by another version, two files are of one rank, or the "
        "files are of different jobs. Each rank writes `rank_N.ring`."
    ),
    wrong="pipeproof job hang rings/   # rank_0.ring of a job of 2 ranks, rank_1.ring of a job of 4",
    right="pipeproof job hang rings/   # rank_0.ring, rank_1.ring, of one job",
    kind=ExampleKind.COMMAND,
)

RANK_FAILED = RuleDoc(
    code="PP953",
    title="a rank raised an error or was killed, and others wait for it",
    explanation=(
        "The process of a rank has ended without reaching the end of its program, and other ranks wait for operations "
        "that it never issued. If the rank raised an error, the finding has its text and the line. A process that is "
        "gone without a word was killed by a signal: by the out-of-memory killer, the scheduler, or a crash."
    ),
    wrong="rank 1: KeyError: 'loss' at train.py:31; rank 0 waits in all_reduce #7",
    right="all ranks issue all_reduce #7",
    kind=ExampleKind.OUTCOME,
)

RANK_STOPPED = RuleDoc(
    code="PP954",
    title="a rank is stopped, or its host does not respond",
    explanation=(
        "The process exists and does not run: it got SIGSTOP, a debugger holds it, or its machine is frozen. The rank "
        "writes a heartbeat four times in a second from a thread of its own; the last one is older than the patience "
        "of the monitor."
    ),
    wrong="rank 1: state T (stopped); rank 0 waits in recv 0<-1 #3",
    right="rank 1 runs: kill -CONT PID",
    kind=ExampleKind.OUTCOME,
)

SLOW_RANK = RuleDoc(
    code="PP955",
    title="a rank is slower than the others",
    severity="warning",
    explanation=(
        "Other ranks have waited for this rank longer than `--timeout`, and its process uses a processor, so the job "
        "counts as running until `--slow-after`."
    ),
    wrong="rank 0 has waited 12.0 s in all_reduce #7 for rank 3; rank 3 computes",
    right="all ranks reach all_reduce #7 within a few seconds",
    kind=ExampleKind.OUTCOME,
)

MONITOR_CODES: tuple[RuleDoc, ...] = (UNREADABLE_RING, RANK_FAILED, RANK_STOPPED, SLOW_RANK)
