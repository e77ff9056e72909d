"""505, 506: requests that nothing waits for, reads of what is not there."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.rule_doc import RuleDoc
from pipeproof.schedule.ops import SEND_KINDS
from pipeproof.verify.lifetime.race_rules import UseText, about, capped
from pipeproof.verify.lifetime.races import Lifetimes, lifetimes
from pipeproof.verify.subject import Rule, Subject

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
    title="something is read that nothing has written",
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
    places = analysis.unwritten
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


RULES = (
    Rule(NEVER_WAITED, _check_waited),
    Rule(UNWRITTEN, _check_unwritten),
)
