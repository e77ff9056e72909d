"""The signature of every typed operation, over one mesh axis at a time.

``output_type`` derives the type of an operation's value from the operands' types, or refuses them. The axes are
independent: a tensor that is cut over ``cp`` and invariant over ``tp`` is checked twice. The rules come from SPMD type
systems (replicated, invariant, varying, partial; Megatron's f and g are the relabel I to R and the all-reduce P to I),
with the cut dim by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipeproof.specs.axis_layout import PlacementKind
from pipeproof.stages.describe.typed_ops import (
    INVARIANT,
    PARTIAL,
    REPLICATED,
    VARYING,
    AxisType,
    TypedKind,
    TypedOp,
    Value,
    cut,
)


class Reason(StrEnum):
    """The kind of mistake in a refusal."""

    OPERAND = "operand"
    """An operation gets a value with which it computes a wrong result."""
    RELABEL = "relabel"
    """A value is declared with a layout that it does not have."""
    SIDE_INPUT = "side_input"
    """A constant that belongs to a tensor (a mask, ids, positions) is not cut like the tensor."""


class TypeRefusedError(Exception):
    """The operands do not fit the operation; ``help`` is the suggested fix."""

    def __init__(self, reason: Reason, message: str, help: str) -> None:
        super().__init__(message)
        self.reason, self.message, self.help = reason, message, help


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand of an operation over one axis. A parameter that is not cut adapts to the other operands."""

    value: Value
    type: AxisType
    is_parameter: bool = False

    @property
    def adapts(self) -> bool:
        """True if the operand fits any type: equal values without a gradient, or with one that may be summed later."""
        return self.type.is_equal and (self.is_parameter or not self.value.differentiable)

    def __str__(self) -> str:
        return f"`{self.value.name}` ({self.type})"


