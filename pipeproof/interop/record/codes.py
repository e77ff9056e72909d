"""The codes of what logs of real programs show beside the findings of rules: PP940 to PP946."""

from __future__ import annotations

from pipeproof.specs.codes import ExampleKind, RuleDoc

UNREADABLE_LOG = RuleDoc(
    code="PP940",
    title="a log of a recorded program cannot be read",
    explanation=(
        "The directory has no `rank_N.jsonl`, a line is no JSON object or lacks what its event must have, two files "
        "are of one rank, the files are of different jobs, or the format has another version. A last line that is cut "
        "short is no error: the rank was killed while it wrote."
    ),
    wrong="pipeproof check --log out/   # no rank_N.jsonl there",
    right="pipeproof check --log logs/   # rank_0.jsonl, rank_1.jsonl, ..",
    kind=ExampleKind.OUTCOME,
)

UNFINISHED_LOG = RuleDoc(
    code="PP941",
    title="a log has no end: its rank was killed, or is still running",
    severity="warning",
    explanation=(
        "Each line is written before the call that it is about, so what there is can be trusted, and the last lines "
        "say what the rank was waiting for. What it would have issued next is not known: nothing is called missing "
        "for it. Who waits for whom is followed from rank to rank (PP931, PP933)."
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
        "The logs say how many ranks the job has, and some have no log. Messages to and from them cannot be matched "
        "and are left out, and so are they where they are members of groups."
    ),
    wrong="logs/rank_0.jsonl   # of two ranks",
    right="logs/rank_0.jsonl\nlogs/rank_1.jsonl",
    kind=ExampleKind.OUTCOME,
)

OTHER_ORDER = RuleDoc(
    code="PP943",
    title="what a rank sent or received is not what the plan says",
    explanation=(
        "The messages that a rank really sent to another one, or received from it, were held against the plan's, one "
        "by one in their order: number of elements, type and, where the log says what a message is about, direction, "
        "stage and micro-batch. The first difference of each end is shown."
    ),
    wrong="plan: 0SEND_F0, 0SEND_F1; log: send of F 1, then send of F 0",
    right="plan: 0SEND_F0, 0SEND_F1; log: send of F 0, then send of F 1",
    kind=ExampleKind.OUTCOME,
)

RAISED = RuleDoc(
    code="PP944",
    title="the recorded program raised an error, or issued what could not be recorded",
    severity="warning",
    explanation=(
        "An exception left the recorded block, or a communication call; or a call had arguments that the recorder does "
        "not know, as in another release of the framework. What there is of the log is judged; what looks missing on "
        "this rank may be missing because of that."
    ),
    wrong='{"event": "end", "error": "RuntimeError: .."}',
    right='{"event": "end"}',
    kind=ExampleKind.OUTCOME,
)

SPLITS = RuleDoc(
    code="PP945",
    title="two ranks of an all-to-all disagree on how much goes between them",
    explanation=(
        "Each member says how many elements it sends to each other member, and how many it receives from each. What "
        "one sends to another must be what that one takes. Sizes are not negotiated: the exchange hangs, aborts, or "
        "leaves tokens of other ranks behind."
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
        "An asynchronous operation was issued, and its request was neither waited for nor seen to have ended. If that "
        "happens after the recording, extend it. Else nothing says when the tensor may be used again, and an error "
        "of the operation goes unseen."
    ),
    wrong="work = dist.isend(tensor, 1)",
    right="work = dist.isend(tensor, 1)\nwork.wait()",
    kind=ExampleKind.OUTCOME,
)

RECORD_CODES: tuple[RuleDoc, ...] = (
    UNREADABLE_LOG, UNFINISHED_LOG, MISSING_LOG, OTHER_ORDER, RAISED, SPLITS, NOT_WAITED,
)  # fmt: skip
