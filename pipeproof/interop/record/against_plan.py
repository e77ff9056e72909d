"""What ranks really sent and received, held against a plan: the first difference of each sequence of messages.

What a rank sends, to whomever, follows its computations, so that all its sends
are one sequence. Receives are posted early or late, as a framework likes: there
each rank that they come from is a sequence, and each direction where it is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeproof.comm.loaded import lower_loaded
from pipeproof.interop.record.codes import OTHER_ORDER
from pipeproof.interop.record.log import LoggedCall, Mark, RankLog
from pipeproof.interop.record.words import call_text, place_text
from pipeproof.schedule.ops import META_KINDS, SEND_KINDS, TRANSFER_KINDS
from pipeproof.schedule.optable import OpGraph
from pipeproof.specs.finding import Finding, Location, OpsWitness, Severity, WitnessOp
from pipeproof.specs.load import LoadedPlan


@dataclass(frozen=True, slots=True)
class _Planned:
    text: str
    peer: int
    mark: Mark
    numel: int
    dtype: str


_Sequence = tuple[str, int, str]
"""``sends``; or ``receives``, the other rank, and the direction where the log knows it."""


def plan_findings(logs: Sequence[RankLog], plan: LoadedPlan) -> Iterator[Finding]:
    """PP943 for each sequence of messages that is not the plan's, at the first that differs.

    A log may be of several steps: then the plan's messages come again. Where
    some messages of a rank are known to be of the pipeline, the others are a
    framework's own (exchanges of shapes) and are left out.

    Raises:
        PlanFileError: the plan cannot be lowered.
    """
    lowered = lower_loaded(plan)
    graph = lowered.unfolded().graph if lowered.folded else lowered.graph
    first = Location(logs[0].file, 1, 1)
    if graph.num_ranks != logs[0].num_ranks:
        message = f"the plan has {graph.num_ranks} ranks, the recorded job {logs[0].num_ranks}"
        yield Finding(OTHER_ORDER.code, Severity.ERROR, message, first)
        return
    for log in logs:
        by_direction = _is_marked(log)
        planned, really = _planned(graph, log.rank, by_direction), _real(log, by_direction)
        for which in sorted(planned.keys() | really.keys()):
            yield from _compare(log, which, planned.get(which, []), really.get(which, []))


def _is_marked(log: RankLog) -> bool:
    return any(call.is_message and call.mark is not None for call in log.calls)


def _planned(graph: OpGraph, rank: int, by_direction: bool) -> dict[_Sequence, list[_Planned]]:
    found: dict[_Sequence, list[_Planned]] = {}
    for op_id in graph.rank_ops(rank):
        op, peer = graph.ops[op_id], int(graph.peer[op_id])
        if op.kind not in TRANSFER_KINDS or op.kind in META_KINDS:
            continue
        direction = "F" if op.is_forward else "B"
        tensor = graph.tensors[int(graph.tensor[op_id])]
        which = ("sends", -1, "") if op.kind in SEND_KINDS else ("receives", peer, direction if by_direction else "")
        mark = Mark(direction, op.stage, op.micro_batch)
        numel = int(graph.stop[op_id] - graph.start[op_id])
        found.setdefault(which, []).append(_Planned(str(op), peer, mark, numel, tensor.dtype))
    return found


def _real(log: RankLog, by_direction: bool) -> dict[_Sequence, list[LoggedCall]]:
    found: dict[_Sequence, list[LoggedCall]] = {}
    for call in log.calls:
        if call.is_message and call.peer is not None and (call.mark is not None or not by_direction):
            direction = call.mark.kind or "" if call.mark is not None and by_direction else ""
            which = ("sends", -1, "") if call.op == "send" else ("receives", call.peer, direction)
            found.setdefault(which, []).append(call)
    return found


def _compare(log: RankLog, which: _Sequence, planned: list[_Planned], really: list[LoggedCall]) -> Iterator[Finding]:
    num_steps = max(1, len(really) // len(planned)) if planned else 1
    left = list(really)
    for place, wanted in enumerate(planned * num_steps):
        same = [i for i in range(len(left)) if i == 0 or (left[0].batch is not None and left[i].batch == left[0].batch)]
        found = next((i for i in same if _difference(wanted, left[i]) is None), None)
        if found is None:
            yield _differs(log, which, place, wanted, left[0] if left else None)
            return
        left.pop(found)
    if left:
        yield _differs(log, which, len(planned) * num_steps, None, left[0])


def _differs(log: RankLog, which: _Sequence, place: int, wanted: _Planned | None, call: LoggedCall | None) -> Finding:
    what, peer, direction = which
    sequence = what if what == "sends" else f"{what} {direction and direction + ' '}from rank {peer}"
    why = "another number of messages" if wanted is None or call is None else _difference(wanted, call)
    said = (
        f"{wanted.text} with rank {wanted.peer}, {wanted.numel} elements {wanted.dtype}" if wanted else "nothing more"
    )
    seen = f"{call_text(call)}{place_text(call)}" if call else "nothing more"
    ops = [WitnessOp(log.rank, wanted.text)] if wanted else []
    ops += [WitnessOp(log.rank, call_text(call))] if call else []
    return Finding(
        OTHER_ORDER.code, Severity.ERROR,
        f"rank {log.rank}, {sequence}, place {place}: {why}: the plan says {said}; the log says {seen}",
        call.line if call else Location(log.file, 1, 1), None, OpsWitness(tuple(ops)),
    )  # fmt: skip


def _difference(wanted: _Planned, call: LoggedCall) -> str | None:
    """In what a message differs from the plan's; None if in nothing that the log knows."""
    if call.peer != wanted.peer:
        return "another peer"
    mark, tensor = call.mark or Mark(), call.tensor
    for what, mine, theirs in (
        ("direction", mark.kind, wanted.mark.kind),
        ("stage", mark.stage, wanted.mark.stage),
        ("micro-batch", mark.micro_batch, wanted.mark.micro_batch),
        ("size", tensor and tensor.numel, wanted.numel),
        ("type", tensor and tensor.dtype, wanted.dtype),
    ):
        if mine is not None and mine != theirs:
            return f"another {what}"
    return None
