"""The rules of the family and their documentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from pipeproof.comm.channel_models import MODELS, ChannelModel, queue_text
from pipeproof.diagnostics.finding import (
    CycleWitness,
    Finding,
    Location,
    OpsWitness,
    ProgramExcerpt,
    RuleDoc,
    Severity,
)
from pipeproof.diagnostics.problems import grouped
from pipeproof.schedule.columns import NONE, IntColumn
from pipeproof.schedule.derive import BoolColumn
from pipeproof.schedule.op_table import OpGraph
from pipeproof.schedule.ops import COLLECTIVE_KINDS, KIND_CODE, SEND_KINDS, OpKind
from pipeproof.verify.deadlock.deadlock_verdict import (
    Fault,
    conditions,
    cycle_of,
    declared_deadlock,
    opened_late,
    promised,
)
from pipeproof.verify.deadlock.wait_columns import early_transfers, rows_of
from pipeproof.verify.fifo_matching import FaultsByChannel, partner_of
from pipeproof.verify.subject import Rule, Subject, missing_op

_NAMED = 6
"""Operations, or ranks, up to which a sentence names all."""

_LEFT_OUT = ".."

_NEIGHBOURS = 1
"""Operations shown before and after each operation of the cycle."""

_SMALL_GAP = 2
"""Gaps of up to this many operations are shown, too."""


def cycle_witness(subject: Subject, ops: Sequence[int]) -> CycleWitness:
    """A cycle with the stretches of its ranks' programs."""
    graph = subject.graph
    by_rank = grouped((int(graph.rank[op_id]), op_id) for op_id in ops)
    number = {op_id: position for position, op_id in enumerate(ops, start=1)}
    return CycleWitness(
        tuple(subject.witness_op(op_id) for op_id in ops),
        tuple(_excerpt(subject, rank, selected, number) for rank, selected in sorted(by_rank.items())),
    )


def _excerpt(subject: Subject, rank: int, selected: Sequence[int], number: dict[int, int]) -> ProgramExcerpt:
    graph = subject.graph
    program = graph.rank_ops(rank)
    shown = {
        near for op_id in selected for near in range(op_id - _NEIGHBOURS, op_id + _NEIGHBOURS + 1) if near in program
    }
    for first, second in pairwise(sorted(shown)):
        if second - first - 1 <= _SMALL_GAP:
            shown.update(range(first, second))
    ops: list[tuple[str, int]] = []
    last = program.start - 1
    for op_id in sorted(shown):
        if op_id > last + 1:
            ops.append((_LEFT_OUT, 0))
        ops.append((str(graph.ops[op_id]), number.get(op_id, 0)))
        last = op_id
    if last + 1 < program.stop:
        ops.append((_LEFT_OUT, 0))
    return ProgramExcerpt(graph.global_rank[rank], tuple(text for text, _ in ops), tuple(mark for _, mark in ops))


