"""509 to 514: buffers hold what their readers compute with, sums are complete, and distributed values were written."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from pipeproof.diagnostics.finding import Finding, RuleDoc
from pipeproof.schedule.columns import WRITE
from pipeproof.schedule.op_table import NONE, OpGraph
from pipeproof.schedule.ops import CHILD_KINDS, KINDS, OpKind
from pipeproof.verify.content import ADDERS, Content, Role, State, Term, input_of
from pipeproof.verify.content_walk import Contents, WrongRead, WrongSum, contents
from pipeproof.verify.lifetime.race_rules import about, count_of_rest
from pipeproof.verify.lifetime.races import MOST_PER_CODE
from pipeproof.verify.subject import Rule, Subject, of_ranks


def _received_into(slot: int) -> str:
    """Two activations are received before they are used, the second one into a slot of a double buffer."""
    return (
        "rank 0: 0F0 0SEND_F0{peer=1} WAIT(0SEND_F0) 0F1 0SEND_F1{peer=1} WAIT(0SEND_F1)\n"
        "rank 1: 1RECV_F0{peer=0 writes=recv[0]} WAIT(1RECV_F0) "
        f"1RECV_F1{{peer=0 writes=recv[{slot}]}} WAIT(1RECV_F1) 1F0{{reads=recv[0]}} 1F1{{reads=recv[{slot}]}}"
    )


OVERWRITTEN = RuleDoc(
    code="PP509",
    title="a buffer was overwritten before its reader came",
    explanation=(
        "The buffer held the values that the operation computes with, but values of another micro-batch (or stage) "
        "were written over them. Every access is in order, and no race detector reports it; the values are "
        "wrong all the same. The usual cause is a double buffer whose index does not change, or starts anew."
    ),
    wrong=_received_into(0),
    right=_received_into(1),
)

_SENT_FROM = (
    "rank 0: 0F0{writes=o0} 0SEND_F0{peer=1 reads=o0} WAIT(0SEND_F0) "
    "0F1{writes=o1} 0SEND_F1{peer=1 reads={buffer}} WAIT(0SEND_F1)\n"
    "rank 1: 1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0 1RECV_F1{peer=0} WAIT(1RECV_F1) 1F1"
)

OTHER_CONTENT = RuleDoc(
    code="PP510",
    title="a buffer does not hold the input of its reader",
    explanation=(
        "The kind of an operation states its input, the name on its row the buffer that stores it. Here the "
        "buffer holds the result of another micro-batch, of another stage or of the previous step, or weights where a "
        "gradient is added, and never held the right one in this step. Slots were exchanged, an index is stale, or a "
        "chunk reads the receive buffer of another chunk. Shapes agree, nothing races, and nothing fails."
    ),
    wrong=_SENT_FROM.replace("{buffer}", "o0"),
    right=_SENT_FROM.replace("{buffer}", "o1"),
)

INCOMPLETE = RuleDoc(
    code="PP511",
    title="a gradient lacks the contribution of a micro-batch",
    explanation=(
        "A micro-batch has computed its contribution to a gradient, and the buffer that the optimizer (or a reduction, "
        "or a scaling) reads does not have it: the buffer was set to zero in between, another micro-batch wrote "
        "instead of adding, or the contribution went into another buffer. Training continues with a biased gradient."
    ),
    wrong=(
        "rank 0: 0SCALE_GRAD{writes=main_grad} 0F0 0B0{reads=main_grad writes=main_grad} 0SCALE_GRAD{writes=main_grad} "
        "0F1 0B1{reads=main_grad writes=main_grad} 0STEP{reads=main_grad}"
    ),
    right=(
        "rank 0: 0SCALE_GRAD{writes=main_grad} 0F0 0B0{reads=main_grad writes=main_grad} "
        "0F1 0B1{reads=main_grad writes=main_grad} 0STEP{reads=main_grad}"
    ),
)

REPEATED = RuleDoc(
    code="PP514",
    title="a gradient has the contribution of a micro-batch more than once",
    explanation=(
        "A buffer of sums was added to another one, and is added again after further contributions, without a reset to "
        "zero in between: the first micro-batches count twice."
    ),
    wrong=(
        "rank 0: 0SCALE_GRAD{writes=g} 0SCALE_GRAD{writes=sum} 0F0 0B0{reads=g writes=g} "
        "0SCALE_GRAD{reads=g+sum writes=sum} 0F1 0B1{reads=g writes=g} 0SCALE_GRAD{reads=g+sum writes=sum} "
        "0STEP{reads=sum}"
    ),
    right=(
        "rank 0: 0SCALE_GRAD{writes=g} 0SCALE_GRAD{writes=sum} 0F0 0B0{reads=g writes=g} "
        "0SCALE_GRAD{reads=g+sum writes=sum} 0SCALE_GRAD{writes=g} 0F1 0B1{reads=g writes=g} "
        "0SCALE_GRAD{reads=g+sum writes=sum} 0STEP{reads=sum}"
    ),
)

NEVER_WROTE = RuleDoc(
    code="PP512",
    title="a rank distributes a value that it never wrote",
    explanation=(
        "A count of tokens, a loss or a norm is computed on one rank and sent to the others by a collective. Here the "
        "root of a broadcast (or a member of a reduction or gather) has never written the buffer that it "
        "puts in, although another rank computes it: all ranks continue with the old contents of that memory. "
        "The usual cause is a root that is counted from the wrong end of the group."
    ),
    wrong=(
        "group pp: 0 1\n"
        "rank 0: 1F0{writes=num_tokens} 1BROADCAST0:pp{group=0 peer=1 writes=num_tokens} "
        "1SCALE_GRAD{reads=num_tokens}\n"
        "rank 1: 0F0 1BROADCAST0:pp{group=0 peer=1 reads=num_tokens} 0SCALE_GRAD"
    ),
    right=(
        "group pp: 0 1\n"
        "rank 0: 1F0{writes=num_tokens} 1BROADCAST0:pp{group=0 peer=0 reads=num_tokens} "
        "1SCALE_GRAD{reads=num_tokens}\n"
        "rank 1: 0F0 1BROADCAST0:pp{group=0 peer=0 writes=num_tokens} 0SCALE_GRAD"
    ),
)

_REDUCED = "0F0 0B0{writes=g} 0REDUCE_GRAD:dp{group=0 reads=g writes=h}"

UNUSED = RuleDoc(
    code="PP513",
    title="the optimizer reads a gradient that a reduction or scaling left out",
    explanation=(
        "A gradient is reduced or scaled into one buffer, and the optimizer reads another: the update is made from a "
        "gradient that is not reduced. Ranks drift apart, or the learning rate is off by a factor."
    ),
    wrong=of_ranks("dp: 0 1", *[f"{_REDUCED} 0STEP{{reads=g}}"] * 2),
    right=of_ranks("dp: 0 1", *[f"{_REDUCED} 0STEP{{reads=h}}"] * 2),
)


def _check_overwritten(subject: Subject) -> Iterator[Finding]:
    outcome, ops = subject.once(contents), subject.graph.ops
    wrong = [read for read in outcome.wrong if read.own != NONE]
    for read in wrong[:MOST_PER_CODE]:
        writer = read.content.writer
        yield about(
            subject,
            OVERWRITTEN,
            f"{_rank(subject, read.op)}: {ops[read.op]} reads {_buffer(outcome, read.buffer)}, where {ops[writer]} "
            f"has overwritten what {ops[read.own]} put there",
            (read.own, writer, read.op),
            f"let {ops[writer]} write to another buffer" + _pool_size(subject, outcome, read),
        )
    yield from count_of_rest(subject, OVERWRITTEN, len(wrong))


def _pool_size(subject: Subject, outcome: Contents, read: WrongRead) -> str:
    """For a buffer ``pool[i]``: how many buffers the pool needs for the work items that are alive together."""
    uses, graph = outcome.uses, subject.graph
    rank, name = uses.names[read.buffer - uses.first_named]
    pool, bracket, _ = name.partition("[")
    if not bracket:
        return ""
    members = [uses.first_named + i for i, (r, n) in enumerate(uses.names) if r == rank and n.startswith(f"{pool}[")]
    selected = uses.op[np.isin(uses.buffer, members) & (graph.work_item[uses.op] != NONE)]
    ends: dict[tuple[int, int], tuple[int, int]] = {}
    for op in sorted(selected.tolist()):
        owner = int(graph.stage[op]), int(graph.work_item[op])
        ends[owner] = (ends.get(owner, (op, op))[0], op)
    most = max(sum(a <= start <= b for a, b in ends.values()) for start, _ in ends.values())
    return f"; `{pool}[..]` needs {most} buffers here" if most > 1 else ""


def _check_content(subject: Subject) -> Iterator[Finding]:
    outcome, graph = subject.once(contents), subject.graph
    wrong = [read for read in outcome.wrong if read.own == NONE]
    for read in wrong[:MOST_PER_CODE]:
        op = graph.ops[read.op]
        adds = read.op in outcome.uses.op[(outcome.uses.buffer == read.buffer) & outcome.uses.changes]
        expected = _expectation(graph, read.op, adds=adds)
        yield about(
            subject,
            OTHER_CONTENT,
            f"{_rank(subject, read.op)}: {op} {'adds to' if adds else 'reads'} {_buffer(outcome, read.buffer)}, which "
            f"{content_text(graph, read.content, read.step)}; "
            f"it computes with {expected}",
            (read.op,) if read.content.writer == NONE else (read.op, read.content.writer),
            f"let {op} name the buffer that holds {expected}",
        )
    yield from count_of_rest(subject, OTHER_CONTENT, len(wrong))


def content_text(graph: OpGraph, content: Content, step: int) -> str:
    """The text of a content as ``step`` finds it, with its writer: ``holds the result of 0F1, written by 1RECV_F1``."""
    if content.writer == NONE:
        return "nothing has written"
    writer = graph.ops[content.writer]
    if not content.terms:
        return f"holds {'zeros' if content.state is State.ZERO else 'other values'}, written by {writer}"
    texts = [_term_text(graph, term) for term in sorted(content.terms, key=lambda term: term[1:3])]
    text = texts[0] if len(texts) == 1 else f"the sum of {' and '.join(texts[:3])}{' and more' * (len(texts) > 3)}"
    return f"holds {text}{' of the step before' if content.step != step else ''}, written by {writer}"


def _term_text(graph: OpGraph, term: Term) -> str:
    kind = OpKind.FORWARD if term.role is Role.ACTIVATION else OpKind.BACKWARD
    return f"the {term.role.value} of {graph.op_of(kind, term.stage, term.work_item)}"


def _expectation(graph: OpGraph, op: int, *, adds: bool) -> str:
    """The text of an operation's input, by the names of the operations that make it."""
    kind, stage, work_item = KINDS[graph.kind[op]], int(graph.stage[op]), int(graph.work_item[op])
    if work_item == NONE:
        return f"the gradient of stage {stage}"
    if adds:
        return f"the weight gradient of stage {stage} so far"
    wanted = input_of(graph, op)
    saved = f"what {graph.op_of(OpKind.FORWARD, stage, work_item)} read or saved"
    if wanted is None:
        return saved
    roles, of_stage, _ = wanted
    role = Role.ACTIVATION if Role.ACTIVATION in roles else Role.INPUT_GRADIENT
    tensor = _term_text(graph, Term(role, of_stage, work_item))
    return f"{tensor}, or {saved}" if kind in ADDERS else tensor


