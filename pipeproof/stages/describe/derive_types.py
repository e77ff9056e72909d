"""Derivation from a typed program: types, gradients, forward and backward collectives, and gradients to reduce.

The gradient of every value has the dual type of the value. So the backward program is the forward program in reverse
order, with the inverse of each layout change. ``_BACKWARD`` is the table of inverses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from pipeproof.specs.axis_layout import PlacementKind
from pipeproof.stages.describe.layer import Collective, CollectiveKind
from pipeproof.stages.describe.type_rules import Operand, Reason, TypeRefusedError, output_type, relabelled
from pipeproof.stages.describe.typed_ops import AxisType, TypedKind, TypedOp, TypedProgram, Value


@dataclass(frozen=True, slots=True)
class TypeProblem:
    """One mistake in a typed program: at the operation or result ``place``, over ``axis``."""

    place: str
    axis: str
    reason: Reason
    message: str
    help: str


@dataclass(frozen=True, slots=True)
class TypedLayer:
    """A program with its derived types and collectives.

    ``values`` have derived types. After a problem over an axis, dependent values have no type over it.
    ``partial_over`` has, for each parameter, the axes over which each rank has only an addend of its gradient.
    ``weights`` are the gathers whose results are multiplied by weights, in backward order: weight gradients need them
    again if the results are not kept.
    """

    program: TypedProgram
    values: Mapping[str, Value]
    problems: tuple[TypeProblem, ...]
    forward: tuple[Collective, ...]
    backward: tuple[Collective, ...]
    partial_over: Mapping[str, tuple[str, ...]]
    weights: tuple[Collective, ...] = ()

    def gradient_of(self, name: str) -> Mapping[str, AxisType]:
        """The types of a value's gradient by axis."""
        return {axis: kind.dual for axis, kind in self.values[name].types.items()}


def derive_types(program: TypedProgram) -> TypedLayer:
    """Type every value of a program, axis by axis.

    Raises:
        ValueError: the ranks of an axis do not divide a dim that they shard.
    """
    deriver = _Deriver(program)
    for axis, num_ranks in program.mesh.items():
        if num_ranks > 1:
            deriver.derive_over(axis, num_ranks)
    return deriver.result()


