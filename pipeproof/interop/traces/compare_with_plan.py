"""Comparison of recorded messages with a plan: the first difference of each sequence of messages.

The sends of a rank follow its computations, so all its sends are one sequence.
A framework may post receives early or late: there each source rank is a
sequence of its own, and each direction where the log knows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeproof.comm.lower import lower_loaded
from pipeproof.diagnostics.finding import Finding, Location, OpsWitness, WitnessOp
from pipeproof.diagnostics.problems import grouped
from pipeproof.interop.traces.trace_codes import OTHER_ORDER
from pipeproof.interop.traces.trace_graph import call_text, position_text
from pipeproof.interop.traces.trace_log import LoggedCall, Mark, RankLog
from pipeproof.schedule.op_table import OpGraph
from pipeproof.schedule.ops import META_KINDS, SEND_KINDS, TRANSFER_KINDS
from pipeproof.specs.load_plan import LoadedPlan


@dataclass(frozen=True, slots=True)
class _PlannedMessage:
    text: str
    peer: int
    mark: Mark
    numel: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.text} with rank {self.peer}, {self.numel} elements {self.dtype}"


_Sequence = tuple[str, int, str]
"""``sends``; or ``receives``, the other rank, and the direction where the log knows it."""


def plan_findings(logs: Sequence[RankLog], plan: LoadedPlan) -> Iterator[Finding]:
    """Find PP943: the first message that differs from the plan, for each sequence.

    A log may have several steps: then the plan's messages repeat. If some
    messages of a rank are known to be of the pipeline, the others are a
    framework's shape exchanges and are left out.

    Raises:
        PlanFileError: the plan cannot be lowered.
    """
    lowered = lower_loaded(plan)
    graph = lowered.unfolded().graph if lowered.folded else lowered.graph
    first = Location(logs[0].file)
    if graph.num_ranks != logs[0].num_ranks:
        message = f"the plan has {graph.num_ranks} ranks, the recorded job {logs[0].num_ranks}"
        yield OTHER_ORDER.finding(message, first)
        return
    for log in logs:
        by_direction = any(call.is_message and call.mark is not None for call in log.calls)
        planned, recorded = _planned(graph, log.rank, by_direction), _recorded(log, by_direction)
        for sequence in sorted(planned.keys() | recorded.keys()):
            yield from _compare(log, sequence, planned.get(sequence, []), recorded.get(sequence, []))


def _planned(graph: OpGraph, rank: int, by_direction: bool) -> dict[_Sequence, list[_PlannedMessage]]:
    messages: dict[_Sequence, list[_PlannedMessage]] = {}
    for op_id in graph.rank_ops(rank):
        op, peer = graph.ops[op_id], int(graph.peer[op_id])
        if op.kind not in TRANSFER_KINDS or op.kind in META_KINDS:
            continue
        direction = "F" if op.is_forward else "B"
        tensor = graph.tensors[int(graph.tensor[op_id])]
        sequence = ("sends", -1, "") if op.kind in SEND_KINDS else ("receives", peer, direction if by_direction else "")
        mark = Mark(direction, op.stage, op.micro_batch)
        numel = int(graph.stop[op_id] - graph.start[op_id])
        messages.setdefault(sequence, []).append(_PlannedMessage(str(op), peer, mark, numel, tensor.dtype))
    return messages


def _recorded(log: RankLog, by_direction: bool) -> dict[_Sequence, list[LoggedCall]]:
    def sequence(call: LoggedCall) -> _Sequence:
        direction = call.mark.kind or "" if call.mark is not None and by_direction else ""
        return ("sends", -1, "") if call.op == "send" else ("receives", call.peer or 0, direction)

    messages = (call for call in log.calls if call.is_message and call.peer is not None)
    return grouped((sequence(call), call) for call in messages if call.mark is not None or not by_direction)


def _compare(
    log: RankLog, sequence: _Sequence, planned: list[_PlannedMessage], recorded: list[LoggedCall]
) -> Iterator[Finding]:
    num_steps = max(1, len(recorded) // len(planned)) if planned else 1
    remaining = list(recorded)
    for position, planned_message in enumerate(planned * num_steps):
        batch = [
            i
            for i in range(len(remaining))
            if i == 0 or (remaining[0].batch is not None and remaining[i].batch == remaining[0].batch)
        ]
        match = next((i for i in batch if _difference(planned_message, remaining[i]) is None), None)
        if match is None:
            yield _differs(log, sequence, position, planned_message, remaining[0] if remaining else None)
            return
        remaining.pop(match)
    if remaining:
        yield _differs(log, sequence, len(planned) * num_steps, None, remaining[0])


def _differs(
    log: RankLog, sequence: _Sequence, position: int, planned_message: _PlannedMessage | None, call: LoggedCall | None
) -> Finding:
    kind, peer, direction = sequence
    title = kind if kind == "sends" else f"{kind} {direction and direction + ' '}from rank {peer}"
    why = (
        "another number of messages" if planned_message is None or call is None else _difference(planned_message, call)
    )
    expected = str(planned_message) if planned_message else "nothing more"
    actual = f"{call_text(call)}{position_text(call)}" if call else "nothing more"
    ops = [WitnessOp(log.rank, planned_message.text)] if planned_message else []
    ops += [WitnessOp(log.rank, call_text(call))] if call else []
    return OTHER_ORDER.finding(
        f"rank {log.rank}, {title}, position {position}: {why}: the plan has {expected}; the log has {actual}",
        call.line if call else Location(log.file), None, OpsWitness(tuple(ops)),
    )  # fmt: skip


def _difference(planned_message: _PlannedMessage, call: LoggedCall) -> str | None:
    """Return the first property in which a message differs from the plan's; None if no known property differs."""
    if call.peer != planned_message.peer:
        return "another peer"
    mark, tensor = call.mark or Mark(), call.tensor
    for property_name, logged, expected in (
        ("direction", mark.kind, planned_message.mark.kind),
        ("stage", mark.stage, planned_message.mark.stage),
        ("micro-batch", mark.micro_batch, planned_message.mark.micro_batch),
        ("size", tensor and tensor.numel, planned_message.numel),
        ("type", tensor and tensor.dtype, planned_message.dtype),
    ):
        if logged is not None and logged != expected:
            return f"another {property_name}"
    return None
