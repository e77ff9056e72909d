"""Inverse of AOA statements: derived one by one from the last to the first, and checked.

A statement with patterns (``$LAYER_ID``) has an inverse with patterns, if it is the same for all numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd

from pipeproof.diagnostics.finding import Finding
from pipeproof.state.aoa.aoa_engine import AppliedProgram, apply_program, program_map
from pipeproof.state.aoa.statements import NOTHING, Cast, Name, Program, Statement, statement_text
from pipeproof.state.aoa.tensor_families import TensorMeta, weights_of
from pipeproof.state.regions import whole_region
from pipeproof.state.state_codes import NO_INVERSE, AoaError
from pipeproof.state.tensor_map import StateMap, compose, inverse_permutation, invert, map_differences

_EXACT = {("float16", "float32"), ("bfloat16", "float32")}
"""Lossless casts: from, to."""


def inverse(program: Program, source: Mapping[str, TensorMeta], target: Mapping[str, TensorMeta] | None) -> Program:
    """Return the program that makes ``source`` from ``target``, checked to undo the first one on each weight.

    Raises:
        AoaError: The program itself is wrong, or PP183: it has no inverse.
    """
    weights, targets = weights_of(source), None if target is None else weights_of(target)
    forward = apply_program(program, weights, targets)
    made = {name: TensorMeta(tensor.dtype, tensor.shape) for name, tensor in forward.state_map.tensors.items()}
    target_metas = made if targets is None else targets
    inverter = _Inverter(program, forward, weights.keys() | target_metas.keys())
    keep_patterns = Program(tuple(inverter.statements(keep_patterns=True)), program.file)
    if not _is_inverse(keep_patterns, forward.state_map, weights, target_metas):
        keep_patterns = Program(tuple(inverter.statements(keep_patterns=False)), program.file)
        lost = [name for name in sorted(weights) if name not in forward.state_map.removed]
        if not _is_inverse(keep_patterns, forward.state_map, weights, target_metas):
            raise AoaError(*_lost_findings(forward.state_map, {name: weights[name] for name in lost}))
    return keep_patterns


@dataclass(frozen=True, slots=True)
class _Inverted:
    """The inverse of one statement without patterns, and the facts that it was derived from."""

    facts: InverseFacts
    statements: tuple[Statement, ...]


class _Inverter:
    """Inverses of a program's statements, from the last to the first."""

    def __init__(self, program: Program, forward: AppliedProgram, names: set[str]) -> None:
        self._program, self._forward = program, forward
        self._taken = names | {name.text for inverted in forward.expanded.statements for name in inverted.names}
        self._inverted: dict[int, list[_Inverted]] = {}
        """Inverses by original statement."""
        self._all: list[_Inverted] = []
        available = set(forward.expanded.result_names)
        findings: dict[int, Finding] = {}
        for number in reversed(range(len(forward.expanded.statements))):
            origin = forward.expanded.origins[number]
            try:
                inverted = self._invert(number, available)
            except AoaError as error:
                findings[origin] = error.findings[0]
                continue
            self._all.append(inverted)
            self._inverted.setdefault(origin, []).append(inverted)
        if findings:
            raise AoaError(*(findings[origin] for origin in sorted(findings)))

    def statements(self, *, keep_patterns: bool) -> Iterator[Statement]:
        """Yield the inverse in the order of execution."""
        if not keep_patterns:
            for inverted in self._all:
                yield from inverted.statements
            return
        for origin in sorted(self._inverted, reverse=True):
            written_as, same_origin = self._program.statements[origin], self._inverted[origin]
            facts = {inverted.facts for inverted in same_origin}
            if len(facts) == 1 and _keeps_pattern(written_as, same_origin[0].facts):
                yield from inverse_statements(written_as, same_origin[0].facts, self._new_name)
            else:
                for inverted in same_origin:
                    yield from inverted.statements

    def _invert(self, number: int, available: set[str]) -> _Inverted:
        statement = self._forward.expanded.statements[number]
        if statement.right[0].is_nothing:
            message = f"`{statement.left[0].text}` is removed, and cannot be restored"
            raise AoaError(NO_INVERSE.finding(message, statement.location, "keep it in the target"))
        available -= {name.text for name in statement.right}
        present = []
        for name in statement.left:
            if not name.is_nothing:
                present.append(name.text in available)
                available.add(name.text)
        facts = self._facts(number, statement, tuple(present))
        return _Inverted(facts, tuple(inverse_statements(statement, facts, self._new_name)))

    def _facts(self, number: int, statement: Statement, present: tuple[bool, ...]) -> InverseFacts:
        if statement.left[0].is_nothing:
            return InverseFacts((), None, ())
        inputs = self._forward.inputs[number]
        sizes: tuple[int, ...] = ()
        if len(inputs) > 1 and statement.fused is None and statement.axis is not None:
            pairs = zip(statement.left, inputs, strict=True)
            shapes = (meta.shape[::-1] if name.transposed else meta.shape for name, meta in pairs)
            sizes = tuple(shape[statement.axis] for shape in shapes)
            sizes = () if len(set(sizes)) == 1 else sizes
        cast_back = None
        if statement.cast is not None:
            cast_back = inputs[0].dtype
            if (cast_back, statement.cast.target) not in _EXACT:
                message = f"the cast from {cast_back} to {statement.cast.target} loses bits"
                raise AoaError(NO_INVERSE.finding(f"{message}; in `{statement_text(statement)}`", statement.location))
        return InverseFacts(sizes, cast_back, present)

    def _new_name(self, name: str) -> str:
        while name in self._taken:
            name += "_"
        return name