def chain_text(subject: Subject, ops: Sequence[int]) -> str:
    """``A (rank 0) waits for B (rank 1) waits for A (rank 0)``, with the middle of a long cycle left out."""
    graph = subject.graph
    names = [f"{graph.ops[i]} (rank {graph.global_rank[int(graph.rank[i])]})" for i in ops]
    if len(names) > _NAMED:
        names = [*names[: _NAMED // 2], f"... {len(names) - _NAMED + 1} more ...", *names[1 - _NAMED // 2 :]]
    return " waits for ".join([*names, names[0]])


def ranks_text(subject: Subject, ops: Sequence[int]) -> str:
    """``ranks 0, 1``, or how many they are."""
    graph = subject.graph
    ranks = sorted({graph.global_rank[int(graph.rank[i])] for i in ops})
    if len(ranks) > _NAMED:
        return f"{len(ranks)} ranks"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


NEVER = RuleDoc(
    code="PP402",
    title="a rank waits for an operation that never completes",
    explanation=(
        "The awaited operation has no counterpart, is posted only later in the program, or was already waited "
        "for; or a member of the group never issues the collective."
    ),
    wrong=("rank 0: 0F0 0SEND_F0{peer=1} WAIT(0SEND_F0)\nrank 1: WAIT(1RECV_F0) 1RECV_F0{peer=0} 1F0"),
    right=("rank 0: 0F0 0SEND_F0{peer=1} WAIT(0SEND_F0)\nrank 1: 1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0"),
)


def check_never(subject: Subject) -> Iterator[Finding]:
    """Waits that never end, in program order, then collectives that a member never joins."""
    graph = subject.graph
    waits = np.flatnonzero(graph.kind == KIND_CODE[OpKind.WAIT])
    target = graph.waits_for[waits]
    for wait in waits[(target == NONE) | _never_done(graph, promised(subject))[target]].tolist():
        yield _endless(subject, wait)
    yield from _not_joined(subject)


def _never_done(graph: OpGraph, model: ChannelModel) -> BoolColumn:
    """By operation, with an additional entry for NONE: transfers that lack a necessary counterpart."""
    alone = (graph.channel != NONE) & (graph.match == NONE)
    is_send = graph.is_kind(SEND_KINDS)
    if model.completes == "eager":
        alone &= ~is_send
    elif model.completes == "slots":
        receives = graph.channel[(graph.channel != NONE) & ~is_send]
        num_receives = np.bincount(receives, minlength=len(graph.channels) + 1)
        alone &= ~is_send | (graph.position - model.slots >= num_receives[graph.channel])
    return np.append(alone, False)


def _endless(subject: Subject, wait: int) -> Finding:
    graph = subject.graph
    op, target, rank = graph.ops[wait], int(graph.waits_for[wait]), graph.global_rank[int(graph.rank[wait])]
    assert op.target is not None
    if target == NONE:
        return NEVER.finding(
            f"rank {rank} runs {op}, but no {op.target} is under way there",
            help=f"post {op.target} before the wait, and wait for it once",
            witness=subject.witness(wait),
        )
    peer, partner = graph.global_rank[int(graph.peer[target])], partner_of(op.target)
    counterpart = subject.once(FaultsByChannel)[int(graph.channel[target])].counterpart.get(target)
    if counterpart is not None and graph.match[counterpart] != NONE:
        taker = int(graph.match[counterpart])
        return NEVER.finding(
            f"rank {rank} waits for {op.target}, but its counterpart {partner} on rank {peer} meets {graph.ops[taker]}",
            help="make the sends and receives of the channel agree, from its first fault on",
            witness=subject.witness(wait, counterpart, taker),
        )
    return NEVER.finding(
        f"rank {rank} waits for {op.target}, but rank {peer} never issues its counterpart {partner}",
        help=f"add {partner} to rank {peer}",
        witness=OpsWitness((subject.witness_op(wait), missing_op(peer, partner))),
    )


def _not_joined(subject: Subject) -> Iterator[Finding]:
    graph = subject.graph
    calls = np.flatnonzero(graph.is_kind(COLLECTIVE_KINDS) & (graph.group != NONE))
    counts: IntColumn = np.zeros((len(graph.groups), graph.num_ranks), dtype=np.int64)
    np.add.at(counts, (graph.group[calls], graph.rank[calls]), 1)
    for index in np.flatnonzero(counts.any(axis=1)).tolist():
        group, by_rank = graph.groups[index], counts[index]
        most = int(by_rank.argmax())
        for rank in group.ranks:
            if by_rank[rank] == by_rank[most]:
                continue
            theirs = calls[(graph.group[calls] == index) & (graph.rank[calls] == most)]
            waited, number = int(theirs[by_rank[rank]]), int(by_rank[rank])
            op = graph.ops[waited]
            members = [graph.global_rank[member] for member in group.ranks]
            lacking = graph.global_rank[rank]
            yield NEVER.finding(
                f"rank {graph.global_rank[most]} issues {op} on {group.axis} group {members}, but "
                f"rank {lacking} issues only {number} collectives there and never joins it",
                help=f"add {op} to rank {lacking}",
                witness=OpsWitness((subject.witness_op(waited), missing_op(lacking, op))),
            )


def _crossing(order: str) -> str:
    """The sender waits for the second activation, which is received before or after a wait for a gradient."""
    return (
        "rank 0: 0F0 0SEND_F0{peer=1} 0F1 0SEND_F1{peer=1} WAIT(0SEND_F1) 0RECV_B0{peer=1} WAIT(0RECV_B0) 0B0 "
        "WAIT(0SEND_F0) 0RECV_B1{peer=1} WAIT(0RECV_B1) 0B1\n"
        f"rank 1: 1RECV_F0{{peer=0}} WAIT(1RECV_F0) 1F0 1B0 1SEND_B0{{peer=0}} {order} "
        "WAIT(1RECV_F1) 1F1 1B1 1SEND_B1{peer=0} WAIT(1SEND_B1)"
    )


CYCLE = RuleDoc(
    code="PP401",
    title="operations wait for each other in a cycle",
    explanation=(
        "Under the declared backend's promises and no buffering beyond them, a set of ranks waits in a cycle: "
        "the job hangs. Schedules that work because small messages are buffered hang when the messages grow, so "
        "buffering is not counted on. The witness is a shortest such cycle: each operation waits for the next, "
        "the last for the first. A change that is suggested was made on the graph and proved to end the deadlock."
    ),
    wrong=_crossing("WAIT(1SEND_B0) 1RECV_F1{peer=0}"),
    right=_crossing("1RECV_F1{peer=0} WAIT(1SEND_B0)"),
)

CONDITIONAL = RuleDoc(
    code="PP411",
    title="the order of transfers is safe on the declared backend, but not on every one",
    severity="note",
    explanation=(
        "Backends differ in which transfers of a rank wait for each other, and in when a send is done. Under the "
        "declared backend the plan cannot deadlock, and nothing has to change while that backend is used. Under the "
        "named models it does: two ranks each have a transfer in their FIFO before the one that the other waits for. "
        "1F1B is such a schedule, since a forward send and a backward receive cross; frameworks issue them as one "
        "batch. `transport: {recv_order: send_order}` puts all transfers into one order, which is safe under every "
        "model. A schedule with transfers of its own issues crossing transfers as one batch instead. A plan that names "
        "its framework (`run.backend`), or the FIFO of another runtime that is to execute it (`transport.queue`), is "
        "for that runtime, which posts the transfers as the plan does: there is no note. There is also no note if a "
        "rank waits forever on every backend (PP402). The witness, with `--all`, is a shortest cycle under the first "
        "model named."
    ),
    wrong="schedule: {kind: 1f1b}",
    right="schedule: {kind: 1f1b}\ntransport: {recv_order: send_order}",
)

_GROUPS = "group tp: 0 1\ngroup cp: 0 1\n"
_TP, _CP = "0BARRIER:tp{group=0 queue=a}", "0BARRIER:cp{group=1 queue=b}"

DEVICE = RuleDoc(
    code="PP412",
    title="communication of several communicators is issued in orders that block one another",
    explanation=(
        "On a GPU, a communication kernel occupies the device until its peers arrive. Kernels of other communicators "
        "and streams have no guarantee of running at the same time, so ranks that issue communication in different "
        "orders can hang although each communicator alone is in order. An error if the backend's table states that a "
        "device executes its communication in issue order, else a warning. Issue it in one order on all ranks, "
        "or make one stream wait for the other."
    ),
    wrong=f"{_GROUPS}rank 0: {_TP} {_CP}\nrank 1: {_CP} {_TP}",
    right=f"{_GROUPS}rank 0: {_TP} {_CP}\nrank 1: {_TP} {_CP}",
)

FIRST_USE = RuleDoc(
    code="PP413",
    title="connections that open at first use make ranks wait for each other in a cycle",
    explanation=(
        "If connections are opened at first use, the first transfer of a channel, or the first collective of a "
        "group, blocks the hosts of its members until all arrive, even if the call itself does not block. A receive "
        "that is posted early then keeps its rank from sending what the peer needs first. An error if the plan "
        "has `transport: {connections: lazy}`; a warning for a program alone, which cannot declare it, and for "
        "`connections: per_pair`, where a communicator is made for each pair of ranks and hangs were seen. Open every "
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
    where = "where a device executes its communication in the order of issue"
    yield from _declared(subject, "device", DEVICE, f"{where}, as {subject.backend.name} does")
    failing = conditions(subject)
    if failing and all(model.queue == "device" for model in failing):
        ops = cycle_of(subject.graph, failing[0])
        fix = f"no change is needed for {subject.backend.name}; on GPUs, issue them in one order on all ranks"
        finding = _deadlock(subject, DEVICE, ops, where, fix, subject.locate("schedule"))
        yield replace(finding, severity=Severity.WARNING)


def _check_first_use(subject: Subject) -> Iterator[Finding]:
    where = "where connections are opened at first use"
    yield from _declared(subject, "connections", FIRST_USE, where)
    yield from _check_pairs(subject)
    model = opened_late(subject)
    if model is not None:
        fix = "open every connection before the first step"
        finding = _deadlock(subject, FIRST_USE, cycle_of(subject.graph, model), where, fix)
        yield replace(finding, severity=Severity.WARNING)


def _check_pairs(subject: Subject) -> Iterator[Finding]:
    """Warn about communicators for pairs of ranks, made while transfers are under way: no order shows the hang."""
    if subject.lowered is None or subject.lowered.spec.transport.connections != "per_pair":
        return
    pp = subject.lowered.spec.topology.pp
    if pp > _ONE_PAIR:
        finding = FIRST_USE.finding(
            f"unbatched transfers make a communicator of 2 ranks at the first use of each of {pp} pairs of "
            "pipeline ranks, while others are under way: ranks can enter them in different orders, and hang",
            location=subject.locate("transport"),
            help="batch the transfers of a rank (`--no-overlap-p2p-communication` of Megatron-LM), or open the "
            "connection of each pair before the first step",
        )
        yield replace(finding, severity=Severity.WARNING)


_ONE_PAIR = 2
"""Pipeline ranks whose group is one pair, with a communicator that is made with the group."""


def _declared(subject: Subject, fault: Fault, doc: RuleDoc, where: str) -> Iterator[Finding]:
    """The deadlock under the declared model, if it is due to this promise."""
    deadlock = subject.once(declared_deadlock)
    if deadlock is None or deadlock[1] != fault:
        return
    model, _ = deadlock
    ops = cycle_of(subject.graph, model)
    yield _deadlock(subject, doc, ops, where, _help(subject, model, ops), subject.locate("schedule"))


def _deadlock(
    subject: Subject, doc: RuleDoc, ops: Sequence[int], where: str, fix: str, location: Location | None = None
) -> Finding:
    message = f"{ranks_text(subject, ops)} deadlock {where}: {chain_text(subject, ops)}"
    return doc.finding(message, location=location, help=fix, witness=cycle_witness(subject, ops))


def _help(subject: Subject, model: ChannelModel, ops: Sequence[int]) -> str:
    from pipeproof.verify.deadlock.suggested_fix import LARGEST, suggest_fix  # only for a plan that deadlocks

    for early, ahead in zip(*early_transfers(rows_of(subject.graph)), strict=True):
        if {early, ahead} <= {*ops}:
            one, other = subject.graph.ops[ahead], subject.graph.ops[early]
            return f"close the batch of {one} before {other}, the next message of its channel, or put both into it"
    if subject.graph.num_ops > LARGEST:
        return (
            f"reorder the operations of {ranks_text(subject, ops)}: one of them must first come to the operation that "
            f"the other waits for; changes are tried and proved for up to {LARGEST} operations: check the plan with "
            "fewer micro-batches"
        )
    change = suggest_fix(subject, model)
    if change is None:
        return f"no small change of {ranks_text(subject, ops)} ends it; give these ranks one order of communication"
    return f"{change} (the plan changed so is proved not to deadlock)"


def _check_conditional(subject: Subject) -> Iterator[Finding]:
    failing = conditions(subject)
    if not any(model.queue != "device" for model in failing) or _names_its_runtime(subject):
        return
    if next(check_never(subject), None) is not None:  # it is not safe on the declared backend either
        return
    ops = cycle_of(subject.graph, failing[0])
    yield CONDITIONAL.finding(
        f"safe on {subject.backend.name}, but a deadlock under {len(failing)} of {len(MODELS)} channel models "
        f"({models_text(failing)})",
        location=subject.locate("schedule"),
        help=(
            f"no change is needed for {subject.backend.name}; elsewhere, {_in_one_order(subject)}: "
            "`pipeproof --explain PP411`"
        ),
        witness=cycle_witness(subject, ops),
    )


def _posts_are_ours(subject: Subject) -> bool:
    """Return True if pipeproof places the transfers: not in a graph alone, nor in a schedule with its own transfers."""
    plan = subject.lowered
    return plan is not None and (plan.foreign is None or plan.foreign.computes_only)


def _names_its_runtime(subject: Subject) -> bool:
    """Return True if the plan names a framework or a FIFO, and its transfers are posted as that runtime posts them."""
    if not _posts_are_ours(subject):
        return False
    spec = subject.plan.spec
    return "backend" in spec.run.model_fields_set or spec.transport.queue is not None


def _in_one_order(subject: Subject) -> str:
    """Change that makes a conditional plan safe under every model."""
    if _posts_are_ours(subject) and subject.plan.spec.transport.recv_order != "send_order":
        return "set `transport.recv_order` to send_order"
    return "issue transfers that cross as one batch"


def models_text(models: Sequence[ChannelModel]) -> str:
    """Text of models, those with the same completions together: ``one FIFO per rank or pair at rendezvous``."""
    completions = grouped((queue_text(model.queue), model.completion_text) for model in models)
    queues = grouped((tuple(texts), queue) for queue, texts in completions.items())
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
