"""What one rank really did, and whether that is what the graph says.

The adapter writes an entry at the place where it acts, with what it saw there
(the tensor's element count and dtype, the communicator's ranks), not with what
it was told. Comparing the log with the graph is therefore a real comparison.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeproof.exec.codes import LOG_DIFFERS
from pipeproof.schedule.ops import TRANSFER_KINDS, OpKind
from pipeproof.schedule.optable import NONE, OpGraph
from pipeproof.specs.finding import Finding, OpsWitness, Severity, WitnessOp
from pipeproof.stages.describe.layers import COUNTS_DTYPE

HOST_QUEUE = "compute"


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One operation as it was carried out.

    ``queue`` is ``compute`` or the channel's text; ``ranks`` the members of the
    communicator used (empty for compute); ``numel`` and ``dtype`` those of the
    tensor handed to it (0 and "" for compute). Times are the machine's
    monotonic clock in nanoseconds; a transfer was posted at ``posted_ns`` and
    starts when its channel comes to it. Of an all-to-all, ``traffic`` has for
    each member the rows that went there and that came from there; of one that
    moves counts, the rows that these announce. Of a whole backward, the input's
    gradient was there at ``split_ns``, and the weights' came after it.
    """

    step: int
    queue: str
    op: str
    start_ns: int
    end_ns: int
    ranks: tuple[int, ...] = ()
    numel: int = 0
    dtype: str = ""
    posted_ns: int = 0
    traffic: Traffic = ()
    split_ns: int = 0

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; ``from_json`` reads it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LogEntry:
        """Read what ``to_json`` wrote."""
        traffic = tuple((sent, received) for sent, received in data["traffic"])
        return cls(**{**data, "ranks": tuple(data["ranks"]), "traffic": traffic})


Traffic = tuple[tuple[int, int], ...]
"""By member of a group: rows sent there, and rows received from there."""

_Fact = tuple[str, tuple[int, ...], int, str]
"""(operation, communicator's ranks, elements, dtype): what is compared. Of an all-to-all of rows the elements are
left out, as 0: the graph has an estimate there, and ``compare_exchanges`` holds them against the counts."""


def expected_facts(graph: OpGraph, rank: int, dtype: str, weight_dtype: str | None = None) -> dict[str, list[_Fact]]:
    """What one step of ``rank`` must log, by queue; collectives carry the run's ``dtype``, or one of their own.

    Those of gradients and weights carry ``weight_dtype``, where it is given.
    """
    facts: dict[str, list[_Fact]] = {HOST_QUEUE: []}
    for op_id in graph.rank_ops(rank):
        op, numel = graph.ops[op_id], int(graph.stop[op_id] - graph.start[op_id])
        if op.kind in TRANSFER_KINDS:
            channel = graph.channels[int(graph.channel[op_id])]
            tensor = graph.tensors[int(graph.tensor[op_id])]
            facts.setdefault(str(channel), []).append((str(op), (channel.src, channel.dst), numel, tensor.dtype))
        elif graph.group[op_id] != NONE:
            ranks = graph.groups[int(graph.group[op_id])].ranks
            own = collective_dtype(graph, op_id, dtype, weight_dtype)
            facts[HOST_QUEUE].append((str(op), ranks, 0 if is_of_rows(op.kind, own) else numel, own))
        else:
            facts[HOST_QUEUE].append((str(op), (), 0, ""))
    return facts


def collective_dtype(graph: OpGraph, op_id: int, dtype: str, weight_dtype: str | None = None) -> str:
    """What a collective moves: its own type, ``weight_dtype`` for gradients and weights, else the run's ``dtype``."""
    if graph.tensor[op_id] != NONE:
        return graph.tensors[int(graph.tensor[op_id])].dtype
    return weight_dtype if weight_dtype and _is_of_weights(graph, op_id) else dtype


def _is_of_weights(graph: OpGraph, op_id: int) -> bool:
    """Whether a collective is below the sum of gradients or the gather of weights, or alone and so the norm's."""
    parent = int(graph.parent[op_id])
    if parent == NONE:
        return graph.ops[op_id].kind is OpKind.ALL_REDUCE
    return graph.ops[parent].kind in (OpKind.REDUCE_GRAD, OpKind.GATHER_WEIGHT)


