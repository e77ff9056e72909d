"""501 to 508: unordered uses of one buffer, and operations in the wrong order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from pipeproof.diagnostics.finding import Finding, Location, RuleDoc
from pipeproof.schedule.columns import QUEUES
from pipeproof.schedule.op_table import NONE, IntColumn
from pipeproof.schedule.ops import COMPUTE_KINDS, COPY_KINDS, RECV_KINDS, SEND_KINDS, Op, OpKind
from pipeproof.verify.lifetime.buffer_uses import Uses
from pipeproof.verify.lifetime.races import (
    FREED,
    MOST_PER_CODE,
    NEXT_STEP,
    RECEIVING,
    SENDING,
    UNORDERED,
    Lifetimes,
    Pair,
    Races,
    after_free,
    lifetimes,
)
from pipeproof.verify.lifetime.tensor_buffers import FREES, HOST, KEPT, WRITES
from pipeproof.verify.subject import Rule, Subject


class UseText:
    """Texts of uses of one subject's buffers; ``home`` is the graph's id of each operation, if that is another."""

    def __init__(self, analysis: Lifetimes, uses: Uses, home: IntColumn | None = None) -> None:
        self.subject = analysis.subject
        self._graph = analysis.subject.graph
        self._uses, self._home = uses, home

    def op(self, index: int) -> int:
        """The graph's id of the operation of a use."""
        op = int(self._uses.op[index])
        return op if self._home is None else int(self._home[op])

    def text(self, index: int) -> str:
        """The operation of a use."""
        return str(self._graph.ops[self.op(index)])

    def rank(self, index: int) -> str:
        """The rank of a use, with its coordinates."""
        return self.subject.coords_text(int(self._graph.rank[self.op(index)]))

    def does(self, index: int) -> str:
        """Effect of a use on its buffer, as a verb."""
        mode = int(self._uses.mode[index])
        return "frees" if mode & FREES else "writes" if mode & WRITES else "reads"

    def use(self, index: int, pair: tuple[int, int]) -> str:
        """One of a pair of uses: ``0B0 writes buffer `x```."""
        return f"{self.text(index)} {self.does(index)} {self.buffer(*pair)}"

    def buffer(self, first: int, second: int) -> str:
        """The buffer of two uses, by its name or by its writer."""
        named = self._uses.name_of(int(self._uses.buffer[first]))
        if named is not None:
            return f"buffer `{named[1]}`"
        if self._uses.buffer[first] >= self._uses.first_persistent:
            return self._persistent(first)
        ids = [self.op(first), self.op(second)]
        if any(self._is_copy(op) for op in ids):
            return self._copied(int(self._uses.buffer[first]), self._graph.ops[ids[0]])
        for kinds, what in ((RECV_KINDS, "what {} receives"), (SEND_KINDS, "what {} sends")):
            for op in ids:
                if self._graph.ops[op].kind in kinds:
                    return what.format(self._graph.ops[op])
        maker = next((op for op in ids if self._graph.ops[op].kind in COMPUTE_KINDS), ids[0])
        return f"what {self._graph.ops[maker]} makes"

    def _is_copy(self, op_id: int) -> bool:
        op = self._graph.ops[op_id]
        return (op if op.target is None else op.target).kind in COPY_KINDS

    def _copied(self, buffer: int, op: Op) -> str:
        forward = Op(OpKind.FORWARD, op.stage, op.micro_batch, split=op.split)
        if self._uses.tensors.is_named(np.array(buffer), KEPT):
            return f"what {forward} keeps"
        on_host = self._uses.tensors.is_named(np.array(buffer), HOST)
        return f"the {'host' if on_host else 'reloaded'} copy of what {forward} keeps"

    def _persistent(self, index: int) -> str:
        name = "gradient" if self._uses.is_gradient[index] else "weights"
        return f"the {name} of stage {self._graph.ops[self.op(index)].stage}"

    def queue(self, index: int) -> str:
        """Text of the queue that an operation runs on."""
        number = int(self._graph.queue[self.op(index)])
        return "its channel" if number == NONE else f"queue `{self._graph.queues[number]}`"

    def wait(self, index: int) -> str:
        """Text about the wait for an operation: ``WAIT(x) comes too late``."""
        op = self.op(index)
        waits = (self._graph.waits_for == op).nonzero()[0]
        text = self._graph.ops[op]
        if not len(waits):
            return f"nothing waits for {text}"
        number = int(self._graph.queue[waits[0]])
        if number >= len(QUEUES):
            return f"WAIT({text}) holds only queue `{self._graph.queues[number]}`"
        return f"WAIT({text}) comes too late"


