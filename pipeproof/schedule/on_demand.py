"""What of the op table is made when it is first asked for: operations by id, edges by kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import overload

from pipeproof.schedule.columns import Columns, IntColumn, op_from_columns
from pipeproof.schedule.ops import Op
from pipeproof.schedule.parts import EdgeKind


class OpsById(Sequence[Op]):
    """The operations by id, each made when it is first asked for."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._made: dict[int, Op] = dict(columns.unusual)

    def __len__(self) -> int:
        return self._columns.num_rows

    @overload
    def __getitem__(self, op_id: int) -> Op: ...
    @overload
    def __getitem__(self, op_id: slice) -> list[Op]: ...
    def __getitem__(self, op_id: int | slice) -> Op | list[Op]:
        if isinstance(op_id, slice):
            return [self[i] for i in range(*op_id.indices(len(self)))]
        op = self._made.get(op_id)
        if op is None:
            op = self._made[op_id] = self._make(int(op_id))
        return op

    def __iter__(self) -> Iterator[Op]:
        return (self[i] for i in range(len(self)))

    def _make(self, op_id: int) -> Op:
        if not 0 <= op_id < len(self):
            raise IndexError(op_id)
        values = self._columns.values
        return op_from_columns(
            *(int(values[name][op_id]) for name in ("kind", "stage", "unit", "target_kind", "index", "axis")),
            num_splits=self._columns.num_splits,
        )


class EdgesByKind(Mapping[EdgeKind, IntColumn]):
    """Edges by kind, each kind computed when it is first asked for."""

    def __init__(self, compute: Callable[[EdgeKind], IntColumn]) -> None:
        self._compute = compute
        self._known: dict[EdgeKind, IntColumn] = {}

    def __getitem__(self, kind: EdgeKind) -> IntColumn:
        if kind not in self._known:
            self._known[kind] = self._compute(kind)
        return self._known[kind]

    def __iter__(self) -> Iterator[EdgeKind]:
        return iter(EdgeKind)

    def __len__(self) -> int:
        return len(EdgeKind)
