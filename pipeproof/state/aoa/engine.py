"""From statements and the tensors' types and shapes to a map of slabs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeproof.specs.finding import Finding, Location
from pipeproof.state.aoa.codes import DOES_NOT_FIT, IN_VAIN, AoaError, fault
from pipeproof.state.aoa.expand import Expanded, expand
from pipeproof.state.aoa.fused import needs_shards, regrouping_of
from pipeproof.state.aoa.meta import TensorMeta
from pipeproof.state.aoa.optimizer import families, with_states
from pipeproof.state.aoa.syntax import Program, Statement
from pipeproof.state.aoa.values import Regrouping, Value, cast, permuted, regrouped, zeros
from pipeproof.state.aoa.write import written
from pipeproof.state.boxes import Box, whole_box
from pipeproof.state.mapping import Slab, StateMap


def map_of(program: Program, source: Mapping[str, TensorMeta], target: Mapping[str, TensorMeta] | None) -> StateMap:
    """How the target's tensors are made of the source's.

    Statements name weights; what an optimizer keeps of a weight follows it (see optimizer.py). Without a target it
    is what the statements make, and what they leave untouched.

    Raises:
        AoaError: PP180, PP181, PP182, PP184.
    """
    return mapped(program, source, target).state_map


@dataclass(frozen=True, slots=True)
class Mapped:
    """The map, the statements without patterns, and by the number of each what it reads."""

    state_map: StateMap
    expanded: Expanded
    inputs: Mapping[int, tuple[TensorMeta, ...]]


def mapped(program: Program, source: Mapping[str, TensorMeta], target: Mapping[str, TensorMeta] | None) -> Mapped:
    """The same, with what came before it.

    Raises:
        AoaError: PP180, PP181, PP182, PP184.
    """
    before, after = families(source), None if target is None else families(target)
    weights = {name: family.weight for name, family in before.items()}
    targets = None if after is None else {name: family.weight for name, family in after.items()}
    expanded = expand(program, weights.keys(), None if targets is None else targets.keys())
    engine = _Engine(weights, targets, expanded)
    made = engine.run()
    return Mapped(with_states(made, (expanded.removed, engine.dropped), before, after), expanded, engine.inputs)


class _Engine:
    def __init__(
        self, source: Mapping[str, TensorMeta], target: Mapping[str, TensorMeta] | None, expanded: Expanded
    ) -> None:
        self._source, self._target, self._expanded = source, target, expanded
        self._values: dict[str, Value | None] = {}
        self._made_at: dict[str, Statement] = {}
        self._readers: dict[str, list[tuple[int, Statement]]] | None = None
        self.dropped: dict[str, list[Box]] = {}
        """Of the source's tensors what statements made something of and then left out."""
        self.inputs: dict[int, tuple[TensorMeta, ...]] = {}
        """By statement what it reads, as it is written: before `^T`."""

    def run(self) -> dict[str, Value]:
        found: dict[tuple[int, str], Finding] = {}
        for number, statement in enumerate(self._expanded.statements):
            if statement.right[0].is_nothing:
                self._drop(statement.left[0].text)
                continue
            try:
                values = self._results(number, statement)
            except AoaError as error:
                values = None
                origin = self._expanded.origins[number]
                found.setdefault((origin, error.findings[0].code), error.findings[0])
            for index, right in enumerate(statement.right):
                self._values[right.text] = None if values is None else values[index]
                self._made_at[right.text] = statement
        if found:
            raise AoaError(*found.values())
        made = {name: self._value(name) for name in self._expanded.made}
        results = {name: value for name, value in made.items() if value is not None}
        for name, value in results.items():
            self._like_the_target(name, value, found)
        if found:
            raise AoaError(*found.values())
        return results

    def _drop(self, name: str) -> None:
        value = self._values.get(name)
        for slab in () if value is None else value.slabs:
            if slab.source is not None:
                self.dropped.setdefault(slab.source, []).append(slab.source_box)

    def _value(self, name: str) -> Value | None:
        if name in self._values:
            return self._values[name]
        meta = self._source[name]
        box = whole_box(meta.shape)
        return Value(meta.dtype, meta.shape, (Slab(box, name, box),), meta.num_shards)

    def _results(self, number: int, statement: Statement) -> list[Value] | None:
        """What a statement makes; None where what it reads could not be made, which was said."""
        if statement.left[0].is_nothing:
            assert self._target is not None
            meta = self._target[statement.right[0].text]
            return [zeros(meta.dtype, meta.shape)]
        inputs = []
        for name in statement.left:
            value = self._value(name.text)
            if value is None:
                return None
            inputs.append(value)
        self.inputs[number] = tuple(TensorMeta(value.dtype, value.shape) for value in inputs)
        for index, name in enumerate(statement.left):
            if name.transposed:
                inputs[index] = permuted(inputs[index], _reverse(inputs[index]))
        if statement.fused is not None or len(statement.left) + len(statement.right) > 2:
            return self._regrouped(number, statement, inputs)
        (value,) = inputs
        if statement.permutation is not None:
            if statement.permutation and len(statement.permutation) != len(value.shape):
                raise _error(statement, f"a permutation of {len(statement.permutation)} dims, and {_shown(value)}")
            return [permuted(value, statement.permutation or _reverse(value))]
        return [self._cast(statement, value)]

    def _cast(self, statement: Statement, value: Value) -> Value:
        if statement.cast is None:
            return value
        if statement.cast.source not in (None, value.dtype):
            raise _error(statement, f"`src_dtype` is {statement.cast.source}, and the tensor has {value.dtype}")
        if statement.cast.target == value.dtype:
            message = f"`{statement.left[0].text}` is {value.dtype} before the cast"
            raise AoaError(fault(IN_VAIN, message, statement.place, "remove the cast"))
        return cast(value, statement.cast.target)

    def _regrouped(self, number: int, statement: Statement, inputs: list[Value]) -> list[Value]:
        axis = 1 if statement.axis is None else statement.axis
        left, right = needs_shards(statement)
        shards_left = self._shards_of(statement, inputs[0]) if left else 1
        shards_right = self._shards_ahead(number, statement) if right else 1
        try:
            regrouping = regrouping_of(statement, shards_left, shards_right)
        except ValueError as error:
            raise _error(statement, str(error)) from error
        _fits(statement, inputs, axis, regrouping)
        return regrouped(inputs, axis, regrouping)

    def _shards_of(self, statement: Statement, value: Value) -> int:
        if value.num_shards is None:
            name = statement.left[0].text
            raise _error(statement, f"`{name}` comes of several tensors: in how many parts it is kept is not known")
        return value.num_shards

    def _shards_ahead(self, number: int, statement: Statement) -> int:
        """In how many parts the target keeps what a statement makes, through the renames that follow."""
        if self._target is None:
            return 1
        (name,) = (name.text for name in statement.right)
        first = name
        while name not in self._target:
            readers = [one for at, one in self._readers_of(name) if at > number]
            if len(readers) != 1 or len(readers[0].right) != 1 or readers[0].right[0].is_nothing:
                message = f"`{first}` becomes no tensor of the target by itself: in how many parts is not known"
                raise _error(statement, message)
            number = next(at for at, one in self._readers_of(name) if at > number)
            name = readers[0].right[0].text
        return self._target[name].num_shards

    def _readers_of(self, name: str) -> list[tuple[int, Statement]]:
        if self._readers is None:
            self._readers = {}
            for number, statement in enumerate(self._expanded.statements):
                for read in statement.left:
                    self._readers.setdefault(read.text, []).append((number, statement))
        return self._readers.get(name, [])

    def _like_the_target(self, name: str, value: Value, found: dict[tuple[int, str], Finding]) -> None:
        if self._target is None:
            return
        meta = self._target[name]
        wrong = mend = None
        if value.shape != meta.shape:
            wrong = f"`{name}` becomes {list(value.shape)}, and the target has {list(meta.shape)}"
        elif value.dtype != meta.dtype:
            wrong = f"`{name}` becomes {value.dtype}, and the target has {meta.dtype}"
            mend = f'write `{name} -> {name}, dtype="{meta.dtype}"`, or cast it where it is made'
        if wrong is not None:
            made_at = self._made_at.get(name)
            place = None if made_at is None else made_at.place
            found.setdefault((place.line if place else -len(found) - 1, "the target"), _fault(wrong, place, mend))