def about(subject: Subject, doc: RuleDoc, message: str, ops: Iterable[int], help: str) -> Finding:
    """A finding about operations of the graph."""
    witness = subject.witness(*ops)
    return doc.finding(message, location=place_of_schedule(subject), help=help, witness=witness)


def place_of_schedule(subject: Subject) -> Location | None:
    """The plan's ``schedule``, where no row has a place of its own."""
    return None if subject.origins else subject.locate("schedule")


def count_of_rest(subject: Subject, doc: RuleDoc, total: int) -> Iterator[Finding]:
    """One finding that counts the findings after the first ``MOST_PER_CODE``, if there are any."""
    if total > MOST_PER_CODE:
        yield doc.finding(
            f"and {total - MOST_PER_CODE} more of this kind, not checked one by one",
            location=place_of_schedule(subject),
        )


_SENT = (
    "rank 0: 0F0{writes=out} 0SEND_F0{peer=1 reads=out} {next} 0SEND_F1{peer=1 reads=out} WAIT(0SEND_F1)\n"
    "rank 1: 1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0 1RECV_F1{peer=0} WAIT(1RECV_F1) 1F1"
)

WRITE_UNDER_SEND = RuleDoc(
    code="PP501",
    title="a buffer is written while a send may still read it",
    explanation=(
        "An asynchronous send reads its buffer from its post until it is done, and only a wait ensures that. Values "
        "written into the buffer before the wait may be sent: the receiver gets another micro-batch's values, "
        "or half of them. Nothing fails."
    ),
    wrong=_SENT.replace("{next}", "0F1{writes=out} WAIT(0SEND_F0)"),
    right=_SENT.replace("{next}", "WAIT(0SEND_F0) 0F1{writes=out}"),
)

USE_UNDER_RECEIVE = RuleDoc(
    code="PP502",
    title="a received tensor is used before its receive is known to be done",
    explanation=(
        "An asynchronous receive writes its buffer at some time between its post and its wait. A read of the "
        "buffer before the wait gets old values, or half of the message; a write before it may be overwritten."
    ),
    wrong=("rank 0: 0F0 0SEND_F0{peer=1} WAIT(0SEND_F0)\nrank 1: 1RECV_F0{peer=0} 1F0 WAIT(1RECV_F0)"),
    right=("rank 0: 0F0 0SEND_F0{peer=1} WAIT(0SEND_F0)\nrank 1: 1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0"),
)

FREED_IN_USE = RuleDoc(
    code="PP503",
    title="memory is freed while something still uses it",
    explanation=(
        "A buffer is freed while a transfer or another queue may still read or write it, or is read (or freed) "
        "again afterwards with nothing written in between. The allocator gives the memory to another tensor: "
        "NaN, a wrong loss, or a crash, and only sometimes. To free an output after its send, wait for the send "
        "first; to free a buffer that a side queue reads, wait for that queue first. With `buffers.free_output: "
        "after_send_posted` no asynchronous send is safe."
    ),
    wrong=("rank 0: 0F0 0SEND_F0{peer=1} FREE(0SEND_F0) WAIT(0SEND_F0)\nrank 1: 1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0"),
    right=("rank 0: 0F0 0SEND_F0{peer=1} WAIT(0SEND_F0) FREE(0SEND_F0)\nrank 1: 1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0"),
)

NO_ORDER = RuleDoc(
    code="PP507",
    title="two queues use one buffer, and nothing orders them",
    explanation=(
        "Operations on different queues (CUDA streams), members of one batch, or one-sided accesses from another "
        "rank are ordered only by a wait, a collective or a message. Here at least one of the two "
        "writes. A wait that holds another queue than the one that uses the buffer does not help, nor does a wait for "
        "an earlier operation."
    ),
    wrong="rank 0: 0F0 0B0 0REDUCE_GRAD:dp{queue=side} 0STEP",
    right="rank 0: 0F0 0B0 WAIT(0B0){queue=side} 0REDUCE_GRAD:dp{queue=side} WAIT(0REDUCE_GRAD:dp) 0STEP",
)

