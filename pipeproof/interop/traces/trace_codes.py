"""Codes of findings that only logs of real programs show: PP940 to PP946."""

from __future__ import annotations

from pipeproof.diagnostics.finding import ExampleKind, RuleDoc

UNREADABLE_LOG = RuleDoc(
    code="PP940",
    title="a log of a recorded program cannot be read",
    explanation=(
        "The directory has no `rank_N.jsonl`, a line is not a JSON object or lacks a required key of its event, two "
        "files are of one rank, the files are of different jobs, or the format has another version. A truncated last "
        "line is not an error: the rank was killed while it wrote."
    ),
    wrong="pipeproof check logs/   # rank_0.jsonl, rank_00.jsonl: two logs of one rank",
    right="pipeproof check logs/   # rank_0.jsonl, rank_1.jsonl, ..",
    kind=ExampleKind.OUTCOME,
)

UNFINISHED_LOG = RuleDoc(
    code="PP941",
    title="a log has no end: its rank was killed, or is still running",
    severity="warning",
    explanation=(
        "Each line is written before the call that it describes, so the existing lines are reliable, and the last "
        "lines show the operation that the rank was waiting for. Its next operations are unknown: none of them is "
        "reported as missing. PP931 and PP933 report which rank waits for which."
    ),
    wrong='{"event": "wait", "of": [7]}   # the last line',
    right='{"event": "end"}   # the last line',
    kind=ExampleKind.OUTCOME,
)

MISSING_LOG = RuleDoc(
    code="PP942",
    title="logs of some ranks are missing",
    severity="warning",
    explanation=(
        "The logs state the number of ranks of the job, and some ranks have no log. Messages to and from these ranks "
        "cannot be matched and are left out. Groups are checked without these ranks."
    ),
    wrong="logs/rank_0.jsonl   # of two ranks",
    right="logs/rank_0.jsonl\nlogs/rank_1.jsonl",
    kind=ExampleKind.OUTCOME,
)

OTHER_ORDER = RuleDoc(
    code="PP943",
    title="the messages of a rank differ from the plan",
    explanation=(
        "The messages that a rank sent to another rank, or received from it, are compared with the plan's, one "
        "by one in their order: number of elements, type and, if the log has the meaning of a message, direction, "
        "stage and micro-batch. The first difference of each end is shown."
    ),
    wrong="plan: 0SEND_F0, 0SEND_F1; log: send of F 1, then send of F 0",
    right="plan: 0SEND_F0, 0SEND_F1; log: send of F 0, then send of F 1",
    kind=ExampleKind.OUTCOME,
)

RAISED = RuleDoc(
    code="PP944",
    title="the recorded program raised an error, or issued a call that could not be recorded",
    severity="warning",
    explanation=(
        "An exception left the recorded block or a communication call, or a call had arguments that the recorder does "
        "not know, for example in another release of the framework. The existing log is checked. Operations that seem "
        "to be missing on this rank may be missing for this reason."
    ),
    wrong='{"event": "end", "error": "RuntimeError: .."}',
    right='{"event": "end"}',
    kind=ExampleKind.OUTCOME,
)

SPLITS = RuleDoc(
    code="PP945",
    title="two ranks of an all-to-all disagree on the number of elements between them",
    explanation=(
        "Each member states how many elements it sends to each other member, and how many it receives from each. A "
        "receiver must expect the number that the sender states. Sizes are not negotiated: the exchange hangs, aborts, "
        "or delivers tokens of other ranks."
    ),
    wrong="all_to_all #3: rank 0 sends 12 elements to rank 1, which receives 8 from rank 0",
    right="all_to_all #3: rank 0 sends 12 elements to rank 1, which receives 12 from rank 0",
    kind=ExampleKind.OUTCOME,
)

NOT_WAITED = RuleDoc(
    code="PP946",
    title="nothing waited for an operation before the recording ended",
    severity="warning",
    explanation=(
        "An asynchronous operation was issued, and the program neither waited for its request nor saw it end. If that "
        "happens after the recording, record longer. Otherwise the program does not know when it may use the tensor "
        "again, and misses an error of the operation."
    ),
    wrong="work = dist.isend(tensor, 1)",
    right="work = dist.isend(tensor, 1)\nwork.wait()",
    kind=ExampleKind.OUTCOME,
)

RECORD_CODES: tuple[RuleDoc, ...] = (
    UNREADABLE_LOG, UNFINISHED_LOG, MISSING_LOG, OTHER_ORDER, RAISED, SPLITS, NOT_WAITED,
)  # fmt: skip
