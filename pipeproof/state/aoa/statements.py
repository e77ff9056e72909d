"""Statements as data, their valid forms, and their text. Locations are ignored in comparisons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from pipeproof.diagnostics.finding import Finding, Location
from pipeproof.state.state_codes import UNREADABLE

NOTHING = "_"
"""The name for no tensor: ``_ -> A`` adds a tensor of zeros, ``A -> _`` removes one."""
IDS = ("$LAYER_ID_OFFSET", "$LAYER_ID", "$EXPERT_ID")
"""Placeholders for a number in names; the longer first. ``$LAYER_ID_OFFSET`` is one less to the right of the arrow."""
STAR = "*"
CAST_TYPES = ("float16", "float32", "bfloat16")
"""Types that Paddle's language casts to."""
FusedKind = Literal["fused_qkv", "fused_qkv_old", "fused_ffn"]
FUSED_KINDS: tuple[FusedKind, ...] = ("fused_qkv", "fused_qkv_old", "fused_ffn")


@dataclass(frozen=True, slots=True)
class Name:
    """One name as it is written: ``NAME``, ``NAME^T``, or ``NAME[0:4]`` for NAME_0, .., NAME_3."""

    text: str
    transposed: bool = False
    numbers: tuple[int, int] | None = None
    location: Location | None = field(default=None, compare=False, repr=False)

    @property
    def is_nothing(self) -> bool:
        """True if it represents no tensor."""
        return self.text == NOTHING

    @property
    def may_be_many(self) -> bool:
        """True if it can represent several tensors of one statement."""
        return STAR in self.text or self.numbers is not None

    @property
    def ids(self) -> tuple[str, ...]:
        """Its placeholders, in their order in the text."""
        ids_found, position = [], self.text.find("$")
        while position >= 0:
            ids_found.append(next(tag for tag in IDS if self.text.startswith(tag, position)))
            position = self.text.find("$", position + 1)
        return tuple(ids_found)


