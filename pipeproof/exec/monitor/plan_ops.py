"""The operation of a plan that each message and collective of a watched job is.

The n-th message that a rank sends to another one is the n-th such message of
its program, and the next step begins after the last one; the same for receives
of a rank, and for the collectives of a group. That holds for a job that issues
what the plan has, and only that. So everything that the ring has of a sequence
is compared with the plan first, and where it differs the reason is reported in
place of a name. Marked messages need no counting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from pipeproof.comm.lower import lower_loaded
from pipeproof.exec.monitor.job import JobNow, RankNow
from pipeproof.exec.monitor.ring import Ring, RingOp
from pipeproof.schedule.columns import NONE
from pipeproof.schedule.op_table import OpGraph
from pipeproof.schedule.ops import COMPUTE_KINDS, META_KINDS, SEND_KINDS, TRANSFER_KINDS
from pipeproof.specs.load_plan import LoadedPlan

_SequenceKey = tuple[str, int | frozenset[int]]
"""``send`` or ``recv`` with the other rank; ``collective`` with the ranks of the group."""
_MOST_NAMED: Final = 4


@dataclass(frozen=True, slots=True)
class PlannedOp:
    """A message or a collective of a plan; ``name`` is that of rings; ``direction`` is F, B or empty."""

    op_id: int
    text: str
    name: str
    stage: int
    micro_batch: int
    direction: str
    num_elements: int
    dtype: str
    is_meta: bool

    @property
    def meaning(self) -> str:
        """``0SEND_F3 of the plan: activation of micro-batch 3, stage 0``."""
        parts = {"F": "activation of ", "B": "gradient of "}.get(self.direction, "")
        micro_batch = f"{parts}micro-batch {self.micro_batch}, " if self.micro_batch != NONE else ""
        return f"{self.text} of the plan: {micro_batch}stage {self.stage}"


@dataclass(frozen=True, slots=True)
class PlanName:
    """Name of a recorded operation by the plan; without a ``planned`` operation ``reason`` is why there is none."""

    planned: PlannedOp | None
    step: int | None = None
    reason: str = ""

    @property
    def text(self) -> str:
        """The operation of the plan, its micro-batch, stage and step, counted from 0; or why it is not certain."""
        if self.planned is None:
            return f"no certain operation of the plan: {self.reason}"
        step = "" if self.step is None else f", step {self.step}"
        return f"{self.planned.meaning}{step}{', ' if self.reason else ''}{self.reason}"


class PlanOps:
    """Names operations of a job by its plan.

    Raises:
        PlanFileError: the plan cannot be lowered.
    """

    def __init__(self, plan: LoadedPlan) -> None:
        lowered = lower_loaded(plan)
        self._graph = lowered.unfolded().graph if lowered.folded else lowered.graph
        self._sequences = [_sequences(self._graph, rank) for rank in range(self._graph.num_ranks)]

    def name(self, ring: Ring, op: RingOp) -> PlanName:
        """Return the operation of the plan that an operation of a ring is, or why that is not certain."""
        if ring.header.num_ranks != self._graph.num_ranks:
            ranks = f"the plan has {self._graph.num_ranks} ranks, the job {ring.header.num_ranks}"
            return PlanName(None, reason=ranks)
        key = _key(op)
        if key is None:
            return PlanName(None, reason="a receive from any rank")
        planned = self._sequences[ring.header.rank].get(key, [])
        if not planned:
            return PlanName(None, reason=f"the plan has no {_key_text(ring, key)}")
        if op.kind and op.stage is not None and op.micro_batch is not None:
            return _by_mark(ring, op, planned)
        return _by_position(ring, op, key, planned)

    def notes(self, job: JobNow, causes: Sequence[int]) -> Iterator[str]:
        """Return where the ranks of a cause that are in no communication are in the plan."""
        for rank in causes:
            now = job.by_rank.get(rank)
            if now is not None and now.last is not None and not now.blocking:
                yield f"rank {rank}: {self._position(now)}"

    def _position(self, now: RankNow) -> str:
        """Return the computations between the last operation of a rank and the next one by the plan."""
        assert now.last is not None
        name = self.name(now.ring, now.last)
        if name.planned is None:
            return f"its last operation is {name.text}"
        computations, following = [], ""
        ops = self._graph.rank_ops(now.rank)
        for op_id in range(name.planned.op_id + 1, ops.stop):
            op = self._graph.ops[op_id]
            if op.kind in TRANSFER_KINDS or int(self._graph.group[op_id]) != NONE:
                following = f", before {op}"
                break
            if op.kind in COMPUTE_KINDS:
                computations.append(str(op))
        shown = ", ".join(computations[:_MOST_NAMED]) + (", .." if len(computations) > _MOST_NAMED else "")
        step = "" if name.step is None else f" in step {name.step}"
        where = f"in {shown}" if computations else "outside of its computations"
        return f"after {name.planned.text}{step}{following} it is {where}"


def _sequences(graph: OpGraph, rank: int) -> dict[_SequenceKey, list[PlannedOp]]:
    """Return the messages and collectives of a rank in program order, by what a ring knows of them."""
    sequences: dict[_SequenceKey, list[PlannedOp]] = {}
    for op_id in graph.rank_ops(rank):
        op, group = graph.ops[op_id], int(graph.group[op_id])
        key: _SequenceKey
        if op.kind in TRANSFER_KINDS:
            name = "send" if op.kind in SEND_KINDS else "recv"
            key, direction = (name, int(graph.peer[op_id])), "F" if op.is_forward else "B"
        elif group != NONE:
            name, direction = op.kind.value.lower(), ""
            key = "collective", frozenset(graph.groups[group].ranks)
        else:
            continue
        tensor = int(graph.tensor[op_id])
        micro_batch = op.micro_batch
        sequences.setdefault(key, []).append(
            PlannedOp(
                op_id, str(op), name, op.stage, NONE if micro_batch is None else micro_batch, direction,
                int(graph.stop[op_id] - graph.start[op_id]), "" if tensor == NONE else graph.tensors[tensor].dtype,
                op.kind in META_KINDS,
            )
        )  # fmt: skip
    return sequences


def _key(op: RingOp) -> _SequenceKey | None:
    if not op.is_message:
        return "collective", frozenset(op.group.ranks)
    return None if op.peer is None else (op.op, op.peer)


def _key_text(ring: Ring, key: _SequenceKey) -> str:
    name, other = key
    if isinstance(other, int):
        return f"{name} of rank {ring.header.rank} with rank {other}"
    return f"collective of ranks {', '.join(map(str, sorted(other)))}"


def _by_mark(ring: Ring, op: RingOp, planned: Sequence[PlannedOp]) -> PlanName:
    mark = op.kind, op.stage, op.micro_batch
    match = next((each for each in planned if (each.direction, each.stage, each.micro_batch) == mark), None)
    if match is None:
        marked = f"{op.kind}, stage {op.stage}, micro-batch {op.micro_batch}"
        return PlanName(None, reason=f"the plan has no {op.op} that is marked {marked}")
    same = [each for each in ring.ops if (each.op, each.peer) == (op.op, op.peer)]
    before = sum((each.kind, each.stage, each.micro_batch) == mark for each in same if each.seq < op.seq)
    return PlanName(match, before if ring.is_whole else None, _difference(op, match))


def _by_position(ring: Ring, op: RingOp, key: _SequenceKey, planned: Sequence[PlannedOp]) -> PlanName:
    sequence = [each for each in ring.ops if _key(each) == key and each.seq <= op.seq]
    first = 0
    if not ring.is_whole:
        if len({(each.group.name, each.tag if each.is_message else 0) for each in sequence}) > 1:
            return PlanName(None, reason="its channel has several groups or tags, and the ring is too short to count")
        first = sequence[0].number
    if any(each.is_meta for each in planned):
        return PlanName(None, reason="the plan exchanges shapes on this channel, in messages that it does not count")
    if op.op == "recv" and len({each.direction for each in planned}) > 1:
        return PlanName(None, reason="both directions come from this rank, and receives may be posted in another order")
    for index, each in enumerate(sequence[:-1], start=first):
        expected = planned[index % len(planned)]
        difference = _difference(each, expected)
        if difference:
            return PlanName(None, reason=f"{each.op} #{index} before it is {expected.text} {difference}")
    step, position = divmod(first + len(sequence) - 1, len(planned))
    return PlanName(planned[position], step, _difference(op, planned[position]))


def _difference(op: RingOp, planned: PlannedOp) -> str:
    """Return the first property in which a recorded operation differs from the plan's; empty without any."""
    if op.op != planned.name:
        return f"in the plan, and the job issued {op.op}"
    num_elements = op.num_inputs if op.op == "send" else op.num_outputs
    if not op.is_message:
        return ""
    if num_elements != planned.num_elements:
        return f"with {planned.num_elements} elements in the plan, and the job has {num_elements}"
    if op.dtype and planned.dtype and op.dtype != planned.dtype:
        return f"of type {planned.dtype} in the plan, and the job has {op.dtype}"
    return ""