class _Deriver:
    def __init__(self, program: TypedProgram) -> None:
        self._program = program
        self._outside = {value.name: value for value in program.inputs}
        self._parameters = {parameter.value.name: parameter.value for parameter in program.parameters}
        self._types: dict[str, dict[str, AxisType]] = {}
        self._problems: list[TypeProblem] = []
        self._partial: dict[str, list[str]] = {name: [] for name in self._parameters}
        self._complete: set[tuple[str, str]] = set()

    def derive_over(self, axis: str, num_ranks: int) -> None:
        """Derive the types of all values over one axis. Values that depend on a problem get no type."""
        types = {value.name: value.over(axis) for value in (*self._outside.values(), *self._parameters.values())}
        values = {**self._outside, **self._parameters}
        for op in self._program.ops:
            values[op.name] = op.output
            if any(name not in types for name in op.inputs):
                continue
            operands = [Operand(values[name], types[name], name in self._parameters) for name in op.inputs]
            try:
                types[op.name] = output_type(op, operands, axis, num_ranks, dict(self._program.sizes))
            except TypeRefusedError as refusal:
                self._problems.append(TypeProblem(op.name, axis, refusal.reason, refusal.message, refusal.help))
                continue
            self._note_uses(axis, op, operands, types[op.name])
        for result in self._program.results:
            derived = types.get(result.name)
            if derived is not None and derived != result.over(axis):
                wrong = relabelled(Operand(values[result.name], derived), result.over(axis))
                self._problems.append(TypeProblem(result.name, axis, wrong.reason, wrong.message, wrong.help))
        for name, kind in types.items():
            self._types.setdefault(name, {})[axis] = kind

    def _note_uses(self, axis: str, op: TypedOp, operands: list[Operand], result_value: AxisType) -> None:
        """Note whole parameters used with values that differ per rank: each rank has an addend of their gradient."""
        for operand in operands:
            if not (operand.is_parameter and operand.type.is_equal and operand.value.differentiable):
                continue
            name = operand.value.name
            if result_value.kind is PlacementKind.INVARIANT:
                self._complete.add((name, axis))
            elif axis not in self._partial[name]:
                self._partial[name].append(axis)
            if (name, axis) in self._complete and axis in self._partial[name]:
                self._problems.append(
                    TypeProblem(
                        op.name,
                        axis,
                        Reason.OPERAND,
                        f"`{name}` has an addend of its gradient on each rank from one use and the whole gradient from "
                        "another: no reduction makes their sum correct",
                        "put all uses inside the parallel region, or all outside",
                    )
                )

    def _refuse_inside_out(self, op: TypedOp, values: Mapping[str, Value]) -> None:
        """Refuse to gather or shard a dim over an axis if a finer axis also shards it: ranges would interleave."""
        if not op.axis or self._program.mesh.get(op.axis, 1) == 1:
            return
        operand_value, result_value = values[op.inputs[0]], values[op.name]
        dims = {kind.dim for kind in (operand_value.over(op.axis), result_value.over(op.axis)) if kind.is_cut}
        for axis in self._program.mesh:
            if axis == op.axis:
                return
            kind = operand_value.over(axis)
            if kind.dim in dims and op.kind is not TypedKind.RELABEL:
                message = f"`{operand_value.name}` is cut along {kind.dim} over {axis} inside each part over {op.axis}"
                fix = f"gather over {axis} before, or cut over {axis} after"
                self._problems.append(TypeProblem(op.name, op.axis, Reason.OPERAND, message, fix))

    def result(self) -> TypedLayer:
        values = {
            value.name: replace(value, types=MappingProxyType(self._types.get(value.name, {})))
            for value in (*self._outside.values(), *self._parameters.values(), *(op.output for op in self._program.ops))
        }
        for op in self._program.ops:
            self._refuse_inside_out(op, values)
        return TypedLayer(
            self._program,
            values,
            tuple(self._problems),
            tuple(c for op in self._program.ops for c in self._issued(op, values, backward=False)),
            tuple(c for op in reversed(self._program.ops) for c in self._issued(op, values, backward=True)),
            {name: tuple(axes) for name, axes in self._partial.items()},
            tuple(self._gathered_for_weights(values)),
        )

    def _gathered_for_weights(self, values: Mapping[str, Value]) -> Iterator[Collective]:
        products = [op.inputs for op in self._program.ops if op.kind is TypedKind.MULTIPLY]
        read = {name for inputs in products for name in inputs if not self._parameters.keys().isdisjoint(inputs)}
        for op in reversed(self._program.ops):
            if op.kind is TypedKind.ALL_GATHER and op.name in read:
                for gather in self._issued(op, values, backward=False):
                    yield replace(gather, label=f"{op.name}.again")

    def _issued(self, op: TypedOp, values: Mapping[str, Value], *, backward: bool) -> Iterator[Collective]:
        """The collective of one layout change; none over an axis of one rank, or after a problem."""
        mesh, sizes = self._program.mesh, self._program.sizes
        if not op.axis or mesh.get(op.axis, 1) == 1:
            return
        operand_value, result_value = values[op.inputs[0]], values[op.name]
        if op.axis not in operand_value.types or op.axis not in result_value.types:
            return
        if not backward:
            kind = _FORWARD.get(op.kind)
            if kind is not None:
                yield Collective(kind, op.axis, operand_value.local_numel(sizes, mesh), op.name, op.reduction, op.dtype)
        elif result_value.differentiable:
            inverse = _BACKWARD.get((operand_value.over(op.axis).kind, result_value.over(op.axis).kind))
            if inverse is not None:
                yield Collective(
                    inverse, op.axis, result_value.local_numel(sizes, mesh), f"{op.name}.grad", dtype=op.grad_dtype
                )


_FORWARD: Mapping[TypedKind, CollectiveKind] = MappingProxyType(
    {
        TypedKind.ALL_REDUCE: CollectiveKind.ALL_REDUCE,
        TypedKind.ALL_GATHER: CollectiveKind.ALL_GATHER,
        TypedKind.REDUCE_SCATTER: CollectiveKind.REDUCE_SCATTER,
        TypedKind.ALL_TO_ALL: CollectiveKind.ALL_TO_ALL,
    }
)
"""The forward collective of each layout change; a cut and a relabel issue none."""

_R, _I = PlacementKind.REPLICATED, PlacementKind.INVARIANT
_S, _P = PlacementKind.SHARDED, PlacementKind.PARTIAL
_BACKWARD: Mapping[tuple[PlacementKind, PlacementKind], CollectiveKind] = MappingProxyType(
    {
        (_P, _R): CollectiveKind.ALL_REDUCE,
        (_I, _R): CollectiveKind.ALL_REDUCE,
        (_S, _R): CollectiveKind.REDUCE_SCATTER,
        (_P, _S): CollectiveKind.ALL_GATHER,
        (_I, _S): CollectiveKind.ALL_GATHER,
        (_S, _S): CollectiveKind.ALL_TO_ALL,
    }
)
"""The backward collective of a layout change from one kind to another: its gradient goes from the dual of the second to
the dual of the first. None for P to I (the gradient of each addend is the equal gradient), for S to I (each rank keeps
its part) and for R to S (each rank's part is an addend)."""