def _fits(statement: Statement, inputs: list[Value], axis: int, regrouping: Regrouping) -> None:
    """Types, other dims and sizes of parts agree."""
    names = [name.text for name in statement.left]
    first = inputs[0]
    if axis >= len(first.shape):
        mend = "a tensor of one dim has axis 0" if len(first.shape) == 1 else None
        raise _error(statement, f"axis {axis} of {_shown(first)}", mend)
    for name, value in zip(names[1:], inputs[1:], strict=True):
        if value.dtype != first.dtype:
            raise _error(statement, f"`{names[0]}` is {first.dtype}, and `{name}` {value.dtype}", "cast one of them")
        if _beside(value.shape, axis) != _beside(first.shape, axis):
            shapes = f"`{names[0]}` has {list(first.shape)}, and `{name}` {list(value.shape)}"
            raise _error(statement, f"{shapes}: they differ beside axis {axis}")
    for name, value, cuts in zip(names, inputs, regrouping.cuts, strict=True):
        if value.shape[axis] % cuts:
            message = f"`{name}` is {value.shape[axis]} along axis {axis}, which does not divide by {cuts}"
            raise _error(statement, message)
    sizes = [value.shape[axis] // cuts for value, cuts in zip(inputs, regrouping.cuts, strict=True)]
    if regrouping.even and len(set(sizes)) > 1:
        parts = ", ".join(f"`{name}` {size}" for name, size in zip(names, sizes, strict=True))
        raise _error(statement, f"parts are of different sizes along axis {axis}: {parts}")


def _beside(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def _reverse(value: Value) -> tuple[int, ...]:
    return tuple(reversed(range(len(value.shape))))


def _shown(value: Value) -> str:
    return f"the tensor has {len(value.shape)} ({list(value.shape)})"


def _error(statement: Statement, message: str, mend: str | None = None) -> AoaError:
    if statement.place is not None and len(written(statement)) < 160:
        message = f"{message}; in `{written(statement)}`"
    return AoaError(_fault(message, statement.place, mend))


def _fault(message: str, place: Location | None, mend: str | None) -> Finding:
    return fault(DOES_NOT_FIT, message, place, mend)
