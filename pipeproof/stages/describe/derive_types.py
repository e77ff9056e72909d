"""What follows from a typed program: types, gradients, collectives both ways, and gradients still to be reduced.

The gradient of every value has the dual type of the value, so the backward
program is the forward one read backwards, with each layout change turned
round. ``_BACKWARD`` is the table of those turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from pipeproof.specs.layout import PlacementKind
from pipeproof.stages.describe.layers import Collective, CollectiveKind
from pipeproof.stages.describe.type_rules import Operand, Reason, TypeRefusedError, output_type, relabelled
from pipeproof.stages.describe.typed_ops import TypedKind, TypedOp, TypedProgram
from pipeproof.stages.describe.typed_values import AxisType, Value


@dataclass(frozen=True, slots=True)
class TypeProblem:
    """One mistake in a typed program: at operation or result ``place``, over ``axis``."""

    place: str
    axis: str
    reason: Reason
    message: str
    help: str


@dataclass(frozen=True, slots=True)
class TypedLayer:
    """A program with everything that follows from it.

    ``values`` have their derived types (an axis over which a problem was found
    is left out of what comes after it); ``gradients`` are their duals.
    ``partial_over`` names, for each parameter, the axes over which each rank
    has only an addend of its gradient. ``weights`` are the gathers whose results
    are multiplied by weights, in the order of the backward: what the weights'
    gradients need once more where they are not kept.
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
        ValueError: the ranks of an axis do not divide the dim that they cut.
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
        """All values over one axis. After a problem nothing is said of what depends on it."""
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
            found = types.get(result.name)
            if found is not None and found != result.over(axis):
                wrong = relabelled(Operand(values[result.name], found), result.over(axis))
                self._problems.append(TypeProblem(result.name, axis, wrong.reason, wrong.message, wrong.help))
        for name, kind in types.items():
            self._types.setdefault(name, {})[axis] = kind

    def _note_uses(self, axis: str, op: TypedOp, operands: list[Operand], made: AxisType) -> None:
        """A whole parameter among values that differ per rank has an addend of its gradient on each rank."""
        for operand in operands:
            if not operand.is_parameter or not operand.type.is_equal:
                continue
            name = operand.value.name
            if made.kind is PlacementKind.INVARIANT:
                self._complete.add((name, axis))
            elif axis not in self._partial[name]:
                self._partial[name].append(axis)
            if (name, axis) in self._complete and axis in self._partial[name]:
                self._problems.append(
                    TypeProblem(
                        op.name,
                        axis,
                        Reason.OPERAND,
                        f"`{name}` has an addend of its gradient on each rank from one use and all of it from another: "
                        "no reduction makes their sum right",
                        "let all uses be inside the parallel region, or all outside",
                    )
                )

    def _refuse_inside_out(self, op: TypedOp, values: Mapping[str, Value]) -> None:
        """A dim that a finer axis cuts too cannot be gathered or cut over a coarser one: ranges would interleave."""
        if not op.axis or self._program.mesh.get(op.axis, 1) == 1:
            return
        taken, made = values[op.inputs[0]], values[op.name]
        dims = {kind.dim for kind in (taken.over(op.axis), made.over(op.axis)) if kind.is_cut}
        for axis in self._program.mesh:
            if axis == op.axis:
                return
            kind = taken.over(axis)
            if kind.dim in dims and op.kind is not TypedKind.RELABEL:
                message = f"`{taken.name}` is cut along {kind.dim} over {axis} inside each part over {op.axis}"
                way = f"gather over {axis} before, or cut over {axis} after"
                self._problems.append(TypeProblem(op.name, op.axis, Reason.OPERAND, message, way))

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
        """The gathers that weights' gradients read."""
        products = [op.inputs for op in self._program.ops if op.kind is TypedKind.MULTIPLY]
        read = {name for inputs in products for name in inputs if not self._parameters.keys().isdisjoint(inputs)}
        for op in reversed(self._program.ops):
            if op.kind is TypedKind.ALL_GATHER and op.name in read:
                for gather in self._issued(op, values, backward=False):
                    yield replace(gather, label=f"{op.name}.again")

    def _issued(self, op: TypedOp, values: Mapping[str, Value], *, backward: bool) -> Iterator[Collective]:
        """The collective of one layout change; none over an axis of one rank, or where a problem was found."""
        mesh, sizes = self._program.mesh, self._program.sizes
        if not op.axis or mesh.get(op.axis, 1) == 1:
            return
        taken, made = values[op.inputs[0]], values[op.name]
        if op.axis not in taken.types or op.axis not in made.types:
            return
        if not backward:
            kind = _FORWARD.get(op.kind)
            if kind is not None:
                yield Collective(kind, op.axis, taken.local_numel(sizes, mesh), op.name, op.reduction, op.dtype)
        elif made.differentiable:
            turned = _BACKWARD.get((taken.over(op.axis).kind, made.over(op.axis).kind))
            if turned is not None:
                yield Collective(turned, op.axis, made.local_numel(sizes, mesh), f"{op.name}.grad", dtype=op.grad_dtype)


_FORWARD: Mapping[TypedKind, CollectiveKind] = MappingProxyType(
    {
        TypedKind.ALL_REDUCE: CollectiveKind.ALL_REDUCE,
        TypedKind.ALL_GATHER: CollectiveKind.ALL_GATHER,
        TypedKind.REDUCE_SCATTER: CollectiveKind.REDUCE_SCATTER,
        TypedKind.ALL_TO_ALL: CollectiveKind.ALL_TO_ALL,
    }
)
"""What each layout change issues on the way forward; a cut and a relabel issue nothing."""

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
"""What a layout change from one kind to another issues on the way back, where its gradient goes from the dual of the
second to the dual of the first: nothing for P to I (equal gradients are what each addend's gradient is), for S to I
(each rank keeps its part) and for R to S (each rank's part is an addend)."""