ACROSS_STEPS = RuleDoc(
    code="PP508",
    title="the next step uses a buffer that this step may still be using",
    explanation=(
        "Within one step everything is ordered, but gradients, weights and named buffers are the same in the next. "
        "An operation on its own queue at the end of the step, for which nothing waits, conflicts with the first "
        "operations of the next step."
    ),
    wrong="rank 0: 0F0{writes=act} 0B0 WAIT(0F0){queue=side} 0ALL_GATHER:tp{queue=side reads=act group=0}\ngroup tp: 0",
    right=(
        "rank 0: 0F0{writes=act} 0B0 WAIT(0F0){queue=side} 0ALL_GATHER:tp{queue=side reads=act group=0} "
        "WAIT(0ALL_GATHER:tp)\ngroup tp: 0"
    ),
)


def _rule(doc: RuleDoc, code: str, describe: Callable[[UseText, Pair], tuple[str, str]]) -> Rule:
    """The rule of races of one code; ``describe`` gives the fact and the fix."""

    def check(subject: Subject) -> Iterator[Finding]:
        analysis = subject.once(lifetimes)
        return _findings(UseText(analysis, analysis.uses), analysis.races, doc, code, describe)

    return Rule(doc, check)


def _findings(
    texts: UseText, races: Races, doc: RuleDoc, code: str, describe: Callable[[UseText, Pair], tuple[str, str]]
) -> Iterator[Finding]:
    pairs = races.pairs.get(code, [])
    for pair in pairs[:MOST_PER_CODE]:
        fact, fix = describe(texts, pair)
        yield about(texts.subject, doc, f"{texts.rank(pair[0])}: {fact}", map(texts.op, pair), fix)
    yield from count_of_rest(texts.subject, doc, len(pairs) + races.unexamined[code])


def _describe_sending(texts: UseText, pair: Pair) -> tuple[str, str]:
    send, writer = pair
    fact = f"{texts.use(writer, pair)} while {texts.text(send)} may still be reading it: {texts.wait(send)}"
    return fact, f"put WAIT({texts.text(send)}) before {texts.text(writer)}, or give it a buffer of its own"


def _describe_receiving(texts: UseText, pair: Pair) -> tuple[str, str]:
    receive, user = pair
    fact = f"{texts.use(user, pair)} while {texts.text(receive)} may still be writing it: {texts.wait(receive)}"
    return fact, f"put WAIT({texts.text(receive)}) before {texts.text(user)}"


def _describe_freed(texts: UseText, pair: Pair) -> tuple[str, str]:
    freer, user = pair if texts.does(pair[0]) == "frees" else pair[::-1]
    fact = f"{texts.use(freer, pair)} while {texts.text(user)} may still use it: {texts.wait(user)}"
    fix = f"put WAIT({texts.text(user)}) before {texts.text(freer)}"
    lowered = texts.subject.lowered
    if lowered is not None and lowered.spec.buffers.free_output == "after_send_posted":
        fix = "set buffers.free_output to after_send_done"
    return fact, fix


def _describe_unordered(texts: UseText, pair: Pair) -> tuple[str, str]:
    first, second = pair
    elsewhere = texts.rank(first) != texts.rank(second)
    also = f"{texts.text(second)} of {texts.rank(second)}" if elsewhere else texts.text(second)
    fact = (
        f"{texts.use(first, pair)} on {texts.queue(first)}, and {also} {texts.does(second)} it on "
        f"{texts.queue(second)}, and nothing orders them"
    )
    if elsewhere:
        return fact, "put a barrier of both ranks, or a message from one to the other, in between"
    return fact, f"let {texts.queue(second)} wait for {texts.text(first)} before {texts.text(second)}"


def _check_freed(subject: Subject) -> Iterator[Finding]:
    analysis = subject.once(lifetimes)
    texts = UseText(analysis, analysis.uses)
    yield from _findings(texts, analysis.races, FREED_IN_USE, FREED, _describe_freed)
    uses = analysis.in_order
    places = after_free(uses)
    texts = UseText(analysis, uses)
    _, last = uses.last_change
    for index in places[:MOST_PER_CODE].tolist():
        freer = int(last[index])
        again = bool(uses.mode[index] & FREES)
        fact = f"{texts.use(index, (freer, index))}{' again' if again else ''}, which {texts.text(freer)} freed before"
        fix = f"drop one of the two, {texts.text(freer)} and {texts.text(index)}"
        if not again:
            fix = f"move {texts.text(freer)} behind {texts.text(index)}"
        yield about(subject, FREED_IN_USE, f"{texts.rank(index)}: {fact}", map(texts.op, (freer, index)), fix)
    yield from count_of_rest(subject, FREED_IN_USE, len(places))


