"""2xx: what the receiver holds is what its layout says it must hold, for all values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from pipeproof.comm.transport import Transport, effective_transport
from pipeproof.schedule.optable import TensorSpec
from pipeproof.specs.codes import RuleDoc
from pipeproof.specs.finding import ElementRange, Finding, RangesWitness
from pipeproof.specs.layout import PlacementKind
from pipeproof.verify.memory import ITEM_BYTES
from pipeproof.verify.provenance import Delivery, Segment, deliveries
from pipeproof.verify.subject import Rule, Subject, finding

LOSSY = RuleDoc(
    code="PP201",
    title="a transport loses elements of a boundary tensor and delivers others in their place",
    severity="error",
    explanation=(
        "Each element of the tensor that a stage sends has an identity (rank, index). Pushed through the lowered "
        "slices, sends, receives and gathers, the identities that arrive are not those that the receiver's layout "
        "promises. The classic case is Paddle Fleet's `enable_partial_send_recv` (on by default) together with "
        "sequence parallelism: each TP rank sends its 1/n of the flattened tensor and the receivers gather the "
        "slices as if all ranks had held the same tensor, but under sequence parallelism each holds another part "
        "of the sequence. Shapes fit, nothing hangs, the loss looks plausible, and every gradient is wrong."
    ),
    wrong="topology: {pp: 2, tp: 2, sequence_parallel: true}\ntransport: partial",
    right="topology: {pp: 2, tp: 2, sequence_parallel: true}\ntransport: full",
)


@dataclass(frozen=True, slots=True)
class _Loss:
    """The damage at one receiver: ranges of its counterpart's tensor, and what lies there instead."""

    lost: tuple[ElementRange, ...]
    foreign: tuple[ElementRange, ...]


def _check_lossy(subject: Subject) -> Iterator[Finding]:
    graph = subject.graph
    damaged: dict[tuple[int, int, bool], dict[int, list[tuple[int, _Loss]]]] = {}
    for delivery in deliveries(graph):
        loss = _loss(subject, delivery)
        if loss is None:
            continue
        op = graph.ops[delivery.receive]
        source = graph.ops[graph.match_of[delivery.receive]].stage
        by_batch = damaged.setdefault((source, op.stage, op.is_forward), {})
        by_batch.setdefault(op.micro_batch or 0, []).append((delivery.receive, loss))
    for (source, sink, forward), by_batch in sorted(damaged.items(), key=lambda item: not item[0][2]):
        yield _lossy_finding(subject, source, sink, forward, by_batch)


def _loss(subject: Subject, delivery: Delivery) -> _Loss | None:
    """Compare what arrived with what must be there; None when every element is right."""
    graph, receive = subject.graph, delivery.receive
    rank = int(graph.rank[receive])
    tensor = graph.tensors[int(graph.tensor[receive])]
    lost: list[ElementRange] = []
    foreign: list[ElementRange] = []
    position = 0
    for segment in (*delivery.segments, Segment(tensor.numel, tensor.numel, delivery.sender, tensor.numel)):
        if segment.start > position:  # never written
            lost.append(ElementRange(rank, position, segment.start, delivery.sender))
        length = segment.stop - segment.start
        if length and not _is_right(subject, segment, delivery.sender):
            lost.append(ElementRange(rank, segment.start, segment.stop, delivery.sender))
            foreign.append(ElementRange(rank, segment.source_start, segment.source_start + length, segment.source_rank))
        position = max(position, segment.stop)
    return _Loss(_merged(lost), _merged(foreign)) if lost else None


def _is_right(subject: Subject, segment: Segment, counterpart: int) -> bool:
    """Whether the segment's elements equal those at the same positions of the counterpart's tensor."""
    if segment.source_start != segment.start:
        return False
    return segment.source_rank == counterpart or _hold_equal_values(subject, segment.source_rank, counterpart)


def _hold_equal_values(subject: Subject, one: int, other: int) -> bool:
    """Whether two ranks hold the same boundary tensor: TP peers, and the layout says equal."""
    if not subject.plan.boundary.tp.holds_equal_values:
        return False
    ours, theirs = subject.plan.mesh.coords(one), subject.plan.mesh.coords(other)
    return all(ours[axis] == theirs[axis] for axis in ours if axis != "tp")