def _check_sums(subject: Subject, doc: RuleDoc) -> Iterator[Finding]:
    """A result that a sum lacks, or, for ``REPEATED``, has more than once."""
    outcome = subject.once(contents)
    wrong = [one for one in outcome.sums if bool(one.count) == (doc is REPEATED)]
    yield from (_sum(subject, outcome, doc, one) for one in wrong[:MOST_PER_CODE])
    yield from count_of_rest(subject, doc, len(wrong))


def _sum(subject: Subject, outcome: Contents, doc: RuleDoc, wrong: WrongSum) -> Finding:
    graph = subject.graph
    term, reader, cause = _term_text(graph, wrong.term), graph.ops[wrong.reader], [wrong.adder, wrong.reader]
    fix = f"let it be added to a buffer that {reader} reads"
    if wrong.count:
        fact = f"has {term} {wrong.count} times"
        fix = "set a buffer of sums to zero after it was added to another one"
    elif wrong.overwriter != NONE:
        overwriter = graph.ops[wrong.overwriter]
        cause = [wrong.overwriter, wrong.reader]
        fact = f"lacks {term}: {overwriter} overwrote it before anything had read it"
        fix = f"let {overwriter} add to the buffer, or come before all micro-batches"
    else:
        fact = f"lacks {term}, which was never added to it"
    message = f"{_rank(subject, wrong.reader)}: {reader} reads {_buffer(outcome, wrong.buffer)}, which {fact}"
    return about(subject, doc, message, [op for op in cause if op != NONE], fix)


