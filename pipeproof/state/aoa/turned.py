"""One statement turned round, from what is known of the tensors that it read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import gcd

from pipeproof.state.aoa.syntax import NOTHING, Cast, Name, Statement
from pipeproof.state.mapping import inverse_permutation

NewName = Callable[[str], str]
"""From a name to one that no tensor has."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the inverse depends on beside the statement.

    ``sizes`` along the axis of merged tensors, where they differ; the type to
    cast ``back`` to; and of each name to the left whether it is there ``again``:
    it went elsewhere too, and comes back from there.
    """

    sizes: tuple[int, ...]
    back: str | None
    again: tuple[bool, ...]


def turned(statement: Statement, facts: Facts, new_name: NewName) -> Iterator[Statement]:
    """The statements that make of its right side its left side again."""
    if statement.left[0].is_nothing or all(facts.again):
        for name in statement.right:
            yield Statement((name,), (Name(NOTHING),))
        return
    made, after = _made(statement, facts, new_name)
    if facts.sizes:
        yield from _split_unevenly(statement, made, facts.sizes, new_name)
    else:
        permutation = statement.permutation
        yield replace(
            statement,
            left=tuple(replace(name, transposed=_as_a_view(statement)) for name in statement.right),
            right=tuple(made),
            permutation=None if permutation is None else inverse_permutation(permutation),
            cast=None if facts.back is None else _back(statement, facts.back),
        )
    yield from after


def _made(statement: Statement, facts: Facts, new_name: NewName) -> tuple[list[Name], list[Statement]]:
    """The names that the inverse makes, and statements after it: what was read as ``^T``, and what is spare."""
    made, after = [], []
    for name, again in zip(statement.left, facts.again or (False,) * len(statement.left), strict=False):
        plain = replace(name, transposed=False, place=None)
        if again:
            spare = Name(new_name(f"{name.text}.again"))
            made.append(spare)
            after.append(Statement((spare,), (Name(NOTHING),)))
        elif name.transposed and _as_a_view(statement):
            made.append(plain)
        elif name.transposed:
            view = Name(new_name(f"{name.text}.transposed"))
            made.append(view)
            after.append(Statement((replace(view, transposed=True),), (plain,)))
        else:
            made.append(plain)
    return made, after


def _as_a_view(statement: Statement) -> bool:
    """Whether the inverse reads its tensor as ``^T``, because the statement did so and changes no dims beside."""
    counts = (len(statement.left), len(statement.right))
    changes = statement.fused is not None or statement.permutation is not None
    return counts == (1, 1) and statement.left[0].transposed and not changes


def _back(statement: Statement, dtype: str) -> Cast:
    assert statement.cast is not None
    return Cast(dtype, None if statement.cast.source is None else statement.cast.target)


def _split_unevenly(
    statement: Statement, made: list[Name], sizes: tuple[int, ...], new_name: NewName
) -> Iterator[Statement]:
    """A split is even: so it is one into parts of the largest size that fits all, of which the tensors are merged."""
    size = gcd(*sizes)
    (whole,) = statement.right
    part = new_name(f"{whole.text}.part")
    yield Statement((whole,), (Name(part, numbers=(0, sum(sizes) // size)),), statement.axis)
    start = 0
    for name, length in zip(made, sizes, strict=True):
        stop = start + length // size
        yield Statement((Name(part, numbers=(start, stop)),), (name,), statement.axis)
        start = stop