def output_type(op: TypedOp, operands: Sequence[Operand], axis: str, num_ranks: int, sizes: dict[str, int]) -> AxisType:
    """The type over ``axis`` of the result of ``op``.

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
            return _renamed(_combine_types(op, operands), op.over[0], op.over[2])
        case TypedKind.COMBINE:
            return _combined(op, operands)
        case TypedKind.MAX:
            (operand,) = operands
            _refuse_addends(op, operand)
            return VARYING if operand.type == cut(op.over[0]) else operand.type
        case _:
            return _combine_types(op, operands)


def _combine_types(op: TypedOp, operands: Sequence[Operand]) -> AxisType:
    """The common rule of sums, products and other functions of several operands."""
    for decide in (_combine_addends, _combine_parts, _combine_varying):
        combined = decide(op, operands)
        if combined is not None:
            return combined
    return _combine_equals(operands)


def _combine_addends(op: TypedOp, operands: Sequence[Operand]) -> AxisType | None:
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


def _combine_parts(op: TypedOp, operands: Sequence[Operand]) -> AxisType | None:
    parts = [operand for operand in operands if operand.type.is_cut]
    if not parts:
        return None
    first, others = parts[0], [operand for operand in operands if not operand.type.is_cut]
    for operand in parts[1:]:
        if operand.type != first.type:
            raise TypeRefusedError(
                Reason.OPERAND,
                f"{first} and {operand} are cut along different dims, so the parts on a rank do not belong together",
                "gather one of them, or bring both to a cut along the same dim",
            )
    dim = first.type.dim
    for operand in others:
        if dim in operand.value.dims:
            raise _whole_with_part(operand, first)
        if operand.type.is_equal:
            _require_region(operand, first)
    if op.kind is TypedKind.APPLY:
        _refuse_cut(first, op.over, "mixes along")
    if any(operand.type == VARYING for operand in others):
        return VARYING
    return PARTIAL if dim in op.over and op.kind is not TypedKind.DISPATCH else first.type


def _combine_varying(op: TypedOp, operands: Sequence[Operand]) -> AxisType | None:
    varying = [operand for operand in operands if operand.type == VARYING]
    for operand in operands if varying else ():
        if operand.type.is_equal:
            _require_region(operand, varying[0])
    return VARYING if varying else None


def _combine_equals(operands: Sequence[Operand]) -> AxisType:
    flowing = [operand for operand in operands if not operand.adapts]
    replicated = [operand for operand in flowing if operand.type == REPLICATED]
    for operand in flowing if replicated else ():
        _require_region(operand, replicated[0])
    if replicated or (not flowing and all(operand.type == REPLICATED for operand in operands)):
        return REPLICATED
    return INVARIANT


def _require_region(operand: Operand, other: Operand) -> None:
    """Refuse an invariant value with a gradient next to values that differ per rank: its gradient would be addends."""
    if operand.type == INVARIANT and not operand.adapts:
        raise TypeRefusedError(
            Reason.OPERAND,
            f"{operand} is used with {other}: each rank then has only an addend of the gradient of "
            f"`{operand.value.name}`, which is declared complete",
            f"relabel `{operand.value.name}` from I to R before, which sums its gradient over the ranks",
        )


def _refuse_addends(op: TypedOp, operand: Operand) -> None:
    if operand.type == PARTIAL:
        raise TypeRefusedError(
            Reason.OPERAND,
            f"it is not linear, and {operand} are addends: a function of a sum is not the sum of the functions",
            f"reduce `{operand.value.name}` over the axis first",
        )


def _refuse_cut(operand: Operand, dims: Sequence[str], verb: str) -> None:
    if operand.type.is_cut and operand.type.dim in dims:
        raise TypeRefusedError(
            Reason.OPERAND,
            f"it {verb} {operand.type.dim}, but each rank has only a part of it: {operand}",
            f"gather `{operand.value.name}` along {operand.type.dim} first",
        )


def _whole_with_part(operand: Operand, part: Operand) -> TypeRefusedError:
    dim = part.type.dim
    side = not operand.value.differentiable
    return TypeRefusedError(
        Reason.SIDE_INPUT if side else Reason.OPERAND,
        f"{operand} has the whole dim {dim}, and {part} has a part of it on each rank",
        f"cut `{operand.value.name}` along {dim}" + ("" if side else f", or gather `{part.value.name}`"),
    )


def _renamed(kind: AxisType, dim: str, into: str) -> AxisType:
    return cut(into) if kind == cut(dim) else kind


def _combined(op: TypedOp, operands: Sequence[Operand]) -> AxisType:
    expert_dim, slot_dim, token_dim = op.over
    slots, *rest = operands
    # A rank that knows the choices of all tokens makes an addend of each: the results of its own experts.
    if slots.type == cut(expert_dim) and all(operand.type == REPLICATED or operand.adapts for operand in rest):
        return PARTIAL
    _refuse_cut(slots, (expert_dim,), "returns tokens from all of")
    dims = tuple(token_dim if dim == slot_dim else dim for dim in slots.value.dims)
    as_tokens = Value(slots.value.name, dims, {}, slots.value.differentiable)
    product = TypedOp(TypedKind.MULTIPLY, op.inputs, op.output)
    return _combine_types(product, [Operand(as_tokens, _renamed(slots.type, slot_dim, token_dim)), *rest])


def _reshaped(op: TypedOp, operand: Operand, num_ranks: int, sizes: dict[str, int]) -> AxisType:
    kind = operand.type
    first, second, third = op.over
    if first in operand.value.dims and second in operand.value.dims:  # (major, minor) into one
        if kind == cut(second):
            raise TypeRefusedError(
                Reason.OPERAND,
                f"it merges {first} and {second} into {third}, and {operand} is cut along the minor dim: the parts "
                f"are not ranges of {third}",
                f"cut `{operand.value.name}` along {first}, or gather it first",
            )
        return _renamed(kind, first, third)
    if kind == cut(first) and sizes[second] % num_ranks:
        raise TypeRefusedError(
            Reason.OPERAND,
            f"it splits {first} into {sizes[second]} of {second}, and {operand} is cut over {num_ranks} ranks: the "
            f"ends of the parts are not between two of {second}",
            f"choose a number of {second} that the ranks divide",
        )
    return _renamed(kind, first, second)


_OPERANDS: dict[TypedKind, tuple[PlacementKind, ...]] = {
    TypedKind.ALL_REDUCE: (PlacementKind.PARTIAL,),
    TypedKind.REDUCE_SCATTER: (PlacementKind.PARTIAL,),
    TypedKind.ALL_GATHER: (PlacementKind.SHARDED,),
    TypedKind.ALL_TO_ALL: (PlacementKind.SHARDED,),
    TypedKind.CUT: (PlacementKind.REPLICATED, PlacementKind.INVARIANT),
}
"""The operand types of each layout change; other types are refused."""

_RESULTS: dict[TypedKind, tuple[PlacementKind, ...]] = {
    TypedKind.ALL_REDUCE: (PlacementKind.REPLICATED, PlacementKind.INVARIANT),
    TypedKind.ALL_GATHER: (PlacementKind.REPLICATED, PlacementKind.INVARIANT),
}
"""The possible result types of a layout change, if there is more than one."""

_TYPE_TEXT = {
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
"""Relabels that keep the meaning of value and gradient. The first one sums gradients in backward."""


def _changed(op: TypedOp, operand: Operand, axis: str) -> AxisType:
    """The type after a layout change over ``op.axis``. Types over other axes do not change."""
    kind, target = operand.type, op.target
    assert target is not None
    if op.axis != axis:
        return kind
    if op.kind is TypedKind.RELABEL:
        if kind != target and (kind.kind, target.kind) not in _HARMLESS:
            raise relabelled(operand, target)
        return target
    takes = _OPERANDS[op.kind]
    if op.kind is TypedKind.ALL_REDUCE and op.reduction == "max":
        takes = (PlacementKind.VARYING,)
    if kind.kind not in takes:
        raise TypeRefusedError(
            Reason.OPERAND,
            f"it takes {_TYPE_TEXT.get(takes[0], 'values that vary (V)')} over {axis}, and gets {operand}: "
            f"{_CONSEQUENCE[op.kind]}",
            f"pass {_TYPE_TEXT.get(takes[0], 'values that vary (V)')}, or remove it",
        )
    if target.kind not in _RESULTS.get(op.kind, (PlacementKind.SHARDED,)):
        raise TypeRefusedError(Reason.RELABEL, f"its result is declared as {target} over {axis}", "declare R or I")
    return target


def relabelled(operand: Operand, target: AxisType) -> TypeRefusedError:
    """The refusal of a value that is declared as ``target`` but has another type."""
    return TypeRefusedError(
        Reason.RELABEL,
        f"{operand} is declared as {target}, but no operation converts it",
        _suggested_fix(operand, target),
    )


def _suggested_fix(operand: Operand, target: AxisType) -> str:
    name = operand.value.name
    if operand.type == PARTIAL:
        return f"reduce `{name}` over the axis: all_reduce, or reduce_scatter for a cut"
    if operand.type.is_cut and target.is_equal:
        return f"gather `{name}`"
    if target.is_cut and operand.type.is_equal:
        return f"cut `{name}` along {target.dim}"
    return "declare the type that it has, or add an operation that changes the layout"