def _check_never_wrote(subject: Subject) -> Iterator[Finding]:
    """Buffers that collectives put in, that nothing on their rank wrote, and that another rank computes."""
    graph, outcome = subject.graph, subject.once(contents)
    writes = graph.accesses.mode == WRITE
    writers = graph.accesses.op[writes]
    computed = ~graph.is_kind(CHILD_KINDS)[writers]
    by_name: dict[str, int] = {}
    for op, buffer in zip(writers[computed].tolist(), graph.accesses.buffer[writes][computed].tolist(), strict=True):
        by_name.setdefault(graph.buffers[buffer], op)
    for op, buffer in outcome.unset:
        rank, name = outcome.uses.names[buffer - outcome.uses.first_named]
        is_root = KINDS[graph.kind[op]] is not OpKind.BROADCAST or graph.peer[op] in (rank, NONE)
        owner = by_name.get(name)
        if is_root and owner is not None and graph.rank[owner] != rank:
            yield about(
                subject,
                NEVER_WROTE,
                f"{_rank(subject, op)}: {graph.ops[op]} puts in buffer `{name}`, which nothing has written on this "
                f"rank; {graph.ops[owner]} writes it on {_rank(subject, owner)}",
                (op, owner),
                f"let {_rank(subject, owner)} be the root, or write the buffer before {graph.ops[op]}",
            )


def _check_unused(subject: Subject) -> Iterator[Finding]:
    ops = subject.graph.ops
    for update, step in subject.once(contents).unused:
        fact = f"{_rank(subject, step)}: {ops[step]} reads no buffer that {ops[update]} has changed"
        yield about(subject, UNUSED, fact, (step, update), f"let {ops[step]} read what {ops[update]} writes")


def _rank(subject: Subject, op: int) -> str:
    return subject.coords_text(int(subject.graph.rank[op]))


def _buffer(outcome: Contents, buffer: int) -> str:
    return f"buffer `{outcome.uses.names[buffer - outcome.uses.first_named][1]}`"


RULES = (
    Rule(OVERWRITTEN, _check_overwritten),
    Rule(OTHER_CONTENT, _check_content),
    Rule(INCOMPLETE, partial(_check_sums, doc=INCOMPLETE)),
    Rule(NEVER_WROTE, _check_never_wrote),
    Rule(UNUSED, _check_unused),
    Rule(REPEATED, partial(_check_sums, doc=REPEATED)),
)
