"""The rules of the family and their documentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipeproof.comm.channel_models import MODELS, ChannelModel, queue_text
from pipeproof.specs.codes import RuleDoc
from pipeproof.specs.finding import Finding, Severity
from pipeproof.verify.deadlock.classify import Fault, cycle_of
from pipeproof.verify.deadlock.mend import LARGEST, mend
from pipeproof.verify.deadlock.never import NEVER, check_never
from pipeproof.verify.deadlock.rows import early_transfers, rows_of
from pipeproof.verify.deadlock.verdict import conditions, declared_deadlock, opened_late, promised
from pipeproof.verify.deadlock.witness import chain_text, cycle_witness, ranks_text
from pipeproof.verify.subject import Rule, Subject, finding

CYCLE = RuleDoc(
    code="PP401",
    title="operations wait for each other in a cycle",
    severity="error",
    explanation=(
        "Under the declared backend's promises and no buffering beyond them, a set of ranks waits in a circle: "
        "the job hangs. Schedules that work because small messages are buffered hang when the messages grow, so "
        "buffering is not counted on. The witness is a shortest such cycle: each operation waits for the next, "
        "the last for the first. A change that is suggested was made on the graph and proved to end the deadlock."
    ),
    wrong=(
        "rank 0: 0F0 0SEND_F0{peer=1} 0F1 0SEND_F1{peer=1} WAIT(0SEND_F1) 0RECV_B0{peer=1} WAIT(0RECV_B0) 0B0 "
        "WAIT(0SEND_F0) 0RECV_B1{peer=1} WAIT(0RECV_B1) 0B1\n"
        "rank 1: 1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0 1B0 1SEND_B0{peer=0} WAIT(1SEND_B0) 1RECV_F1{peer=0} "
        "WAIT(1RECV_F1) 1F1 1B1 1SEND_B1{peer=0} WAIT(1SEND_B1)"
    ),
    right=(
        "rank 0: 0F0 0SEND_F0{peer=1} 0F1 0SEND_F1{peer=1} WAIT(0SEND_F1) 0RECV_B0{peer=1} WAIT(0RECV_B0) 0B0 "
        "WAIT(0SEND_F0) 0RECV_B1{peer=1} WAIT(0RECV_B1) 0B1\n"
        "rank 1: 1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0 1B0 1SEND_B0{peer=0} 1RECV_F1{peer=0} WAIT(1SEND_B0) "
        "WAIT(1RECV_F1) 1F1 1B1 1SEND_B1{peer=0} WAIT(1SEND_B1)"
    ),
)

CONDITIONAL = RuleDoc(
    code="PP411",
    title="the order of transfers is safe on the declared backend, but not on every one",
    severity="warning",
    explanation=(
        "Backends differ in which transfers of a rank wait for each other, and in when a send is done. Under the "
        "declared backend the plan cannot deadlock. Under the named models it does: two ranks each have a transfer "
        "in their FIFO before the one that the other waits for. 1F1B is such a schedule, since a forward send and "
        "a backward receive cross; frameworks issue them as one batch. Nothing has to change while the declared "
        "backend is used. The witness is a shortest cycle under the first model named."
    ),
    wrong="schedule: {kind: 1f1b}",
    right="schedule: {kind: gpipe}",
)

DEVICE = RuleDoc(
    code="PP412",
    title="communication of several communicators is issued in orders that block one another",
    severity="error",
    explanation=(
        "On a GPU, a communication kernel occupies the device until its peers come. Kernels of other communicators "
        "and streams have no guarantee of running beside it, so ranks that issue communication in different orders "
        "can hang although each communicator alone is in order. An error where the backend's table says that a "
        "device carries its communication out in issue order, else a warning. Issue it in one order on all ranks, "
        "or make one stream wait for the other."
    ),
    wrong=(
        "group tp: 0 1\n"
        "group cp: 0 1\n"
        "rank 0: 0BARRIER:tp{group=0 queue=a} 0BARRIER:cp{group=1 queue=b}\n"
        "rank 1: 0BARRIER:cp{group=1 queue=b} 0BARRIER:tp{group=0 queue=a}"
    ),
    right=(
        "group tp: 0 1\n"
        "group cp: 0 1\n"
        "rank 0: 0BARRIER:tp{group=0 queue=a} 0BARRIER:cp{group=1 queue=b}\n"
        "rank 1: 0BARRIER:tp{group=0 queue=a} 0BARRIER:cp{group=1 queue=b}"
    ),
)

FIRST_USE = RuleDoc(
    code="PP413",
    title="connections that open at first use make ranks wait for each other in a cycle",
    severity="error",
    explanation=(
        "Where connections are opened at first use, the first transfer of a channel, or the first collective of a "
        "group, is a meeting that holds the hosts of its members, even if the call itself does not block. A receive "
        "that is posted early then keeps its rank from sending what the peer needs first. An error where the plan "
        "says `transport: {connections: lazy}`; a warning for a program alone, which does not say. Open every "
        "connection before the first step, or post in an order that also works when posting blocks once."
    ),
    wrong=(
        "rank 0: 0RECV_B0{peer=1} 0F0 0SEND_F0{peer=1} WAIT(0SEND_F0) WAIT(0RECV_B0) 0B0\n"
        "rank 1: 1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0 1B0 1SEND_B0{peer=0} WAIT(1SEND_B0)"
    ),
    right=(
        "rank 0: 0F0 0SEND_F0{peer=1} 0RECV_B0{peer=1} WAIT(0SEND_F0) WAIT(0RECV_B0) 0B0\n"
        "rank 1: 1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0 1B0 1SEND_B0{peer=0} WAIT(1SEND_B0)"
    ),
)


def _check_cycle(subject: Subject) -> Iterator[Finding]:
    yield from _declared(subject, "queue", CYCLE, f"under {subject.backend.name} ({promised(subject)})")


def _check_device(subject: Subject) -> Iterator[Finding]:
    where = "where a device carries its communication out in the order of issue"
    yield from _declared(subject, "device", DEVICE, f"{where}, as {subject.backend.name} does")
    failing = conditions(subject)
    if failing and all(model.queue == "device" for model in failing):
        ops = cycle_of(subject.graph, failing[0])
        yield replace(
            finding(
                DEVICE,
                f"{ranks_text(subject, ops)} deadlock {where}: {chain_text(subject, ops)}",
                location=subject.locate("schedule"),
                help=f"no change is needed for {subject.backend.name}; on GPUs, issue them in one order on all ranks",
                witness=cycle_witness(subject, ops),
            ),
            severity=Severity.WARNING,
        )


def _check_first_use(subject: Subject) -> Iterator[Finding]:
    where = "where connections are opened at first use"
    yield from _declared(subject, "connections", FIRST_USE, where)
    model = opened_late(subject)
    if model is not None:
        ops = cycle_of(subject.graph, model)
        yield replace(
            finding(
                FIRST_USE,
                f"{ranks_text(subject, ops)} deadlock {where}: {chain_text(subject, ops)}",
                help="open every connection before the first step",
                witness=cycle_witness(subject, ops),
            ),
            severity=Severity.WARNING,
        )


def _declared(subject: Subject, fault: Fault, doc: RuleDoc, where: str) -> Iterator[Finding]:
    """The deadlock under the declared model, if it is due to this promise."""
    deadlock = subject.once(declared_deadlock)
    if deadlock is None or deadlock.fault != fault:
        return
    ops = cycle_of(subject.graph, deadlock.model)
    yield finding(
        doc,
        f"{ranks_text(subject, ops)} deadlock {where}: {chain_text(subject, ops)}",
        location=subject.locate("schedule"),
        help=_help(subject, deadlock.model, ops),
        witness=cycle_witness(subject, ops),
    )


def _help(subject: Subject, model: ChannelModel, ops: Sequence[int]) -> str:
    for early, ahead in zip(*early_transfers(rows_of(subject.graph)), strict=True):
        if {early, ahead} <= {*ops}:
            one, other = subject.graph.ops[ahead], subject.graph.ops[early]
            return f"close the batch of {one} before {other}, the next message of its channel, or put both into it"
    if subject.graph.num_ops > LARGEST:
        return (
            f"reorder the operations of {ranks_text(subject, ops)} so that one of them comes to what the other waits "
            f"for first; changes are tried and proved for up to {LARGEST} operations: check the plan with fewer "
            "micro-batches"
        )
    change = mend(subject, model)
    if change is None:
        return f"no small change of {ranks_text(subject, ops)} ends it; give these ranks one order of communication"
    return f"{change} (the plan changed so is proved not to deadlock)"


def _check_conditional(subject: Subject) -> Iterator[Finding]:
    failing = conditions(subject)
    if not any(model.queue != "device" for model in failing):
        return
    ops = cycle_of(subject.graph, failing[0])
    yield finding(
        CONDITIONAL,
        f"the plan is safe on {subject.backend.name}, but deadlocks under {len(failing)} of {len(MODELS)} channel "
        f"models: {models_text(failing)}",
        location=subject.locate("schedule"),
        help=(
            f"no change is needed for {subject.backend.name}; elsewhere, {_in_one_order(subject)}. "
            "`transport.queue` says which FIFO counts, if another runtime is to execute the plan"
        ),
        witness=cycle_witness(subject, ops),
    )


def _in_one_order(subject: Subject) -> str:
    """What makes a conditional plan safe under every model."""
    plan = subject.lowered
    is_ours = plan is not None and (plan.foreign is None or plan.foreign.computes_only)  # then we post its receives
    if plan is not None and is_ours and plan.spec.transport.recv_post != "as_sent":
        return "set `transport.recv_post` to as_sent, which puts all transfers into one order"
    return "issue transfers that cross as one batch"


def models_text(models: Sequence[ChannelModel]) -> str:
    """Models in words, those with the same completions together: ``one FIFO per rank or pair at rendezvous``."""
    completions: dict[str, list[str]] = {}
    for model in models:
        completions.setdefault(queue_text(model.queue), []).append(model.completion_text)
    queues: dict[tuple[str, ...], list[str]] = {}
    for queue, texts in completions.items():
        queues.setdefault(tuple(texts), []).append(queue)
    return "; ".join(f"one FIFO per {_or(names)} {_or(texts)}" for texts, names in queues.items())


def _or(words: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


RULES = (
    Rule(CYCLE, _check_cycle),
    Rule(NEVER, check_never),
    Rule(CONDITIONAL, _check_conditional),
    Rule(DEVICE, _check_device),
    Rule(FIRST_USE, _check_first_use),
)
