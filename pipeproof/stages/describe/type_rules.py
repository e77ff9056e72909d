"""The signature of every typed operation, over one mesh axis at a time.

``output_type`` says what the operands' types make of an operation's value, or
refuses them. The axes are independent: a tensor that is cut over ``cp`` and
invariant over ``tp`` is judged twice. The rules are those of SPMD type systems
(replicated, invariant, varying, partial; Megatron's f and g are the relabel
I to R and the all-reduce P to I), with the cut dim by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipeproof.specs.layout import PlacementKind
from pipeproof.stages.describe.typed_ops import TypedKind, TypedOp
from pipeproof.stages.describe.typed_values import INVARIANT, PARTIAL, REPLICATED, VARYING, AxisType, Value, cut


class Reason(StrEnum):
    """Which of three mistakes a refusal is about."""

    OPERAND = "operand"
    """An operation gets a value that it does not compute rightly with."""
    RELABEL = "relabel"
    """A value is said to lie otherwise than it does."""
    SIDE_INPUT = "side_input"
    """A constant that goes with a tensor (a mask, ids, positions) is not cut as the tensor is."""


class TypeRefusedError(Exception):
    """The operands do not fit the operation; ``help`` says what would."""

    def __init__(self, reason: Reason, message: str, help: str) -> None:
        super().__init__(message)
        self.reason, self.message, self.help = reason, message, help


@dataclass(frozen=True, slots=True)
class Operand:
    """A value as an operation takes it over one axis; a parameter that is not cut fits itself to the others."""

    value: Value
    type: AxisType
    is_parameter: bool = False

    @property
    def adapts(self) -> bool:
        """Whether the operand may meet any type: equal values whose gradient is none or may be summed later."""
        return self.type.is_equal and (self.is_parameter or not self.value.differentiable)

    def __str__(self) -> str:
        return f"`{self.value.name}` ({self.type})"


def output_type(op: TypedOp, operands: Sequence[Operand], axis: str, num_ranks: int, sizes: dict[str, int]) -> AxisType:
    """The type over ``axis`` of the value that ``op`` makes.

    Raises:
        TypeRefusedError: the operands' types do not fit.
    """
    if op.axis:
        return _changed(op, operands[0], axis)
    match op.kind:
        case TypedKind.RESHAPE:
            return _reshaped(op, operands[0], num_ranks, sizes)
        case TypedKind.SELECT:
            _refuse_cut(operands[0], op.over[:1], "takes a range of")
            return operands[0].type
        case TypedKind.DISPATCH:
            return _renamed(_met(op, operands), op.over[0], op.over[2])
        case TypedKind.COMBINE:
            return _combined(op, operands)
        case TypedKind.MAX:
            (operand,) = operands
            _refuse_addends(op, operand)
            return VARYING if operand.type == cut(op.over[0]) else operand.type
        case _:
            return _met(op, operands)


def _met(op: TypedOp, operands: Sequence[Operand]) -> AxisType:
    """The common rule of sums, products and other functions of several operands."""
    for decide in (_met_addends, _met_parts, _met_others):
        found = decide(op, operands)
        if found is not None:
            return found
    return _met_equals(operands)


def _met_addends(op: TypedOp, operands: Sequence[Operand]) -> AxisType | None:
    addends = [operand for operand in operands if operand.type == PARTIAL]
    if not addends:
        return None
    others = [operand for operand in operands if operand.type != PARTIAL]
    if op.kind is TypedKind.ADD:
        if others:
            raise TypeRefusedError(
                Reason.OPERAND,
                f"it adds {others[0]} to the addends {addends[0]}: the sum over the ranks counts {others[0]} "
                "once per rank",
                f"reduce `{addends[0].value.name}` first",
            )
        return PARTIAL
    if op.kind is TypedKind.APPLY:
        _refuse_addends(op, addends[0])
    if len(addends) > 1 or not all(operand.type.is_equal for operand in others):
        raise TypeRefusedError(
            Reason.OPERAND,
            f"it multiplies the addends {addends[0]} with {(addends[1:] + others)[0]}, "
            "and a product of sums is not the sum of products",
            f"reduce `{addends[0].value.name}` first",
        )
    for operand in others:
        _require_region(operand, addends[0])
    return PARTIAL


def _met_parts(op: TypedOp, operands: Sequence[Operand]) -> AxisType | None:
    parts = [operand for operand in operands if operand.type.is_cut]
    if not parts:
        return None
    first, others = parts[0], [operand for operand in operands if not operand.type.is_cut]
    for operand in parts[1:]:
        if operand.type != first.type:
            raise TypeRefusedError(
                Reason.OPERAND,
                f"{first} and {operand} are cut along different dims, so each rank meets the wrong parts",
                "gather one of them, or bring both to a cut along the same dim",
            )
    dim = first.type.dim
    for operand in others:
        if dim in operand.value.dims:
            raise _whole_beside_part(operand, first)
        if operand.type.is_equal:
            _require_region(operand, first)
    if op.kind is TypedKind.APPLY:
        _refuse_cut(first, op.over, "mixes along")
    if any(operand.type == VARYING for operand in others):
        return VARYING
    return PARTIAL if dim in op.over and op.kind is not TypedKind.DISPATCH else first.type


def _met_others(op: TypedOp, operands: Sequence[Operand]) -> AxisType | None:
    varying = [operand for operand in operands if operand.type == VARYING]
    for operand in operands if varying else ():
        if operand.type.is_equal:
            _require_region(operand, varying[0])
    return VARYING if varying else None


def _met_equals(operands: Sequence[Operand]) -> AxisType:
    flowing = [operand for operand in operands if not operand.adapts]
    replicated = [operand for operand in flowing if operand.type == REPLICATED]
    for operand in flowing if replicated else ():
        _require_region(operand, replicated[0])
    if replicated or (not flowing and all(operand.type == REPLICATED for operand in operands)):
        return REPLICATED
    return INVARIANT


def _require_region(operand: Operand, other: Operand) -> None:
    """An invariant value with a gradient may not meet what differs per rank: its gradient would be addends."""
    if operand.type == INVARIANT and not operand.adapts:
        raise TypeRefusedError(
            Reason.OPERAND,
            f"{operand} meets {other}: each rank then has only an addend of the gradient of "
            f"`{operand.value.name}`, which is declared complete",
            f"relabel `{operand.value.name}` from I to R before, which sums its gradient over the ranks",
        )


def _refuse_addends(op: TypedOp, operand: Operand) -> None:
    if operand.type == PARTIAL:
        raise TypeRefusedError(
            Reason.OPERAND,
            f"it is no linear function, and {operand} are addends: a function of a sum is not the sum of the functions",
            f"reduce `{operand.value.name}` over the axis first",
        )


def _refuse_cut(operand: Operand, dims: Sequence[str], verb: str) -> None:
    if operand.type.is_cut and operand.type.dim in dims:
        raise TypeRefusedError(
            Reason.OPERAND,
            f"it {verb} {operand.type.dim}, of which each rank holds a part only: {operand}",
            f"gather `{operand.value.name}` along {operand.type.dim} first",
        )


def _whole_beside_part(operand: Operand, part: Operand) -> TypeRefusedError:
    dim = part.type.dim
    side = not operand.value.differentiable
    return TypeRefusedError(
        Reason.SIDE_INPUT if side else Reason.OPERAND,
        f"{operand} has the whole of {dim}, and {part} has a part of it on each rank",
        f"cut `{operand.value.name}` along {dim}" + ("" if side else f", or gather `{part.value.name}`"),
    )


def _renamed(kind: AxisType, dim: str, into: str) -> AxisType:
    return cut(into) if kind == cut(dim) else kind


def _combined(op: TypedOp, operands: Sequence[Operand]) -> AxisType:
    expert_dim, slot_dim, token_dim = op.over
    slots, *rest = operands
    _refuse_cut(slots, (expert_dim,), "returns tokens from all of")
    dims = tuple(token_dim if dim == slot_dim else dim for dim in slots.value.dims)
    as_tokens = Value(slots.value.name, dims, {}, slots.value.differentiable)
    product = TypedOp(TypedKind.MULTIPLY, op.inputs, op.output)
    return _met(product, [Operand(as_tokens, _renamed(slots.type, slot_dim, token_dim)), *rest])


def _reshaped(op: TypedOp, operand: Operand, num_ranks: int, sizes: dict[str, int]) -> AxisType:
    kind = operand.type
    first, second, third = op.over
    if first in operand.value.dims and second in operand.value.dims:  # (major, minor) into one
        if kind == cut(second):
            raise TypeRefusedError(
                Reason.OPERAND,
                f"it merges {first} and {second} into {third}, and {operand} is cut along the minor one: the parts "
                f"are no ranges of {third}",
                f"cut `{operand.value.name}` along {first}, or gather it first",
            )
        return _renamed(kind, first, third)
    if kind == cut(first) and sizes[second] % num_ranks:
        raise TypeRefusedError(
            Reason.OPERAND,
            f"it splits {first} into {sizes[second]} of {second}, and {operand} is cut over {num_ranks} ranks: the "
            f"parts do not end between two of {second}",
            f"choose a number of {second} that the ranks divide",
        )
    return _renamed(kind, first, second)


_TAKES: dict[TypedKind, tuple[PlacementKind, ...]] = {
    TypedKind.ALL_REDUCE: (PlacementKind.PARTIAL,),
    TypedKind.REDUCE_SCATTER: (PlacementKind.PARTIAL,),
    TypedKind.ALL_GATHER: (PlacementKind.SHARDED,),
    TypedKind.ALL_TO_ALL: (PlacementKind.SHARDED,),
    TypedKind.CUT: (PlacementKind.REPLICATED, PlacementKind.INVARIANT),
}
"""What each layout change takes; another type is refused as an operand."""

_MAKES: dict[TypedKind, tuple[PlacementKind, ...]] = {
    TypedKind.ALL_REDUCE: (PlacementKind.REPLICATED, PlacementKind.INVARIANT),
    TypedKind.ALL_GATHER: (PlacementKind.REPLICATED, PlacementKind.INVARIANT),
}
"""What each layout change may be said to make, where that is not its one possibility."""

_WORDS = {
    PlacementKind.PARTIAL: "addends (P)",
    PlacementKind.SHARDED: "parts (S)",
    PlacementKind.REPLICATED: "equal values (R or I)",
}
_CONSEQUENCE = {
    TypedKind.ALL_REDUCE: "the sum counts it once per rank",
    TypedKind.REDUCE_SCATTER: "the sum counts it once per rank",
    TypedKind.ALL_GATHER: "the result is as many times too long as there are ranks",
    TypedKind.ALL_TO_ALL: "the ranks exchange parts of different tensors",
    TypedKind.CUT: "parts of it are dropped",
}

_HARMLESS = {(INVARIANT.kind, REPLICATED.kind), (PlacementKind.SHARDED, VARYING.kind)}
"""Relabels that keep the meaning of value and gradient; the first sums gradients on the way back."""


def _changed(op: TypedOp, operand: Operand, axis: str) -> AxisType:
    """The type after a layout change over ``op.axis``; over other axes it changes nothing."""
    kind, target = operand.type, op.target
    assert target is not None
    if op.axis != axis:
        return kind
    if op.kind is TypedKind.RELABEL:
        if kind != target and (kind.kind, target.kind) not in _HARMLESS:
            raise relabelled(operand, target)
        return target
    takes = _TAKES[op.kind]
    if op.kind is TypedKind.ALL_REDUCE and op.reduction == "max":
        takes = (PlacementKind.VARYING,)
    if kind.kind not in takes:
        raise TypeRefusedError(
            Reason.OPERAND,
            f"it takes {_WORDS.get(takes[0], 'values that vary (V)')} over {axis}, and gets {operand}: "
            f"{_CONSEQUENCE[op.kind]}",
            f"give it {_WORDS.get(takes[0], 'values that vary (V)')}, or remove it",
        )
    if target.kind not in _MAKES.get(op.kind, (PlacementKind.SHARDED,)):
        raise TypeRefusedError(
            Reason.RELABEL, f"its result is said to be {target} over {axis}", "say what it makes: R or I"
        )
    return target


def relabelled(operand: Operand, target: AxisType) -> TypeRefusedError:
    """The refusal of a value that is said to be ``target`` and is not."""
    return TypeRefusedError(
        Reason.RELABEL,
        f"{operand} is said to be {target}, and no operation makes it so",
        _way(operand, target),
    )


def _way(operand: Operand, target: AxisType) -> str:
    name = operand.value.name
    if operand.type == PARTIAL:
        return f"reduce `{name}` over the axis: all_reduce, or reduce_scatter for a cut"
    if operand.type.is_cut and target.is_equal:
        return f"gather `{name}`"
    if target.is_cut and operand.type.is_equal:
        return f"cut `{name}` along {target.dim}"
    return "say the type that it has, or change the layout by an operation that does"
