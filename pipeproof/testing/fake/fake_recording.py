"""Graph of the operations that fake ranks issued, for the rules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from string import ascii_lowercase

from pipeproof.diagnostics.finding import Location
from pipeproof.schedule.columns import NONE, Row
from pipeproof.schedule.op_table import Group, OpGraph, TensorSpec, build_graph
from pipeproof.schedule.ops import Op, OpKind, wait_for
from pipeproof.testing.fake.fake_engine import Engine
from pipeproof.testing.fake.fake_operations import Array, Call, FakeOp, Transfer


@dataclass(frozen=True, slots=True)
class Recorded:
    """Rows of all ranks with their locations in the programs.

    ``ops`` has the operation of each row, None for waits.
    """

    graph: OpGraph
    origins: tuple[Location, ...]
    ops: tuple[FakeOp | None, ...]


class Recording:
    """Collects rows rank by rank."""

    def __init__(self, num_ranks: int) -> None:
        self._rows: list[list[tuple[Op, FakeOp | None, str, int]]] = [[] for _ in range(num_ranks)]

    def issued(self, op: FakeOp) -> None:
        """Record an issued operation."""
        self._rows[op.rank].append((op.op, op, op.place, op.line))

    def waited(self, op: FakeOp, place: str, line: int) -> None:
        """Record that its rank waits for it."""
        self._rows[op.rank].append((wait_for(op.op), None, place, line))

    def finish(self, engine: Engine, groups: tuple[Group, ...]) -> Recorded:
        """Build the graph. A receive without shape and type gets those of its send."""
        tensors: dict[TensorSpec, int] = {}
        origins: dict[Location, int] = {}
        ranks = []
        for recorded in self._rows:
            rows = []
            for op, source, place, line in recorded:
                origin = origins.setdefault(Location(place, line, 1), len(origins))
                rows.append(_row(op, source, engine, tensors, origin))
            ranks.append(rows)
        ops = tuple(source for recorded in self._rows for _, source, _, _ in recorded)
        return Recorded(build_graph(ranks, list(tensors), groups), tuple(origins), ops)


def _row(op: Op, source: FakeOp | None, engine: Engine, tensors: dict[TensorSpec, int], origin: int) -> Row:
    row = Row(op, origin=origin)
    if isinstance(source, Transfer):
        held = _held(source, engine)
        tensor, stop = NONE, 0
        if held is not None:
            array, dtype = held
            tensor = tensors.setdefault(_tensor(array, dtype), len(tensors))
            stop = array.size
        communicator = source.channel.communicator
        return replace(row, peer=source.peer, tensor=tensor, stop=stop, communicator=communicator, batch=source.batch)
    if isinstance(source, Call):
        root = NONE if source.root is None else source.root
        tensor = NONE
        if op.kind is not OpKind.BARRIER:
            tensor = tensors.setdefault(_tensor(source.arrays[0], str(source.arrays[0].dtype)), len(tensors))
        return replace(
            row,
            peer=root,
            tensor=tensor,
            stop=source.num_elements,
            group=source.group_index,
            reduction=source.reduction,
        )
    return row


def _held(transfer: Transfer, engine: Engine) -> tuple[Array, str] | None:
    """Return the array of a transfer and its type; None for an unmatched receive without a buffer."""
    send = transfer if transfer.is_send else engine.channels[transfer.channel].other(transfer)
    if transfer.into is not None:
        return transfer.into, transfer.dtype
    return None if send is None or send.array is None else (send.array, send.dtype)


def _tensor(array: Array, dtype: str) -> TensorSpec:
    dims = ascii_lowercase[: array.ndim]
    return TensorSpec(f"{dtype}[{', '.join(map(str, array.shape))}]", array.shape, dtype, "replicated", dims)
