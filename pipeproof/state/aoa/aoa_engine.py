"""The AOA engine: makes a map of region copies from statements and the tensors' types and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.problems import grouped
from pipeproof.state.aoa.expand import Expanded, expand
from pipeproof.state.aoa.statements import Program, Statement, statement_text
from pipeproof.state.aoa.tensor_families import TensorMeta, families, with_optimizer_states
from pipeproof.state.aoa.tensor_values import (
    Regrouping,
    TensorValue,
    cast,
    needs_shards,
    permuted,
    regrouped,
    regrouping_of,
    zeros,
)
from pipeproof.state.regions import Region, whole_region
from pipeproof.state.state_codes import NO_EFFECT, SIZE_MISMATCH, AoaError
from pipeproof.state.tensor_map import RegionCopy, StateMap


def program_map(
    program: Program, source: Mapping[str, TensorMeta], target: Mapping[str, TensorMeta] | None
) -> StateMap:
    """Return the map from the source's tensors to the target's.

    Statements name weights; optimizer states follow their weights (see ``tensor_families``). Without a target the
    result has the tensors that statements make or leave unchanged.

    Raises:
        AoaError: PP180, PP181, PP182, PP184.
    """
    return apply_program(program, source, target).state_map


@dataclass(frozen=True, slots=True)
class AppliedProgram:
    """The map, the statements without patterns, and by statement number the tensors that it reads."""

    state_map: StateMap
    expanded: Expanded
    inputs: Mapping[int, tuple[TensorMeta, ...]]


def apply_program(
    program: Program, source: Mapping[str, TensorMeta], target: Mapping[str, TensorMeta] | None
) -> AppliedProgram:
    """Return the map together with the expanded statements and their inputs.

    Raises:
        AoaError: PP180, PP181, PP182, PP184.
    """
    source_families, target_families = families(source), None if target is None else families(target)
    weights = {name: family.weight for name, family in source_families.items()}
    targets = None if target_families is None else {name: family.weight for name, family in target_families.items()}
    expanded = expand(program, weights.keys(), None if targets is None else targets.keys())
    engine = _Engine(weights, targets, expanded)
    results = engine.run()
    return AppliedProgram(
        with_optimizer_states(results, (expanded.removed, engine.dropped), source_families, target_families),
        expanded,
        engine.inputs,
    )


class _Engine:
    def __init__(
        self, source: Mapping[str, TensorMeta], target: Mapping[str, TensorMeta] | None, expanded: Expanded
    ) -> None:
        self._source, self._target, self._expanded = source, target, expanded
        self._values: dict[str, TensorValue | None] = {}
        self._made_by: dict[str, Statement] = {}
        self._readers: dict[str, list[tuple[int, Statement]]] | None = None
        self.dropped: dict[str, list[Region]] = {}
        """Regions of the source's tensors that statements read, and whose result they removed."""
        self.inputs: dict[int, tuple[TensorMeta, ...]] = {}
        """Inputs of each statement as written: before `^T`."""

    def run(self) -> dict[str, TensorValue]:
        findings: dict[tuple[int, str], Finding] = {}
        for number, statement in enumerate(self._expanded.statements):
            if statement.right[0].is_nothing:
                self._drop(statement.left[0].text)
                continue
            try:
                values = self._results(number, statement)
            except AoaError as error:
                values = None
                origin = self._expanded.origins[number]
                findings.setdefault((origin, error.findings[0].code), error.findings[0])
            for index, right in enumerate(statement.right):
                self._values[right.text] = None if values is None else values[index]
                self._made_by[right.text] = statement
        if findings:
            raise AoaError(*findings.values())
        values_by_name = {name: self._value(name) for name in self._expanded.result_names}
        results = {name: value for name, value in values_by_name.items() if value is not None}
        for name, value in results.items():
            self._compare_with_target(name, value, findings)
        if findings:
            raise AoaError(*findings.values())
        return results

    def _drop(self, name: str) -> None:
        value = self._values.get(name)
        for copy in () if value is None else value.copies:
            if copy.source is not None:
                self.dropped.setdefault(copy.source, []).append(copy.source_region)

    def _value(self, name: str) -> TensorValue | None:
        if name in self._values:
            return self._values[name]
        meta = self._source[name]
        region = whole_region(meta.shape)
        return TensorValue(meta.dtype, meta.shape, (RegionCopy(region, name, region),), meta.num_shards)

    def _results(self, number: int, statement: Statement) -> list[TensorValue] | None:
        """Return the results of a statement; None if an input is missing because of an error reported before."""
        if statement.left[0].is_nothing:
            assert self._target is not None
            meta = self._target[statement.right[0].text]
            return [zeros(meta.dtype, meta.shape)]
        values = [self._value(name.text) for name in statement.left]
        inputs = [value for value in values if value is not None]
        if len(inputs) < len(values):
            return None
        self.inputs[number] = tuple(TensorMeta(value.dtype, value.shape) for value in inputs)
        for index, name in enumerate(statement.left):
            if name.transposed:
                inputs[index] = permuted(inputs[index], _reverse(inputs[index]))
        if statement.fused is not None or len(statement.left) + len(statement.right) > 2:
            return self._regrouped(number, statement, inputs)
        (value,) = inputs
        if statement.permutation is not None:
            if statement.permutation and len(statement.permutation) != len(value.shape):
                raise _error(statement, f"a permutation of {len(statement.permutation)} dims, and {_shape_text(value)}")
            return [permuted(value, statement.permutation or _reverse(value))]
        return [self._cast(statement, value)]

    def _cast(self, statement: Statement, value: TensorValue) -> TensorValue:
        if statement.cast is None:
            return value
        if statement.cast.source not in (None, value.dtype):
            raise _error(statement, f"`src_dtype` is {statement.cast.source}, and the tensor has {value.dtype}")
        if statement.cast.target == value.dtype:
            message = f"`{statement.left[0].text}` is {value.dtype} before the cast"
            raise AoaError(NO_EFFECT.finding(message, statement.location, "remove the cast"))
        return cast(value, statement.cast.target)

    def _regrouped(self, number: int, statement: Statement, inputs: list[TensorValue]) -> list[TensorValue]:
        axis = 1 if statement.axis is None else statement.axis
        left, right = needs_shards(statement)
        shards_left = self._shards_of(statement, inputs[0]) if left else 1
        shards_right = self._target_shards(number, statement) if right else 1
        try:
            regrouping = regrouping_of(statement, shards_left, shards_right)
        except ValueError as error:
            raise _error(statement, str(error)) from error
        _require_matching(statement, inputs, axis, regrouping)
        return regrouped(inputs, axis, regrouping)

    def _shards_of(self, statement: Statement, value: TensorValue) -> int:
        if value.num_shards is None:
            name = statement.left[0].text
            raise _error(statement, f"`{name}` comes from several tensors: its number of shards is unknown")
        return value.num_shards

    def _target_shards(self, number: int, statement: Statement) -> int:
        """Return the number of shards in the target of a statement's result, followed through later renames."""
        if self._target is None:
            return 1
        (name,) = (name.text for name in statement.right)
        first = name
        while name not in self._target:
            readers = [reader for at, reader in self._readers_of(name) if at > number]
            if len(readers) != 1 or len(readers[0].right) != 1 or readers[0].right[0].is_nothing:
                message = f"`{first}` becomes no single tensor of the target: its number of shards is unknown"
                raise _error(statement, message)
            number = next(at for at, reader in self._readers_of(name) if at > number)
            name = readers[0].right[0].text
        return self._target[name].num_shards

    def _readers_of(self, name: str) -> list[tuple[int, Statement]]:
        if self._readers is None:
            numbered = enumerate(self._expanded.statements)
            self._readers = grouped((name.text, (number, each)) for number, each in numbered for name in each.left)
        return self._readers.get(name, [])

    def _compare_with_target(self, name: str, value: TensorValue, findings: dict[tuple[int, str], Finding]) -> None:
        if self._target is None:
            return
        meta = self._target[name]
        message = fix = None
        if value.shape != meta.shape:
            message = f"`{name}` becomes {list(value.shape)}, and the target has {list(meta.shape)}"
        elif value.dtype != meta.dtype:
            message = f"`{name}` becomes {value.dtype}, and the target has {meta.dtype}"
            fix = f'write `{name} -> {name}, dtype="{meta.dtype}"`, or cast it where it is made'
        if message is not None:
            made_by = self._made_by.get(name)
            location = None if made_by is None else made_by.location
            key = location.line if location else -len(findings) - 1, "the target"
            findings.setdefault(key, SIZE_MISMATCH.finding(message, location, fix))