def _keeps_pattern(statement: Statement, facts: InverseFacts) -> bool:
    """Return True if the inverse can keep the pattern as it is written."""
    names: tuple[Name, ...] = statement.names
    if not any(name.ids or name.may_be_many for name in names):
        return True
    many = any(name.may_be_many for name in names)
    return not ("$LAYER_ID_OFFSET" in names[0].ids or any(facts.present) or (many and facts.sizes))


def _is_inverse(
    program: Program, forward: StateMap, weights: Mapping[str, TensorMeta], target_metas: Mapping[str, TensorMeta]
) -> bool:
    """Return True if the composition of both maps is the identity on each weight."""
    try:
        cast_back = program_map(program, target_metas, weights)
        by_itself = invert(forward, weights)
    except (AoaError, ValueError):
        return False
    # with duplicated elements, the inverse program may use another copy than the inverse map
    others = {difference.tensor for difference in map_differences(cast_back, by_itself)} | (
        weights.keys() - by_itself.tensors.keys()
    )
    through = compose(forward, StateMap({name: cast_back.tensors[name] for name in others}))
    return all(
        copy.source == name and copy.source_region == copy.region and copy.permutation is None
        for name, tensor in through.tensors.items()
        for copy in tensor.copies
    )


def _lost_findings(forward: StateMap, weights: Mapping[str, TensorMeta]) -> Iterator[Finding]:
    """Yield the tensors that the target lacks, whole or in part."""
    readers = forward.readers()
    volumes = {name: sum(reader.region.numel for reader in readers.get(name, ())) for name in weights}
    missing = [name for name, volume in volumes.items() if volume < whole_region(weights[name].shape).numel]
    for name in missing[:8]:
        what_remains = "nothing" if not volumes[name] else "a part"
        message = f"the target has {what_remains} of the source's `{name}`"
        yield NO_INVERSE.finding(message, None, "keep it in the target")
    if not missing:
        yield NO_INVERSE.finding("the inverse statements do not restore the source", None)


NewName = Callable[[str], str]
"""Function that returns a name that no tensor has, similar to a given one."""


@dataclass(frozen=True, slots=True)
class InverseFacts:
    """Facts that the inverse depends on in addition to the statement.

    ``sizes`` along the axis of merged tensors, where they differ; the type of the ``cast_back``; and, for each name to
    the left, if it is ``present`` because another statement restores it.
    """

    sizes: tuple[int, ...]
    cast_back: str | None
    present: tuple[bool, ...]


def inverse_statements(statement: Statement, facts: InverseFacts, new_name: NewName) -> Iterator[Statement]:
    """Yield the statements that restore a statement's left side from its right side."""
    if statement.left[0].is_nothing or all(facts.present):
        for name in statement.right:
            yield Statement((name,), (Name(NOTHING),))
        return
    target_metas, after = _restored_names(statement, facts, new_name)
    if facts.sizes:
        yield from _uneven_split(statement, target_metas, facts.sizes, new_name)
    else:
        permutation = statement.permutation
        yield replace(
            statement,
            left=tuple(replace(name, transposed=_reads_view(statement)) for name in statement.right),
            right=tuple(target_metas),
            permutation=None if permutation is None else inverse_permutation(permutation),
            cast=None if facts.cast_back is None else _reverse_cast(statement, facts.cast_back),
        )
    yield from after


def _restored_names(statement: Statement, facts: InverseFacts, new_name: NewName) -> tuple[list[Name], list[Statement]]:
    """Return the names that the inverse makes, and statements after it for ``^T`` views and spare tensors."""
    target_metas, after = [], []
    for name, present in zip(statement.left, facts.present or (False,) * len(statement.left), strict=False):
        made = plain = replace(name, transposed=False, location=None)
        if present:
            made = Name(new_name(f"{name.text}.again"))
            after.append(Statement((made,), (Name(NOTHING),)))
        elif name.transposed and not _reads_view(statement):
            made = Name(new_name(f"{name.text}.transposed"))
            after.append(Statement((replace(made, transposed=True),), (plain,)))
        target_metas.append(made)
    return target_metas, after


def _reads_view(statement: Statement) -> bool:
    """Return True if the inverse reads its tensor as ``^T``: the statement did so, and changes no other dims."""
    counts = (len(statement.left), len(statement.right))
    changes = statement.fused is not None or statement.permutation is not None
    return counts == (1, 1) and statement.left[0].transposed and not changes


def _reverse_cast(statement: Statement, dtype: str) -> Cast:
    assert statement.cast is not None
    return Cast(dtype, None if statement.cast.source is None else statement.cast.target)


def _uneven_split(
    statement: Statement, target_metas: list[Name], sizes: tuple[int, ...], new_name: NewName
) -> Iterator[Statement]:
    """Yield an even split into tensors of the largest common size, and merges of these."""
    size = gcd(*sizes)
    (whole,) = statement.right
    part = new_name(f"{whole.text}.part")
    yield Statement((whole,), (Name(part, numbers=(0, sum(sizes) // size)),), statement.axis)
    start = 0
    for name, length in zip(target_metas, sizes, strict=True):
        stop = start + length // size
        yield Statement((Name(part, numbers=(start, stop)),), (name,), statement.axis)
        start = stop
