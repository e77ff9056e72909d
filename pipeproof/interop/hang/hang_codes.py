"""The codes of ``pipeproof job hang``."""

from __future__ import annotations

from pipeproof.diagnostics.finding import ExampleKind, RuleDoc

UNREADABLE_DUMP = RuleDoc(
    code="PP930",
    title="a Flight Recorder dump or a stack of py-spy cannot be read",
    explanation=(
        "The directory has no dump, a file is truncated or has another format, two files are of one rank, or the "
        "format has another version than 2.x. Pickles are read without running code in them: only lists, dictionaries, "
        "strings and numbers are accepted. Stacks of py-spy are read as text and JSON."
    ),
    wrong="pipeproof job hang logs/   # no file there ends with a rank",
    right="pipeproof job hang dumps/   # nccl_trace_rank_0, nccl_trace_rank_1, ..",
    kind=ExampleKind.COMMAND,
)

HANG_CYCLE = RuleDoc(
    code="PP931",
    title="the run hangs: its operations wait for each other",
    explanation=(
        "The check follows the waits of the operations that each rank has issued and not finished. A send waits for "
        "its receive and the receive for its send, a collective for all its members, an operation for earlier ones in "
        "its queue, and an operation that a rank has not issued for the one that blocks that rank. These waits form a "
        "cycle, so none of them ends. The shortest cycle is shown."
    ),
    wrong="send 0->1, then recv 0<-1 on rank 0; send 1->0, then recv 1<-0 on rank 1",
    right="send 0->1, then recv 0<-1 on rank 0; recv 1<-0, then send 1->0 on rank 1",
    kind=ExampleKind.OUTCOME,
)

DISAGREEMENT = RuleDoc(
    code="PP932",
    title="two ends of a message, or members of a collective, do not agree",
    explanation=(
        "The k-th send of a channel matches its k-th receive, and the k-th collective of a group is one operation of "
        "all its members, because neither carries a name. Here the two differ in the operation, in the number of "
        "elements, in their type, or in being batched, which uses another communicator. Different sizes hang; "
        "different types of one size deliver wrong values."
    ),
    wrong="all_reduce #4 of [1024] Float on rank 0, all_gather #4 of [1024] Float on rank 1",
    right="all_reduce #4 of [1024] Float on ranks 0 and 1",
    kind=ExampleKind.OUTCOME,
)

NEVER_ISSUED = RuleDoc(
    code="PP933",
    title="a rank never issued its part of an operation that others wait for",
    explanation=(
        "A rank has finished everything that it issued, and others wait for an operation that it did not issue: it "
        "took another branch, ended early, or its host is blocked by something other than communication (a data "
        "loader, a barrier of another library, an exception)."
    ),
    wrong="if rank == 0:\n    dist.all_reduce(loss)",
    right="dist.all_reduce(loss)",
    kind=ExampleKind.OUTCOME,
)

NO_DUMP = RuleDoc(
    code="PP934",
    title="dumps of some ranks are missing",
    severity="warning",
    explanation=(
        "The groups have ranks without a dump: they died, or had no time to write one. The cause of the hang may be "
        "on these ranks. Waits for such a rank are not followed. If nothing else explains the hang and waits end at "
        "such a rank, this is an error, which lists the operations that wait for it."
    ),
    wrong="dumps/nccl_trace_rank_0   # of two ranks",
    right="dumps/nccl_trace_rank_0\ndumps/nccl_trace_rank_1",
    kind=ExampleKind.OUTCOME,
)

NOT_FINISHED = RuleDoc(
    code="PP935",
    title="an operation that all its members issued is not done",
    severity="warning",
    explanation=(
        "All ends are issued, agree, and are first in their queues. The operation is slow, was dumped while it ran, "
        "waits for an earlier computation on its stream, or the network failed. The dump does not show which."
    ),
    wrong="all_reduce #4 started on ranks 0 and 1, completed on none",
    right="all_reduce #4 completed on ranks 0 and 1",
    kind=ExampleKind.OUTCOME,
)

UNREADABLE_STATUS = RuleDoc(
    code="PP956",
    title="the RAS server of NCCL cannot be asked",
    explanation=(
        "No RAS server of NCCL answers at the address, or its output has another form than NCCL 2.28.7 to 2.30 write. "
        "A server listens on every host of a running job, unless NCCL_RAS_ENABLE is 0."
    ),
    wrong="pipeproof job hang --ras node-1:28029   # nothing listens there",
    right="pipeproof job hang --ras node-1   # a host of the job, port 28028",
    kind=ExampleKind.COMMAND,
)

HANG_CODES: tuple[RuleDoc, ...] = (
    UNREADABLE_DUMP, HANG_CYCLE, DISAGREEMENT, NEVER_ISSUED, NO_DUMP, NOT_FINISHED, UNREADABLE_STATUS,
)  # fmt: skip
