"""Typed op programs: the operations of a layer, with the type of every value over every mesh axis.

A ``ProgramBuilder`` writes a program: inputs and parameters with their types, then operations on named values. Dims
have names and one size per program. So a product over ``h`` contracts the dim ``h`` of both operands, and a cut along
``s`` is ``S(s)``. ``derive_types`` checks the program; the builder does not.

Layout changes are separate operations; no other operation changes a layout. A parameter that is not cut may be used
with any operand. If the other operands differ over an axis, each rank has an addend of its gradient, and a reduction
before the optimizer is needed (``partial_over``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod

from pipeproof.specs.axis_layout import Placement, PlacementKind

# Types of values over mesh axes: the layout of a tensor, and of its gradient, over the ranks of an axis. The five kinds
# are the kinds in ``specs/axis_layout.py``. Here a cut names its dim (``S(s)``), because the dims of a value change
# from operation to operation.
#
# ====== ============ ============================================== ========
# letter kind         values on the ranks of the axis                gradient
# ====== ============ ============================================== ========
# R      replicated   equal values                                   P
# I      invariant    equal values                                   I
# S(d)   sharded      parts along dim d, in rank order               S(d)
# P      partial      addends                                        R
# V      varying      different values, otherwise unknown            V
# ====== ============ ============================================== ========


_LETTERS = {
    PlacementKind.REPLICATED: "R",
    PlacementKind.INVARIANT: "I",
    PlacementKind.PARTIAL: "P",
    PlacementKind.VARYING: "V",
}
_KINDS = {letter: kind for kind, letter in _LETTERS.items()}
_CUT = re.compile(r"S\((\w+)\)", re.ASCII)


@dataclass(frozen=True, slots=True)
class AxisType:
    """The layout of a value over one axis; ``dim`` is the dim of a cut, empty for the other kinds."""

    kind: PlacementKind
    dim: str = ""

    def __post_init__(self) -> None:
        if bool(self.dim) != (self.kind is PlacementKind.SHARDED):
            raise ValueError(f"type {self.kind} with dim {self.dim!r}: exactly 'sharded' has a dim")

    @property
    def is_equal(self) -> bool:
        """True if every rank of the axis has the same values."""
        return self.kind in (PlacementKind.REPLICATED, PlacementKind.INVARIANT)

    @property
    def is_cut(self) -> bool:
        """True if each rank has a part of the value."""
        return self.kind is PlacementKind.SHARDED

    @property
    def dual(self) -> AxisType:
        """The type of the gradient of a value of this type."""
        return AxisType(Placement(self.kind, 0 if self.is_cut else None).dual.kind, self.dim)

    def __str__(self) -> str:
        return f"S({self.dim})" if self.is_cut else _LETTERS[self.kind]


REPLICATED = AxisType(PlacementKind.REPLICATED)
INVARIANT = AxisType(PlacementKind.INVARIANT)
PARTIAL = AxisType(PlacementKind.PARTIAL)
VARYING = AxisType(PlacementKind.VARYING)


def cut(dim: str) -> AxisType:
    """Parts along ``dim``, in rank order."""
    return AxisType(PlacementKind.SHARDED, dim)


def axis_type(text: str) -> AxisType:
    """Read ``R``, ``I``, ``P``, ``V`` or ``S(dim)``.

    Raises:
        ValueError: another text.
    """
    if text in _KINDS:
        return AxisType(_KINDS[text])
    if match := _CUT.fullmatch(text):
        return cut(match[1])
    raise ValueError(f"{text!r} is not a type over an axis; examples: R, I, P, V, S(s)")


@dataclass(frozen=True, slots=True)
class Value:
    """A named tensor: its dims by name, and its type over each axis of the mesh (invariant by default).

    ``differentiable`` is False for values without a gradient: token ids, masks, positions, a detached maximum.
    """

    name: str
    dims: tuple[str, ...]
    types: Mapping[str, AxisType]
    differentiable: bool = True

    def over(self, axis: str) -> AxisType:
        """The value's type over ``axis``."""
        return self.types.get(axis, INVARIANT)

    def local_numel(self, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> int:
        """Elements on one rank, with global ``sizes`` by dim and axis sizes ``mesh``.

        Raises:
            ValueError: the ranks that cut a dim do not divide it.
        """
        local = {dim: sizes[dim] for dim in self.dims}
        for axis, size in mesh.items():
            kind = self.over(axis)
            if not kind.is_cut:
                continue
            if local[kind.dim] % size:
                raise ValueError(f"{self.name}: dim {kind.dim} of {sizes[kind.dim]} does not divide over {axis} {size}")
            local[kind.dim] //= size
        return prod(local.values())


class TypedKind(StrEnum):
    """The kind of an operation of a typed program."""

    ADD = "add"
    """Sum of the operands, broadcast by dim name."""
    MULTIPLY = "multiply"
    """Product of the operands, summed over the dims ``over``: a matmul, a scale, a plain sum."""
    APPLY = "apply"
    """Any other function, elementwise except along the dims ``over``, along which it mixes: norm, softmax."""
    MAX = "max"
    """The maximum along ``over``, without a gradient."""
    PICK = "pick"
    """Entries of a table at given indices along ``over``, zero for indices on other ranks: embedding, target logit."""
    RESHAPE = "reshape"
    """One dim split into ``over`` (major, minor), or two merged into one."""
    SELECT = "select"
    """A range of one dim, under a new name."""
    DISPATCH = "dispatch"
    """Tokens into the slots of their experts."""
    COMBINE = "combine"
    """Slots back to tokens, times weights."""
    DETACH = "detach"
    """The same value without a gradient."""
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    CUT = "cut"
    """Each rank keeps its part of a value that all ranks have."""
    RELABEL = "relabel"
    """The same local values with another type; I to R enters a parallel region."""


@dataclass(frozen=True, slots=True)
class TypedOp:
    """One operation; ``output`` is its result, whose types depend on the operands.

    ``over`` are the dims that it sums over, mixes along, splits or merges. ``axis`` and ``target`` are the mesh axis
    and the resulting type of a layout change; ``reduction`` is an all-reduce's. ``dtype`` and ``grad_dtype`` are the
    types in which a layout change moves elements and their gradients, None for the type of activations.
    """

    kind: TypedKind
    inputs: tuple[str, ...]
    output: Value
    over: tuple[str, ...] = ()
    axis: str = ""
    target: AxisType | None = None
    reduction: str = "sum"
    dtype: str | None = None
    grad_dtype: str | None = None

    @property
    def name(self) -> str:
        """The name of the operation, which is the name of its result."""
        return self.output.name


@dataclass(frozen=True, slots=True)
class TypedParameter:
    """A weight of a program: cut, or equal on all ranks of an axis.

    ``reduced_over`` are the axes over which its gradient is summed before the optimizer.
    """

    value: Value
    reduced_over: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TypedProgram:
    """A layer as typed operations; ``mesh`` has the sizes of the axes, ``sizes`` the global sizes of the dims.

    If several axes cut one dim, the first axis of ``mesh`` cuts finest: its ranks divide the part of one rank of the
    next axis. ``results`` are the outputs of the program, with the types that readers expect.
    """

    name: str
    mesh: Mapping[str, int]
    sizes: Mapping[str, int]
    inputs: tuple[Value, ...]
    parameters: tuple[TypedParameter, ...]
    ops: tuple[TypedOp, ...]
    results: tuple[Value, ...]


class ProgramBuilder:
    """Builder of a ``TypedProgram``. Every method except ``result`` and ``build`` returns the name of the new value.

    Raises:
        ValueError: (any method) a name exists already, a value or dim is unknown, or a type cannot be parsed.
    """

    def __init__(self, name: str, mesh: Mapping[str, int], sizes: Mapping[str, int]) -> None:
        self._name, self._mesh, self._sizes = name, dict(mesh), dict(sizes)
        self._values: dict[str, Value] = {}
        self._inputs: list[Value] = []
        self._parameters: list[TypedParameter] = []
        self._ops: list[TypedOp] = []
        self._results: list[Value] = []

    def input(self, name: str, dims: str, **types: str) -> str:
        """An input: dims separated by spaces, types by axis (``tp="S(s)"``)."""
        self._inputs.append(self._value(name, dims.split(), types))
        return name

    def constant(self, name: str, dims: str, **types: str) -> str:
        """An input without a gradient: token ids, a mask, positions."""
        self._inputs.append(self._value(name, dims.split(), types, differentiable=False))
        return name

    def parameter(
        self, name: str, dims: str, *, reduced_over: Sequence[str] = (), trained: bool = True, **types: str
    ) -> str:
        """A weight. Over axes without a type every rank has all of it. It has no gradient if it is not ``trained``."""
        value = self._value(name, dims.split(), types, differentiable=trained)
        self._parameters.append(TypedParameter(value, tuple(reduced_over)))
        return name

    def add(self, name: str, *operands: str) -> str:
        """The sum of the operands; a dim that an operand lacks is broadcast."""
        return self._op(TypedKind.ADD, name, operands, self._joined(operands))

    def multiply(self, name: str, *operands: str, over: str = "") -> str:
        """The product of the operands, summed over the dims ``over``: ``multiply("y", "x", "w", over="h")``."""
        dims = [dim for dim in self._joined(operands) if dim not in over.split()]
        return self._op(TypedKind.MULTIPLY, name, operands, dims, over=over.split())

    def apply(self, name: str, *operands: str, along: str = "", drop: str = "") -> str:
        """A non-linear function that mixes along the dims ``along`` and removes the dims ``drop``."""
        dims = [dim for dim in self._joined(operands) if dim not in drop.split()]
        return self._op(TypedKind.APPLY, name, operands, dims, over=[*along.split(), *drop.split()])

    def maximum(self, name: str, operand: str, over: str) -> str:
        """The maximum along ``over``, as a constant."""
        dims = [dim for dim in self._joined([operand]) if dim != over]
        return self._op(TypedKind.MAX, name, [operand], dims, over=[over], differentiable=False)

    def pick(self, name: str, table: str, indices: str, over: str) -> str:
        """``table`` at ``indices`` along ``over``; zero if the rank does not have the index."""
        dims = [dim for dim in self._joined([indices, table]) if dim != over]
        return self._op(TypedKind.PICK, name, [table, indices], dims, over=[over])

    def split(self, name: str, operand: str, dim: str, into: str) -> str:
        """``dim`` as two dims, major first: ``split("heads", "x", "c", "a e")``."""
        major, minor = into.split()
        if self._size(major) * self._size(minor) != self._size(dim):
            raise ValueError(f"{name}: {major} times {minor} is not the size of {dim}")
        dims = [part for d in self._value_of(operand).dims for part in ((major, minor) if d == dim else (d,))]
        return self._op(TypedKind.RESHAPE, name, [operand], dims, over=[dim, major, minor])

    def merge(self, name: str, operand: str, dims: str, into: str) -> str:
        """Two neighbouring dims as one: ``merge("x", "heads", "a d", "h")``."""
        major, minor = dims.split()
        if self._size(major) * self._size(minor) != self._size(into):
            raise ValueError(f"{name}: {major} times {minor} is not the size of {into}")
        kept = [into if d == major else d for d in self._value_of(operand).dims if d != minor]
        return self._op(TypedKind.RESHAPE, name, [operand], kept, over=[major, minor, into])

    def select(self, name: str, operand: str, dim: str, into: str) -> str:
        """A range of ``dim``, or the whole of it, under the name ``into``."""
        dims = [into if d == dim else d for d in self._value_of(operand).dims]
        return self._op(TypedKind.SELECT, name, [operand], dims, over=[dim, into])

    def dispatch(self, name: str, tokens: str, experts: str, *, dim: str, into: str) -> str:
        """Tokens (along ``dim``) into expert slots ``into`` (expert dim, slot dim), by expert ids."""
        dims = [part for d in self._value_of(tokens).dims for part in (into.split() if d == dim else (d,))]
        return self._op(TypedKind.DISPATCH, name, [tokens, experts], dims, over=[dim, *into.split()])

    def combine(self, name: str, slots: str, experts: str, weights: str, *, slot_dims: str, dim: str) -> str:
        """Slots (``slot_dims``: expert dim, slot dim) back to tokens along ``dim``, times the routing weights."""
        expert_dim, slot_dim = slot_dims.split()
        dims = [dim if d == slot_dim else d for d in self._value_of(slots).dims if d != expert_dim]
        return self._op(
            TypedKind.COMBINE, name, [slots, experts, weights], dims, over=[expert_dim, slot_dim, dim]
        )  # fmt: skip

    def detach(self, name: str, operand: str) -> str:
        """The value as a constant, without a gradient."""
        return self._op(
            TypedKind.DETACH, name, [operand], self._value_of(operand).dims, differentiable=False
        )  # fmt: skip

    def all_reduce(
        self, name: str, operand: str, axis: str, *, to: str = "I", reduction: str = "sum", dtype: str | None = None
    ) -> str:
        """The sum of the ranks' addends, on each rank. ``max`` takes any values of a constant."""
        self._change(TypedKind.ALL_REDUCE, name, operand, axis, axis_type(to), reduction)
        self._ops[-1] = replace(self._ops[-1], dtype=dtype)
        return name

    def all_gather(self, name: str, operand: str, axis: str, *, to: str = "R") -> str:
        """The parts of all ranks, on each rank."""
        return self._change(TypedKind.ALL_GATHER, name, operand, axis, axis_type(to))

    def reduce_scatter(self, name: str, operand: str, axis: str, dim: str) -> str:
        """Each rank's part along ``dim`` of the sum of the ranks' addends."""
        return self._change(TypedKind.REDUCE_SCATTER, name, operand, axis, cut(dim))

    def all_to_all(
        self, name: str, operand: str, axis: str, dim: str, *, dtype: str | None = None, grad_dtype: str | None = None
    ) -> str:
        """Change a cut along one dim to a cut along ``dim``. Elements and gradients may be sent in other types."""
        self._change(TypedKind.ALL_TO_ALL, name, operand, axis, cut(dim))
        self._ops[-1] = replace(self._ops[-1], dtype=dtype, grad_dtype=grad_dtype)
        return name

    def cut(self, name: str, operand: str, axis: str, dim: str) -> str:
        """Each rank's part along ``dim`` of a value that all ranks have."""
        return self._change(TypedKind.CUT, name, operand, axis, cut(dim))

    def relabel(self, name: str, operand: str, axis: str, *, to: str = "R") -> str:
        """The same local values with another type: I to R is correct and sums the gradients; most others are wrong."""
        return self._change(TypedKind.RELABEL, name, operand, axis, axis_type(to))

    def result(self, name: str, **types: str) -> None:
        """Declare the value ``name`` as an output with these types (invariant over other axes)."""
        value = self._value_of(name)
        declared = {axis: axis_type(text) for axis, text in types.items()}
        self._results.append(Value(name, value.dims, declared, value.differentiable))

    def build(self) -> TypedProgram:
        """Return the program."""
        return TypedProgram(
            self._name,
            dict(self._mesh),
            dict(self._sizes),
            tuple(self._inputs),
            tuple(self._parameters),
            tuple(self._ops),
            tuple(self._results),
        )

    def _change(
        self, kind: TypedKind, name: str, operand: str, axis: str, target: AxisType, reduction: str = "sum"
    ) -> str:
        value = self._value_of(operand)
        if target.is_cut and target.dim not in value.dims:
            raise ValueError(f"{name}: {operand} has no dim {target.dim}")
        output = self._value(name, value.dims, {}, differentiable=value.differentiable and reduction == "sum")
        self._ops.append(TypedOp(kind, (operand,), output, axis=axis, target=target, reduction=reduction))
        return name

    def _op(
        self,
        kind: TypedKind,
        name: str,
        inputs: Sequence[str],
        dims: Sequence[str],
        *,
        over: Sequence[str] = (),
        differentiable: bool = True,
    ) -> str:
        flows = differentiable and any(self._value_of(operand).differentiable for operand in inputs)
        output = self._value(name, dims, {}, differentiable=flows)
        for dim in over:
            self._size(dim)
        self._ops.append(TypedOp(kind, tuple(inputs), output, tuple(over)))
        return name

    def _value(self, name: str, dims: Sequence[str], types: Mapping[str, str], *, differentiable: bool = True) -> Value:
        if name in self._values:
            raise ValueError(f"program {self._name} has a value {name} already")
        for dim in dims:
            self._size(dim)
        parsed = {axis: axis_type(text) for axis, text in types.items()}
        for axis_type_ in parsed.values():
            if axis_type_.is_cut and axis_type_.dim not in dims:
                raise ValueError(f"{name}: {axis_type_} cuts a dim that is not among {list(dims)}")
        self._values[name] = Value(name, tuple(dims), parsed, differentiable)
        return self._values[name]

    def _value_of(self, name: str) -> Value:
        if name not in self._values:
            raise ValueError(f"program {self._name} has no value {name}; it has {list(self._values)}")
        return self._values[name]

    def _joined(self, operands: Sequence[str]) -> list[str]:
        return list(dict.fromkeys(dim for operand in operands for dim in self._value_of(operand).dims))

    def _size(self, dim: str) -> int:
        if dim not in self._sizes:
            raise ValueError(f"program {self._name} has no dim {dim}; it has {list(self._sizes)}")
        return self._sizes[dim]
