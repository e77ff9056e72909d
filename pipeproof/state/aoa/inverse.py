"""Statements that make the source's tensors again of the target's: derived one by one from the last, and checked.

Where a statement stands for many (``$LAYER_ID``), its inverse does, too, if that is one for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipeproof.specs.finding import Finding
from pipeproof.state.aoa.codes import NO_INVERSE, AoaError, fault
from pipeproof.state.aoa.engine import Mapped, map_of, mapped
from pipeproof.state.aoa.meta import TensorMeta
from pipeproof.state.aoa.optimizer import families
from pipeproof.state.aoa.syntax import Name, Program, Statement
from pipeproof.state.aoa.turned import Facts, turned
from pipeproof.state.aoa.write import written
from pipeproof.state.boxes import whole_box
from pipeproof.state.mapping import StateMap, TensorMap, differences, joined, turned_round

_EXACT = {("float16", "float32"), ("bfloat16", "float32")}
"""Casts that lose nothing: from, to."""


def inverse(program: Program, source: Mapping[str, TensorMeta], target: Mapping[str, TensorMeta] | None) -> Program:
    """The program that makes ``source`` of ``target``, checked to undo the first one on each weight.

    Raises:
        AoaError: what the program itself has wrong; PP183, what cannot be undone.
    """
    weights = {name: family.weight for name, family in families(source).items()}
    goals = None if target is None else {name: family.weight for name, family in families(target).items()}
    forward = mapped(program, weights, goals)
    made = {name: _meta(tensor) for name, tensor in forward.state_map.tensors.items()} if goals is None else goals
    steps = _Steps(program, forward, weights.keys() | made.keys())
    folded = Program(tuple(steps.statements(folded=True)), program.file)
    if not _undoes(folded, forward.state_map, weights, made):
        folded = Program(tuple(steps.statements(folded=False)), program.file)
        lost = [name for name in sorted(weights) if name not in forward.state_map.removed]
        if not _undoes(folded, forward.state_map, weights, made):
            raise AoaError(*_lost(forward.state_map, {name: weights[name] for name in lost}))
    return folded


def _meta(tensor: TensorMap) -> TensorMeta:
    return TensorMeta(tensor.dtype, tensor.shape)


@dataclass(frozen=True, slots=True)
class _Turned:
    """The inverse of one statement without patterns, and what it was derived from."""

    facts: Facts
    statements: tuple[Statement, ...]


class _Steps:
    """A program's statements turned round, from the last to the first."""

    def __init__(self, program: Program, forward: Mapped, names: set[str]) -> None:
        self._program, self._forward = program, forward
        self._taken = names | {name.text for one in forward.expanded.statements for name in one.names}
        self._turned: dict[int, list[_Turned]] = {}
        """By statement as it was written."""
        self._all: list[_Turned] = []
        have = set(forward.expanded.made)
        found: dict[int, Finding] = {}
        for number in reversed(range(len(forward.expanded.statements))):
            origin = forward.expanded.origins[number]
            try:
                one = self._turn(number, have)
            except AoaError as error:
                found[origin] = error.findings[0]
                continue
            self._all.append(one)
            self._turned.setdefault(origin, []).append(one)
        if found:
            raise AoaError(*(found[origin] for origin in sorted(found)))

    def statements(self, *, folded: bool) -> Iterator[Statement]:
        """The inverse, in the order in which it is carried out."""
        if not folded:
            for one in self._all:
                yield from one.statements
            return
        for origin in sorted(self._turned, reverse=True):
            written_as, alike = self._program.statements[origin], self._turned[origin]
            facts = {one.facts for one in alike}
            if len(facts) == 1 and _may_stay(written_as, alike[0].facts):
                yield from turned(written_as, alike[0].facts, self._new_name)
            else:
                for one in alike:
                    yield from one.statements

    def _turn(self, number: int, have: set[str]) -> _Turned:
        statement = self._forward.expanded.statements[number]
        if statement.right[0].is_nothing:
            message = f"`{statement.left[0].text}` is left out, and cannot be made again"
            raise AoaError(fault(NO_INVERSE, message, statement.place, "keep it in the target"))
        have -= {name.text for name in statement.right}
        again = []
        for name in statement.left:
            if not name.is_nothing:
                again.append(name.text in have)
                have.add(name.text)
        facts = self._facts(number, statement, tuple(again))
        return _Turned(facts, tuple(turned(statement, facts, self._new_name)))

    def _facts(self, number: int, statement: Statement, again: tuple[bool, ...]) -> Facts:
        if statement.left[0].is_nothing:
            return Facts((), None, ())
        inputs = self._forward.inputs[number]
        sizes: tuple[int, ...] = ()
        if len(inputs) > 1 and statement.fused is None and statement.axis is not None:
            shapes = [
                meta.shape[::-1] if name.transposed else meta.shape
                for name, meta in zip(statement.left, inputs, strict=True)
            ]
            sizes = tuple(shape[statement.axis] for shape in shapes)
            sizes = () if len(set(sizes)) == 1 else sizes
        back = None
        if statement.cast is not None:
            back = inputs[0].dtype
            if (back, statement.cast.target) not in _EXACT:
                message = f"the cast from {back} to {statement.cast.target} loses bits"
                raise AoaError(fault(NO_INVERSE, f"{message}; in `{written(statement)}`", statement.place))
        return Facts(sizes, back, again)

    def _new_name(self, name: str) -> str:
        """The name, or one like it that nothing has."""
        while name in self._taken:
            name += "_"
        return name


def _may_stay(statement: Statement, facts: Facts) -> bool:
    """Whether the pattern can be turned round as it is written."""
    names: tuple[Name, ...] = statement.names
    if not any(name.ids or name.may_be_many for name in names):
        return True
    many = any(name.may_be_many for name in names)
    return not ("$LAYER_ID_OFFSET" in names[0].ids or any(facts.again) or (many and facts.sizes))


def _undoes(
    program: Program, forward: StateMap, weights: Mapping[str, TensorMeta], made: Mapping[str, TensorMeta]
) -> bool:
    """Whether both maps, one after the other, are the identity on each weight."""
    try:
        back = map_of(program, made, weights)
        by_itself = turned_round(forward, weights)
    except (AoaError, ValueError):
        return False
    # where elements have copies, a tensor may come from another one than the map's own inverse takes
    others = {difference.tensor for difference in differences(back, by_itself)} | (
        weights.keys() - by_itself.tensors.keys()
    )
    through = joined(forward, StateMap({name: back.tensors[name] for name in others}))
    return all(
        slab.source == name and slab.source_box == slab.box and slab.permutation is None
        for name, tensor in through.tensors.items()
        for slab in tensor.slabs
    )


def _lost(forward: StateMap, weights: Mapping[str, TensorMeta]) -> Iterator[Finding]:
    """Which tensors the target has not, or only parts of."""
    volumes = dict.fromkeys(weights, 0)
    for tensor in forward.tensors.values():
        for slab in tensor.slabs:
            if slab.source in volumes:
                volumes[slab.source] += slab.box.numel
    missing = [name for name, volume in volumes.items() if volume < whole_box(weights[name].shape).numel]
    for name in missing[:8]:
        there = "nothing" if not volumes[name] else "a part"
        yield fault(NO_INVERSE, f"the target has {there} of the source's `{name}`", None, "keep it in the target")
    if not missing:
        yield fault(NO_INVERSE, "the statements turned round do not make the source again", None)
