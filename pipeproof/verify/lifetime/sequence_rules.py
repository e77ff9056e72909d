"""505, 506, 509: requests that nothing waits for, reads of what is not there, reads of what was overwritten."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.rule_doc import RuleDoc
from pipeproof.schedule.op_table import NONE, IntColumn
from pipeproof.schedule.ops import SEND_KINDS
from pipeproof.verify.lifetime.buffer_uses import Uses
from pipeproof.verify.lifetime.race_rules import UseText, about, capped
from pipeproof.verify.lifetime.races import Lifetimes, lifetimes, overwritten, unwritten
from pipeproof.verify.subject import Rule, Subject

NEVER_WAITED = RuleDoc(
    code="PP505",
    title="nothing waits for a transfer",
    severity="error",
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
    title="something is read that nothing has written",
    severity="error",
    explanation=(
        "The operation comes before the write of its buffer: a send before the computation whose result it "
        "sends, a computation before its receive is even posted. It reads the old contents of the memory: zeros in "
        "a test, NaN in a long run. Adding to a gradient buffer that was never set is the same mistake. A buffer that "
        "the program never writes, or that only the optimizer writes, is taken to be there from the start."
    ),
    wrong="rank 0: 0F0 0B0{reads=main_grad writes=main_grad} 0STEP{reads=main_grad}",
    right="rank 0: 0SCALE_GRAD{writes=main_grad} 0F0 0B0{reads=main_grad writes=main_grad} 0STEP{reads=main_grad}",
)

OVERWRITTEN = RuleDoc(
    code="PP509",
    title="a buffer was overwritten before its reader came",
    severity="error",
    explanation=(
        "The buffer held the values that the operation is about, but by then those of another micro-batch (or "
        "stage) were written over them. Every access is in order, so that no race detector sees it; the values are "
        "wrong all the same. The usual cause is a double buffer whose index does not move, or starts anew."
    ),
    wrong=(
        "rank 0: 0F0 0SEND_F0{peer=1} WAIT(0SEND_F0) 0F1 0SEND_F1{peer=1} WAIT(0SEND_F1)\n"
        "rank 1: 1RECV_F0{peer=0 writes=recv[0]} WAIT(1RECV_F0) 1RECV_F1{peer=0 writes=recv[0]} WAIT(1RECV_F1) "
        "1F0{reads=recv[0]} 1F1{reads=recv[0]}"
    ),
    right=(
        "rank 0: 0F0 0SEND_F0{peer=1} WAIT(0SEND_F0) 0F1 0SEND_F1{peer=1} WAIT(0SEND_F1)\n"
        "rank 1: 1RECV_F0{peer=0 writes=recv[0]} WAIT(1RECV_F0) 1RECV_F1{peer=0 writes=recv[1]} WAIT(1RECV_F1) "
        "1F0{reads=recv[0]} 1F1{reads=recv[1]}"
    ),
)


def _check_waited(subject: Subject) -> Iterator[Finding]:
    unwaited = subject.once(lifetimes).unwaited
    yield from capped(subject, NEVER_WAITED, _unwaited(subject, unwaited.tolist()), len(unwaited))


def _unwaited(subject: Subject, ops: list[int]) -> Iterator[Finding]:
    graph = subject.graph
    for op_id in ops:
        op = graph.ops[op_id]
        when = "before its buffer is used again" if op.kind in SEND_KINDS else "before the tensor is used"
        yield about(
            subject,
            NEVER_WAITED,
            f"{subject.coords_text(int(graph.rank[op_id]))} posts {op} and never waits for it",
            (op_id,),
            f"add WAIT({op}) {when}, at the latest at the end of the step",
        )


def _check_unwritten(subject: Subject) -> Iterator[Finding]:
    analysis = subject.once(lifetimes)
    places = unwritten(analysis.in_order, analysis.covered_elsewhere)
    yield from capped(subject, UNWRITTEN, _unwritten(analysis, places.tolist()), len(places))


def _unwritten(analysis: Lifetimes, places: list[int]) -> Iterator[Finding]:
    uses = analysis.in_order
    texts = UseText(analysis, uses)
    for place in places:
        same = np.flatnonzero(uses.buffer == uses.buffer[place])
        writers = same[uses.changes[same]].tolist()
        later = next((p for p in writers if p != place), None)
        if later is None:
            fact = f"adds to {texts.buffer(place, place)}, which nothing sets before"
            fix = f"write {texts.buffer(place, place)} (zeros, for a sum) before {texts.text(place)}"
        else:
            fact = f"reads {texts.buffer(place, later)}, but {texts.text(later)} writes it only later"
            fix = f"move {texts.text(place)} behind {texts.text(later)}"
        ops = [texts.op(p) for p in (place, later) if p is not None]
        yield about(analysis.subject, UNWRITTEN, f"{texts.rank(place)}: {texts.text(place)} {fact}", ops, fix)


def _check_overwritten(subject: Subject) -> Iterator[Finding]:
    analysis = subject.once(lifetimes)
    uses = analysis.in_order
    owner = _owner(analysis, uses)
    places = overwritten(uses, owner)
    yield from capped(subject, OVERWRITTEN, _overwritten(analysis, owner, places.tolist()), len(places))


def _owner(analysis: Lifetimes, uses: Uses) -> IntColumn:
    """For each use of a named buffer its (stage, micro-batch) as one number; NONE for any other."""
    graph = analysis.subject.graph
    micro_batch = graph.work_item[uses.op]
    number = graph.stage[uses.op] * (int(graph.work_item.max(initial=0)) + 1) + micro_batch
    return np.where((micro_batch != NONE) & (uses.buffer >= uses.first_named), number, NONE)


def _overwritten(analysis: Lifetimes, owner: IntColumn, places: list[int]) -> Iterator[Finding]:
    uses = analysis.in_order
    texts = UseText(analysis, uses)
    _, last = uses.last_change
    for place in places:
        writer = int(last[place])
        selected = np.flatnonzero((uses.buffer == uses.buffer[place]) & (owner == owner[place]) & uses.changes)
        own = int(selected[selected < place][-1])
        yield about(
            analysis.subject,
            OVERWRITTEN,
            f"{texts.rank(place)}: {texts.text(place)} reads {texts.buffer(place, writer)}, where {texts.text(writer)} "
            f"has overwritten what {texts.text(own)} put there",
            map(texts.op, (own, writer, place)),
            f"let {texts.text(writer)} write to another buffer" + _pool_size(analysis, owner, place),
        )


def _pool_size(analysis: Lifetimes, owner: IntColumn, place: int) -> str:
    """For a buffer ``pool[i]``: how many buffers the pool needs for the owners that are alive together."""
    uses = analysis.in_order
    named = uses.name_of(int(uses.buffer[place]))
    assert named is not None
    rank, name = named
    pool, bracket, _ = name.partition("[")
    if not bracket:
        return ""
    members = [uses.first_named + i for i, (r, n) in enumerate(uses.names) if r == rank and n.startswith(f"{pool}[")]
    selected = np.flatnonzero(np.isin(uses.buffer, members) & (owner != NONE))
    ends: dict[int, tuple[int, int]] = {}
    for op, whose in sorted(zip(uses.op[selected].tolist(), owner[selected].tolist(), strict=True)):
        ends[whose] = (ends.get(whose, (op, op))[0], op)
    most = max(sum(a <= start <= b for a, b in ends.values()) for start, _ in ends.values())
    return f"; `{pool}[..]` needs {most} buffers here" if most > 1 else ""


RULES = (
    Rule(NEVER_WAITED, _check_waited),
    Rule(UNWRITTEN, _check_unwritten),
    Rule(OVERWRITTEN, _check_overwritten),
)