def _check_across_steps(subject: Subject) -> Iterator[Finding]:
    analysis = subject.once(lifetimes)
    order, uses, races = analysis.over_steps
    yield from _findings(UseText(analysis, uses, order.home), races, ACROSS_STEPS, NEXT_STEP, _describe_across)


def _describe_across(texts: UseText, pair: Pair) -> tuple[str, str]:
    first, second = pair
    fact = (
        f"in the next step {texts.use(second, pair)}, which {texts.text(first)} of this step may still be using on "
        f"{texts.queue(first)}: {texts.wait(first)}"
    )
    return fact, f"end the step with WAIT({texts.text(first)})"


NEVER_WAITED = RuleDoc(
    code="PP505",
    title="nothing waits for a transfer",
    explanation=(
        "Each posted send and receive is a request that is waited for exactly once. Without the wait, it is unknown "
        "when the buffer may be used again, an error of the transfer is not noticed, and the runtime keeps the request "
        "and its tensor: memory grows from step to step."
    ),
    wrong="rank 0: 0F0 0SEND_F0{peer=1}\nrank 1: 1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0",
    right="rank 0: 0F0 0SEND_F0{peer=1} WAIT(0SEND_F0)\nrank 1: 1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0",
)

UNWRITTEN = RuleDoc(
    code="PP506",
    title="a buffer is read before it is written",
    explanation=(
        "The operation comes before the write of its buffer: a send before the computation whose result it "
        "sends, a computation before its receive is even posted. It reads the old contents of the memory: zeros in "
        "a test, NaN in a long run. Adding to a gradient buffer that was never set is the same mistake. A buffer that "
        "the program never writes, or that only the optimizer writes, is taken to be there from the start; so is a sum "
        "that is set to zero after the optimizer, for the next step."
    ),
    wrong="rank 0: 0F0 0B0{reads=main_grad writes=main_grad} 0STEP{reads=main_grad}",
    right="rank 0: 0SCALE_GRAD{writes=main_grad} 0F0 0B0{reads=main_grad writes=main_grad} 0STEP{reads=main_grad}",
)


def _check_waited(subject: Subject) -> Iterator[Finding]:
    graph, unwaited = subject.graph, subject.once(lifetimes).unwaited
    for op_id in unwaited[:MOST_PER_CODE].tolist():
        op = graph.ops[op_id]
        when = "before its buffer is used again" if op.kind in SEND_KINDS else "before the tensor is used"
        yield about(
            subject,
            NEVER_WAITED,
            f"{subject.coords_text(int(graph.rank[op_id]))} posts {op} and never waits for it",
            (op_id,),
            f"add WAIT({op}) {when}, at the latest at the end of the step",
        )
    yield from count_of_rest(subject, NEVER_WAITED, len(unwaited))


def _check_unwritten(subject: Subject) -> Iterator[Finding]:
    analysis = subject.once(lifetimes)
    uses = analysis.in_order
    texts = UseText(analysis, uses)
    for index in analysis.unwritten[:MOST_PER_CODE].tolist():
        same = np.flatnonzero(uses.buffer == uses.buffer[index])
        writers = same[uses.changes[same]].tolist()
        later = next((p for p in writers if p != index), None)
        if later is None:
            fact = f"adds to {texts.buffer(index, index)}, which nothing sets before"
            fix = f"write {texts.buffer(index, index)} (zeros, for a sum) before {texts.text(index)}"
        else:
            fact = f"reads {texts.buffer(index, later)}, but {texts.text(later)} writes it only later"
            fix = f"move {texts.text(index)} behind {texts.text(later)}"
        ops = [texts.op(p) for p in (index, later) if p is not None]
        yield about(subject, UNWRITTEN, f"{texts.rank(index)}: {texts.text(index)} {fact}", ops, fix)
    yield from count_of_rest(subject, UNWRITTEN, len(analysis.unwritten))


RULES: tuple[Rule, ...] = (
    Rule(NEVER_WAITED, _check_waited),
    Rule(UNWRITTEN, _check_unwritten),
    _rule(WRITE_UNDER_SEND, SENDING, _describe_sending),
    _rule(USE_UNDER_RECEIVE, RECEIVING, _describe_receiving),
    Rule(FREED_IN_USE, _check_freed),
    _rule(NO_ORDER, UNORDERED, _describe_unordered),
    Rule(ACROSS_STEPS, _check_across_steps),
)