def _require_matching(statement: Statement, inputs: list[TensorValue], axis: int, regrouping: Regrouping) -> None:
    """Require matching types, other dims and shard sizes."""
    names = [name.text for name in statement.left]
    first = inputs[0]
    if axis >= len(first.shape):
        fix = "a tensor of one dim has axis 0" if len(first.shape) == 1 else None
        raise _error(statement, f"axis {axis} of {_shape_text(first)}", fix)
    for name, value in zip(names[1:], inputs[1:], strict=True):
        if value.dtype != first.dtype:
            raise _error(statement, f"`{names[0]}` is {first.dtype}, and `{name}` {value.dtype}", "cast one of them")
        if _other_dims(value.shape, axis) != _other_dims(first.shape, axis):
            shapes = f"`{names[0]}` has {list(first.shape)}, and `{name}` {list(value.shape)}"
            raise _error(statement, f"{shapes}: they differ outside axis {axis}")
    for name, value, num_splits in zip(names, inputs, regrouping.num_splits, strict=True):
        if value.shape[axis] % num_splits:
            message = f"`{name}` is {value.shape[axis]} along axis {axis}, which does not divide by {num_splits}"
            raise _error(statement, message)
    sizes = [value.shape[axis] // num_splits for value, num_splits in zip(inputs, regrouping.num_splits, strict=True)]
    if regrouping.even and len(set(sizes)) > 1:
        shards = ", ".join(f"`{name}` {size}" for name, size in zip(names, sizes, strict=True))
        raise _error(statement, f"shards differ in size along axis {axis}: {shards}")


def _other_dims(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def _reverse(value: TensorValue) -> tuple[int, ...]:
    return tuple(reversed(range(len(value.shape))))


def _shape_text(value: TensorValue) -> str:
    return f"the tensor has {len(value.shape)} ({list(value.shape)})"


def _error(statement: Statement, message: str, fix: str | None = None) -> AoaError:
    if statement.location is not None and len(statement_text(statement)) < 160:
        message = f"{message}; in `{statement_text(statement)}`"
    return AoaError(SIZE_MISMATCH.finding(message, statement.location, fix))