def compare_log(
    graph: OpGraph,
    rank: int,
    entries: Sequence[LogEntry],
    *,
    num_steps: int,
    dtype: str,
    weight_dtype: str | None = None,
    first_step: int = 0,
) -> Iterator[Finding]:
    """The first difference on each queue of each step; nothing when the log is what the graph says.

    ``num_steps`` counts those that have a log, from ``first_step`` on: what is replayed has that of its capture.

    The host's entries count in the order of the log. A transfer's entry is
    written when the host waits for it, so those of a channel count in the
    order in which the channel carried them out.
    """
    one_step = expected_facts(graph, rank, dtype, weight_dtype)
    logged_steps = range(first_step, first_step + num_steps)
    for step in sorted({*logged_steps, *(entry.step for entry in entries)}):
        expected = one_step if step in logged_steps else {}
        logged: dict[str, list[_Fact]] = {}
        for entry in _by_queue_order(entries):
            if entry.step == step:
                moves_rows = entry.traffic and is_of_rows(OpKind.ALL_TO_ALL, entry.dtype)
                fact = (entry.op, entry.ranks, 0 if moves_rows else entry.numel, entry.dtype)
                logged.setdefault(entry.queue, []).append(fact)
        for queue in sorted(expected.keys() | logged.keys()):
            difference = _first_difference(expected.get(queue, []), logged.get(queue, []))
            if difference is not None:
                position, wanted, seen = difference
                yield Finding(
                    LOG_DIFFERS.code,
                    Severity.ERROR,
                    f"rank {rank}, step {step}, queue {queue}, place {position}: the graph says {_text(wanted)}, "
                    f"the log says {_text(seen)}",
                    witness=OpsWitness(tuple(WitnessOp(rank, fact[0]) for fact in (wanted, seen) if fact)),
                )


def op_ids_of(graph: OpGraph, rank: int, entries: Sequence[LogEntry]) -> list[int | None]:
    """Which operation of the graph each entry of a rank's log is, None for one that the graph has not.

    An operation may be several messages, with a wait for each: of those with one text on one queue, the k-th entry of
    a step is the k-th in the graph.
    """
    ids: dict[tuple[str, str], list[int]] = {}
    for op_id in graph.rank_ops(rank):
        op = graph.ops[op_id]
        queue = str(graph.channels[int(graph.channel[op_id])]) if op.kind in TRANSFER_KINDS else HOST_QUEUE
        ids.setdefault((queue, str(op)), []).append(op_id)
    seen: Counter[tuple[int, str, str]] = Counter()
    found: list[int | None] = []
    for entry in entries:
        place, known = seen[entry.step, entry.queue, entry.op], ids.get((entry.queue, entry.op), [])
        seen[entry.step, entry.queue, entry.op] += 1
        found.append(known[place] if place < len(known) else None)
    return found


def is_of_rows(kind: OpKind, dtype: str) -> bool:
    """Whether an operation is an all-to-all of as many rows as counts announced."""
    return kind is OpKind.ALL_TO_ALL and dtype != COUNTS_DTYPE


def _by_queue_order(entries: Sequence[LogEntry]) -> list[LogEntry]:
    host = [entry for entry in entries if entry.queue == HOST_QUEUE]
    channels = [entry for entry in entries if entry.queue != HOST_QUEUE]
    return [*host, *sorted(channels, key=lambda entry: entry.start_ns)]


def _first_difference(expected: list[_Fact], logged: list[_Fact]) -> tuple[int, _Fact | None, _Fact | None] | None:
    for position in range(max(len(expected), len(logged))):
        wanted = expected[position] if position < len(expected) else None
        seen = logged[position] if position < len(logged) else None
        if wanted != seen:
            return position, wanted, seen
    return None


def _text(fact: _Fact | None) -> str:
    if fact is None:
        return "nothing more"
    op, ranks, numel, dtype = fact
    where = f" over ranks {list(ranks)}, {numel} elements {dtype}".rstrip() if ranks else ""
    return f"{op}{where}"