@dataclass(frozen=True, slots=True)
class Cast:
    """A cast to ``target``, and from ``source`` where the statement has one."""

    target: str
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Fused:
    """Queries, keys and values in one tensor, or gate and up projection in one tensor."""

    kind: FusedKind
    num_heads: int = 0
    num_groups: int = 0


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement. ``permutation`` is empty for all dims in reverse; ``axis`` is None where none is written."""

    left: tuple[Name, ...]
    right: tuple[Name, ...]
    axis: int | None = None
    permutation: tuple[int, ...] | None = None
    cast: Cast | None = None
    fused: Fused | None = None
    location: Location | None = field(default=None, compare=False, repr=False)

    @property
    def names(self) -> tuple[Name, ...]:
        """Names of both sides, without ``_``."""
        return tuple(name for name in (*self.left, *self.right) if not name.is_nothing)


@dataclass(frozen=True, slots=True)
class Program:
    """Statements in the order of execution."""

    statements: tuple[Statement, ...]
    file: str = field(default="", compare=False)


_COUNTS = {
    "fused_qkv": (((1, 3), (3, 1)), "QKV -> Q, K, V or Q, K, V -> QKV"),
    "fused_qkv_old": (((1, 1), (1, 3), (3, 1)), "QKV -> QKV2, QKV -> Q, K, V or Q, K, V -> QKV"),
    "fused_ffn": (((1, 1), (1, 2), (2, 1)), "FFN -> FFN2, FFN -> GATE, UP or GATE, UP -> FFN"),
}
"""By operation: the allowed numbers of names on each side, and the form as text."""


def form_faults(statement: Statement) -> Iterator[Finding]:
    """Yield what is invalid for any tensors: PP180 and PP184."""
    yield from _name_faults(statement)
    if any(name.is_nothing for name in (*statement.left, *statement.right)):
        yield from _nothing_faults(statement)
        return
    operations = ["permute"] if statement.permutation is not None else []
    operations += ["a cast"] if statement.cast is not None else []
    operations += [statement.fused.kind] if statement.fused is not None else []
    if len(operations) > 1:
        fix = "write two, and a name between them"
        yield UNREADABLE.finding(f"{operations[0]} and {operations[1]} in one statement", statement.location, fix)
    elif not any(name.may_be_many for name in statement.names):
        yield from count_faults(statement, written_many=False)


def count_faults(statement: Statement, *, written_many: bool) -> Iterator[Finding]:
    """Yield what is invalid for the numbers of names on each side, once all patterns are replaced.

    ``written_many`` is True if the names come from a pattern: it may have matched one tensor where there could be many.
    """
    counts, location = (len(statement.left), len(statement.right)), statement.location
    if statement.fused is not None:
        allowed, forms = _COUNTS[statement.fused.kind]
        if counts not in allowed:
            message = f"{statement.fused.kind} with {counts[0]} names to the left and {counts[1]} to the right"
            yield UNREADABLE.finding(message, location, f"it is {forms}")
    elif min(counts) > 1:
        fix = "merge into one name, and split that; where names go in pairs, write $EXPERT_ID or $LAYER_ID"
        yield UNREADABLE.finding(f"{counts[0]} names to the left and {counts[1]} to the right", location, fix)
    elif max(counts) > 1:
        if statement.permutation is not None or statement.cast is not None:
            yield UNREADABLE.finding("a permutation or a cast has one tensor", location, "write a statement for each")
        elif statement.axis is None:
            yield UNREADABLE.finding("a merge or a split needs `axis`", location, "write `, axis=0` or `, axis=1`")
    elif statement.axis is not None and not written_many:
        yield UNREADABLE.finding("`axis` belongs to a merge, a split or a fused form", location, "remove it")


def _name_faults(statement: Statement) -> Iterator[Finding]:
    for name in statement.right:
        if name.transposed:
            fix = f"write `A -> {name.text}`, then `{name.text}^T -> {name.text}`"
            yield UNREADABLE.finding(f"`{name.text}^T` is a view, and cannot be assigned to", name.location, fix)
    for name in statement.names:
        if name.text.count("*") > 1:
            yield UNREADABLE.finding(f"`{name.text}` has two `*`", name.location, "write $LAYER_ID for one of them")
        if len(set(name.ids)) < len(name.ids):
            yield UNREADABLE.finding(f"`{name.text}` has `{name.ids[0]}` twice", name.location)
    sets = {frozenset(name.ids) for name in statement.names}
    if len(sets) > 1:
        tags = sorted(frozenset.union(*sets))
        incomplete = next(name for name in statement.names if set(name.ids) != set(tags))
        tag = next(tag for tag in tags if tag not in incomplete.ids)
        fix = "placeholders must be in each name of a statement; `*` matches all numbers in one statement"
        yield UNREADABLE.finding(f"`{incomplete.text}` has no `{tag}`, and other names have", incomplete.location, fix)
    elif {"$LAYER_ID", "$LAYER_ID_OFFSET"} <= set().union(*sets):
        yield UNREADABLE.finding("`$LAYER_ID` and `$LAYER_ID_OFFSET` in one statement", statement.location)


def _nothing_faults(statement: Statement) -> Iterator[Finding]:
    sides = (statement.left, statement.right)
    if not statement.names or any(len(side) > 1 for side in sides):
        message = f"`{NOTHING}` must be alone on its side, with one name on the other"
        fix = "`_ -> A` adds a tensor of zeros, `A -> _` removes one"
        yield UNREADABLE.finding(message, statement.location, fix)
    elif any(name.may_be_many or name.transposed for name in statement.names):
        yield UNREADABLE.finding(f"a pattern with {NOTHING} is of $LAYER_ID and $EXPERT_ID", statement.location)
    elif (statement.axis, statement.permutation, statement.cast, statement.fused) != (None,) * 4:
        yield UNREADABLE.finding(f"`{NOTHING}` has no attributes", statement.location, "remove them")


def write_statements(program: Program) -> str:
    """Return the text of a program, one statement per line."""
    return "".join(f"{statement_text(statement)}\n" for statement in program.statements)


def statement_text(statement: Statement) -> str:
    """Return the text of a statement."""
    sides = (", ".join(map(name_text, side)) for side in (statement.left, statement.right))
    return ", ".join([" -> ".join(sides), *_attributes(statement)])


def name_text(name: Name) -> str:
    """Return the text of a name."""
    numbers = "" if name.numbers is None else "[{}:{}]".format(*name.numbers)
    return name.text + numbers + ("^T" if name.transposed else "")


def _attributes(statement: Statement) -> list[str]:
    words: list[str] = []
    if statement.fused is not None:
        words.append(statement.fused.kind)
        if statement.fused.num_heads:
            words.append(f"num_heads={statement.fused.num_heads}")
            words.append(f"num_key_value_groups={statement.fused.num_groups}")
    if statement.axis is not None:
        words.append(f"axis={statement.axis}")
    if statement.permutation is not None:
        words.append(f'permute="{list(statement.permutation)}"')
    if statement.cast is not None and statement.cast.source is None:
        words.append(f'dtype="{statement.cast.target}"')
    elif statement.cast is not None:
        words.append(f'src_dtype="{statement.cast.source}"')
        words.append(f'dst_dtype="{statement.cast.target}"')
    return words