def _merged(ranges: list[ElementRange]) -> tuple[ElementRange, ...]:
    merged: list[ElementRange] = []
    for item in ranges:
        if merged and (merged[-1].rank, merged[-1].source_rank, merged[-1].stop) == (
            item.rank,
            item.source_rank,
            item.start,
        ):
            merged[-1] = ElementRange(item.rank, merged[-1].start, item.stop, item.source_rank)
        else:
            merged.append(item)
    return tuple(merged)


def _lossy_finding(
    subject: Subject,
    source: int,
    sink: int,
    forward: bool,
    by_batch: dict[int, list[tuple[int, _Loss]]],
) -> Finding:
    graph = subject.graph
    direction = "forward" if forward else "backward"
    first = min(by_batch)
    losses = by_batch[first]
    tensor = graph.tensors[int(graph.tensor[losses[0][0]])]
    which = f"micro-batch {first}" if len(by_batch) == 1 else f"each of {len(by_batch)} micro-batches"
    num_lost = sum(r.stop - r.start for _, loss in losses for r in loss.lost)
    num_all = tensor.numel * len(losses)
    return finding(
        LOSSY,
        f"boundary {source}->{sink}, {direction}: `{getattr(subject.plan.spec.transport, direction)}` delivers "
        f"{num_lost} of {num_all} elements wrongly in {which}",
        location=subject.locate("transport", direction),
        help=_mend(subject, direction, tensor),
        witness=RangesWitness(
            tuple(_covering(subject, tensor, r) for _, loss in losses for r in loss.lost),
            tuple(_covering(subject, tensor, r) for _, loss in losses for r in loss.foreign),
        ),
    )


def _covering(subject: Subject, tensor: TensorSpec, item: ElementRange) -> ElementRange:
    """The range with its first and last element in global coordinates: ``s 8 b 0 h 0 .. s 15 b 1 h 63``."""
    first = _global_index(subject, tensor, item.source_rank, item.start)
    last = _global_index(subject, tensor, item.source_rank, item.stop - 1)
    return replace(item, covers=f"{first} .. {last}")


def _global_index(subject: Subject, tensor: TensorSpec, rank: int, flat: int) -> str:
    index = []
    for dim in range(len(tensor.shape)):
        inner = prod(tensor.shape[dim + 1 :])
        index.append(flat // inner % tensor.shape[dim])
    placement = subject.plan.boundary.tp
    if placement.kind is PlacementKind.SHARDED and placement.dim is not None:
        index[placement.dim] += subject.plan.mesh.coords(rank)["tp"] * tensor.shape[placement.dim]
    return " ".join(f"{d} {i}" for d, i in zip(tensor.dims, index, strict=True))


def _mend(subject: Subject, direction: str, tensor: TensorSpec) -> str | None:
    transport, topology = subject.plan.spec.transport, subject.plan.spec.topology
    if getattr(transport, direction) != Transport.PARTIAL:
        return None
    full = tensor.numel * ITEM_BYTES[tensor.dtype]
    return (
        f"set `transport.{direction}: full`: {full} bytes per rank and micro-batch on the wire, not "
        f"{full // topology.tp}, and no all-gather"
    )


FULL_INSTEAD = RuleDoc(
    code="PP202",
    title="`partial` is declared, but a full send is what happens",
    severity="note",
    explanation=(
        "Paddle Fleet takes `partial` per tensor, and only if the number of local elements divides by the TP "
        "degree; otherwise it sends the full tensor and says nothing. That is correct, but saves no bytes. The "
        "same holds without tensor parallelism."
    ),
    wrong="transport: partial with 15 elements over tp 2",
    right="transport: full",
)


def _check_full_instead(subject: Subject) -> Iterator[Finding]:
    spec = subject.plan.spec
    if spec.topology.pp == 1:
        return
    numel = prod(subject.plan.boundary.local_shape)
    for direction in ("forward", "backward"):
        declared = getattr(spec.transport, direction)
        if declared != Transport.PARTIAL:
            continue
        if effective_transport(declared, numel, spec.topology.tp) is Transport.FULL:
            why = (
                "topology.tp is 1"
                if spec.topology.tp == 1
                else f"the {numel} local elements of a boundary tensor do not divide by topology.tp {spec.topology.tp}"
            )
            yield finding(
                FULL_INSTEAD,
                f"{direction}: `partial` is declared, but {why}, so each rank sends its full tensor, as Fleet does",
                location=subject.locate("transport", direction),
                help=f"say `transport.{direction}: full`, which is what happens",
            )


RULES = (Rule(LOSSY, _check_lossy), Rule(FULL_INSTEAD, _check_full_instead))
