"""PP201 and PP202: the receiver holds the elements that its layout requires, for all values."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeproof.diagnostics.finding import Finding, RangesWitness
from pipeproof.diagnostics.rule_doc import RuleDoc
from pipeproof.schedule.op_table import NONE, IntColumn, TensorSpec
from pipeproof.schedule.ops import FORWARD_KINDS
from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.stages.describe.transports import Transport, effective_transport
from pipeproof.verify.delivered import Layouts, Loss, places_of
from pipeproof.verify.provenance import DATA_SENDS, Events, events
from pipeproof.verify.subject import Rule, Subject

LOSSY = RuleDoc(
    code="PP201",
    title="a transport loses elements of a boundary tensor and delivers others in their place",
    explanation=(
        "Each element of the tensor that a stage sends has an identity (rank, index). Pushed through the lowered "
        "slices, sends, receives and gathers, the identities that arrive are not those that the receiver's layout "
        "promises. The classic case is Paddle Fleet's `enable_partial_send_recv` (on by default) together with "
        "sequence parallelism: each TP rank sends its 1/n of the flattened tensor and the receivers gather the "
        "slices as if all ranks had held the same tensor, but under sequence parallelism each holds another part "
        "of the sequence. Shapes fit, nothing hangs, the loss looks plausible, and every gradient is wrong. The two "
        "sides may declare different layouts, if the messages between them bring every element to its place."
    ),
    wrong="topology: {pp: 2, tp: 2, sequence_parallel: true}\ntransport: partial",
    right="topology: {pp: 2, tp: 2, sequence_parallel: true}\ntransport: full",
)


def _check_lossy(subject: Subject) -> Iterator[Finding]:
    """Look into one event of each kind; only where that one is damaged, into all of the first micro-batch."""
    graph = subject.graph
    places = places_of(subject)
    layouts = Layouts(subject, places)
    found = events(graph, places)
    kinds, first = np.unique(found.classes, return_index=True)
    damaged = [
        kind
        for kind, event in zip(kinds.tolist(), first.tolist(), strict=True)
        if kind != NONE and any(layouts.loss(delivery) for delivery in found.deliveries(event, places))
    ]
    if not damaged:
        return
    bad = np.flatnonzero(np.isin(found.classes, damaged))
    receive = _first_receives(found, bad)
    edge = np.stack(
        [
            ~graph.is_kind(FORWARD_KINDS)[receive],
            graph.stage[graph.match[receive]],
            graph.stage[receive],
        ],
        axis=1,
    )
    for key in np.unique(edge, axis=0).tolist():
        here = (edge == key).all(axis=1)
        batches = np.unique(graph.work_item[receive[here]])
        in_first = here & (graph.work_item[receive] == batches[0])
        all_losses = [
            (int(graph.match[delivery.receive]), loss)
            for event in bad[in_first].tolist()
            for delivery in found.deliveries(event, places)
            if (loss := layouts.loss(delivery)) is not None
        ]
        backward, source, sink = key
        yield _lossy_finding(subject, source, sink, not backward, batches, all_losses)


def _first_receives(found: Events, chosen: IntColumn) -> IntColumn:
    """For each of the chosen events, one of its receives."""
    latest = np.maximum.reduceat(found.receive, found.offsets[:-1])
    return latest[chosen]


def _lossy_finding(
    subject: Subject, source: int, sink: int, forward: bool, batches: IntColumn, losses: list[tuple[int, Loss]]
) -> Finding:
    direction = "forward" if forward else "backward"
    which = f"micro-batch {int(batches[0])}" if len(batches) == 1 else f"each of {len(batches)} micro-batches"
    num_lost = sum(r.stop - r.start for _, loss in losses for r in loss.lost)
    num_all = sum(loss.num_elements for _, loss in losses)
    graph = subject.graph
    send = losses[0][0]
    tensor, expected = (graph.tensors[int(graph.tensor[i])] for i in (send, graph.match[send]))
    member = f" of `{tensor.member}`" if tensor.member else ""
    changes_layout = tensor.placement != expected.placement
    if subject.lowered is None:
        transport = "the messages deliver"
    elif changes_layout:
        transport = f"the messages from {tensor.placement} to {expected.placement} deliver"
    else:
        transport = f"`{getattr(subject.lowered.spec.transport, direction)}` delivers"
    return LOSSY.finding(
        f"boundary {source}->{sink}, {direction}: {transport} {num_lost} of {num_all} elements{member} "
        f"wrongly in {which}",
        location=subject.locate("boundaries") if changes_layout else subject.locate("transport", direction),
        help=None if changes_layout else _suggested_fix(subject, direction, tensor),
        witness=RangesWitness(
            tuple(item for _, loss in losses for item in loss.lost),
            tuple(item for _, loss in losses for item in loss.foreign),
        ),
    )


def _suggested_fix(subject: Subject, direction: str, tensor: TensorSpec) -> str | None:
    if subject.lowered is None or getattr(subject.lowered.spec.transport, direction) != Transport.PARTIAL:
        return None
    full, num_tp = tensor.numel * dtype_bytes(tensor.dtype), subject.lowered.spec.topology.tp
    return (
        f"set `transport.{direction}: full`: {full} bytes per rank and micro-batch on the wire, not "
        f"{full // num_tp}, and no all-gather"
    )


FULL_INSTEAD = RuleDoc(
    code="PP202",
    title="`partial` is declared, but full tensors are sent",
    severity="note",
    explanation=(
        "Paddle Fleet takes `partial` per tensor, and only if the number of local elements divides by the TP "
        "degree; otherwise it sends the full tensor without a message. That is correct, but saves no bytes. The "
        "same holds without tensor parallelism."
    ),
    wrong="topology: {pp: 2, tp: 1}\ntransport: partial",
    right="topology: {pp: 2, tp: 1}\ntransport: full",
)


def _check_full_instead(subject: Subject) -> Iterator[Finding]:
    graph, spec = subject.graph, subject.plan.spec
    if spec.topology.pp == 1:
        return
    num_tp = spec.topology.tp
    for direction, forward in (("forward", True), ("backward", False)):
        declared = getattr(spec.transport, direction)
        if declared != Transport.PARTIAL:
            continue
        rows = graph.is_kind(DATA_SENDS) & (graph.is_kind(FORWARD_KINDS) == forward) & (graph.tensor != NONE)
        tensors = [graph.tensors[t] for t in np.unique(graph.tensor[rows]).tolist()]
        whole = [t for t in tensors if effective_transport(declared, t.numel, num_tp) is Transport.FULL]
        forms = {(t.member, t.numel): t for t in whole}
        for (member, numel), _ in sorted(forms.items()):
            of = f"`{member}`" if member else "a boundary tensor"
            why = (
                "topology.tp is 1"
                if num_tp == 1
                else f"the {numel} local elements of {of} do not divide by topology.tp {num_tp}"
            )
            all_whole = len(whole) == len(tensors)
            yield FULL_INSTEAD.finding(
                f"{direction}: `partial` is declared, but {why}, so each rank sends its full tensor, as Fleet does",
                location=subject.locate("transport", direction),
                help=f"set `transport.{direction}: full`, which is what happens" if all_whole else None,
            )
            if num_tp == 1:
                break


RULES = (Rule(LOSSY, _check_lossy), Rule(FULL_INSTEAD, _check_full_instead, needs_plan=True))
