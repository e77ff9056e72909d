"""Statements with patterns replaced by the names that are there, and who is read, made and left out, in order.

It knows names only. ``$LAYER_ID`` and ``$EXPERT_ID`` stand for the numbers for which the first name to the left is
there, together, and every other name to the left must be there for the same ones; ``*`` stands for all names that
fit, by number. Work grows with the number of names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from pipeproof.specs.finding import Finding
from pipeproof.state.aoa.codes import IN_VAIN, NAMES_NOTHING, AoaError, fault
from pipeproof.state.aoa.forms import count_faults
from pipeproof.state.aoa.patterns import OFFSET, Ids, NameList, by_form, gap_in, in_words, nearest, with_ids
from pipeproof.state.aoa.syntax import STAR, Name, Program, Statement


@dataclass(frozen=True, slots=True)
class Expanded:
    """Statements without patterns. ``made`` are the target's weights; the source's ``removed`` are left out."""

    statements: tuple[Statement, ...]
    made: tuple[str, ...]
    removed: frozenset[str]
    origins: tuple[int, ...]
    """For each statement the number of the one that it comes from, from 0 on."""


def expand(program: Program, source: AbstractSet[str], target: AbstractSet[str] | None) -> Expanded:
    """Replace all patterns of a program.

    ``target`` is what must be made; None for whatever the statements make, and what they leave untouched.

    Raises:
        AoaError: PP180, PP181 and PP184; of one statement the first of each.
    """
    run = _Run(source, target)
    statements: list[Statement] = []
    origins: list[int] = []
    found: dict[tuple[int, str], Finding] = {}
    for number, statement in enumerate(program.statements):
        expanded, findings = run.expanded(statement)
        for one in expanded:
            findings += run.apply(one, written_many=any(name.may_be_many for name in statement.names))
        statements += expanded
        origins += [number] * len(expanded)
        for finding in findings:
            found.setdefault((number, finding.code), finding)
    if not found:
        found = {(-1 - number, one.code): one for number, one in enumerate(run.at_the_end())}
    if found:
        raise AoaError(*found.values())
    return Expanded(tuple(statements), tuple(run.made()), frozenset(run.removed & source), tuple(origins))


class _Run:
    """What is known of names after some statements."""

    def __init__(self, source: AbstractSet[str], target: AbstractSet[str] | None) -> None:
        self._source, self._target = source, target
        self._targets = NameList(target or ())
        self._readable: NameList | None = None
        self._assigned: dict[str, Statement] = {}
        self._unread: dict[str, Statement] = {}
        self._read: set[str] = set()
        self.removed: set[str] = set()

    def expanded(self, statement: Statement) -> tuple[list[Statement], list[Finding]]:
        names = statement.names
        if not any(name.ids or name.may_be_many for name in names):
            return [statement], []
        combinations, findings = self._ids(statement)
        made = []
        for ids in combinations:
            one, wrong = self._with_ids(statement, ids)
            findings += wrong
            if not wrong:
                made.append(one)
        return made, findings

    def _known(self) -> NameList:
        if self._readable is None:
            self._readable = NameList((self._source - self.removed) | self._assigned.keys())
        return self._readable

    def _ids(self, statement: Statement) -> tuple[list[Ids], list[Finding]]:
        lefts = [name for name in statement.left if not name.is_nothing]
        if not statement.names[0].ids:
            return [()], []
        if not lefts:
            name, names = statement.right[0], self._targets
        else:
            name, names = lefts[0], self._known()
        combinations = names.ids_of(name)
        if not combinations:
            return [], [self._nothing_fits(name, names, "the target" if not lefts else "the source")]
        for other in lefts[1:]:
            others = set(names.ids_of(other))
            for one, two, lacking in ((name, combinations, others), (other, sorted(others), set(combinations))):
                ids = next((ids for ids in two if ids not in lacking), None)
                if ids is not None:
                    without = other if one is name else name
                    message = f"`{one.text}` is there for {in_words(ids)}, and `{without.text}` is not"
                    return [], [fault(NAMES_NOTHING, message, without.place)]
        return combinations, []

    def _with_ids(self, statement: Statement, ids: Ids) -> tuple[Statement, list[Finding]]:
        sides: list[tuple[Name, ...]] = []
        findings: list[Finding] = []
        for side, to_the_right in ((statement.left, False), (statement.right, True)):
            names: list[Name] = []
            for name in side:
                text = with_ids(name.text, ids, to_the_right=to_the_right)
                texts = self._texts(name, text, findings, to_the_right=to_the_right)
                names += [replace(name, text=found, numbers=None) for found in texts]
            sides.append(tuple(names))
        if (OFFSET, 0) in ids:
            message = f"`{statement.left[0].text}` is there for layer 0, which has no layer before it"
            findings.append(fault(NAMES_NOTHING, message, statement.place))
        return replace(statement, left=sides[0], right=sides[1]), findings

    def _texts(self, name: Name, text: str, findings: list[Finding], *, to_the_right: bool) -> list[str]:
        if name.numbers is not None:
            return [f"{text}_{number}" for number in range(*name.numbers)]
        if STAR not in text:
            return [text]
        if to_the_right and self._target is None:
            mend = "say what the target is: `--to`"
            findings.append(
                fault(NAMES_NOTHING, f"which tensors `{text}` stands for, the target says", name.place, mend)
            )
            return []
        names = self._targets if to_the_right else self._known()
        found = names.numbered(text)
        if not found:
            pattern = replace(name, text=text)
            findings.append(self._nothing_fits(pattern, names, "the target" if to_the_right else "the source"))
        gap = gap_in([number for number, _ in found])
        if gap is not None:
            message = f"`{text}` stands for numbers {found[0][0]} to {found[-1][0]}, and {gap} is not there"
            mend = "name the tensors one by one if that is meant"
            findings.append(fault(NAMES_NOTHING, message, name.place, mend))
        return [full for _, full in found]

    def _nothing_fits(self, name: Name, names: NameList, where: str) -> Finding:
        near = nearest(name.text.replace(STAR, "0"), names.beginning(""))
        mend = f"did you mean `{near}`?" if near else None
        return fault(NAMES_NOTHING, f"`{name.text}` fits no tensor of {where}", name.place, mend)

    def apply(self, statement: Statement, *, written_many: bool) -> list[Finding]:
        """Carry out a statement without patterns, as far as names go."""
        findings = list(count_faults(statement, written_many=written_many)) if len(statement.names) > 1 else []
        (left, right), reads = (statement.left, statement.right), set[str]()
        if right[0].is_nothing:
            return [*findings, *self._remove(left[0])]
        for name in left:
            if not name.is_nothing:
                findings += self._reading(name)
                reads.add(name.text)
        for text in reads:
            self._unread.pop(text, None)
            if text not in self._assigned:
                self._read.add(text)
        for number, name in enumerate(right):
            findings += self._assigning(name, reads, [other.text for other in right[:number]])
            if left[0].is_nothing and name.text not in (self._target or ()):
                mend = "say what the target is: `--to`" if self._target is None else self._near(name, self._target)
                message = f"the target has no `{name.text}`, whose shape an added tensor has"
                findings.append(fault(NAMES_NOTHING, message, name.place, mend))
            self._assigned[name.text] = self._unread[name.text] = statement
            self._readable = None
        return findings

    def _remove(self, name: Name) -> Iterator[Finding]:
        text = name.text
        if text in self._assigned:
            if text not in self._unread:
                yield fault(IN_VAIN, f"`{text}` is read before, and left out here", name.place, "remove the statement")
            elif self._target is not None and text in self._target:
                yield fault(IN_VAIN, f"`{text}` is of the target, and left out here", name.place)
            self._unread.pop(text, None)
            self._read.add(text)
            return
        yield from self._reading(name)
        if text in self._read:
            mend = "what was read is not kept under its old name; remove the statement"
            yield fault(IN_VAIN, f"`{text}` is read before, and left out here", name.place, mend)
        self.removed.add(text)
        self._readable = None

    def _reading(self, name: Name) -> Iterator[Finding]:
        text = name.text
        if text in self.removed and text not in self._assigned:
            yield fault(IN_VAIN, f"`{text}` was left out before", name.place, "read it first, or keep it")
        elif text not in self._assigned and text not in self._source:
            known = self._source | self._assigned.keys()
            message = f"there is no `{text}`, neither in the source nor made by a statement before"
            yield fault(NAMES_NOTHING, message, name.place, self._near(name, known))

    def _assigning(self, name: Name, reads: AbstractSet[str], before: list[str]) -> Iterator[Finding]:
        text = name.text
        again = self._assigned.get(text)
        if text in before:
            yield fault(IN_VAIN, f"`{text}` stands twice to the right", name.place)
        elif again is not None and text not in reads:
            line = "" if again.place is None else f" in line {again.place.line}"
            yield fault(IN_VAIN, f"`{text}` is assigned here, and was{line}", name.place, "give one another name")
        elif again is None and text in self._source and text not in (reads | self._read | self.removed):
            message = f"`{text}` of the source is covered here, and nothing has read it"
            yield fault(IN_VAIN, message, name.place, f"write `{text} -> NAME` before, or `{text} -> _`")

    def _near(self, name: Name, known: AbstractSet[str]) -> str:
        near = nearest(name.text, known)
        return f"did you mean `{near}`?" if near else "`pipeproof state` shows the tensors of a checkpoint"

    def at_the_end(self) -> Iterator[Finding]:
        if self._target is None:
            return
        for text, others in _alike(text for text in self._unread if text not in self._target):
            place = next(name.place for name in self._unread[text].right if name.text == text)
            mend = nearest(text, self._target - self._assigned.keys())
            message = f"`{text}`{others} is neither of the target nor read by a later statement"
            yield fault(IN_VAIN, message, place, f"did you mean `{mend}`?" if mend else f"or write `{text} -> _`")
        there = (self._source - self.removed) | self._assigned.keys()
        for text, others in _alike(self._target - there):
            why = "left out by a statement" if text in self.removed else "not in the source"
            near = nearest(text, self._source - self._read - self._target)
            mend = f"write `{near} -> {text}`, if that is the one" if near else f"write `_ -> {text}` for zeros"
            yield fault(NAMES_NOTHING, f"nothing makes the target's `{text}`{others}, which is {why}", None, mend)

    def made(self) -> list[str]:
        if self._target is not None:
            return sorted(self._target)
        untouched = self._source - self._read - self.removed - self._assigned.keys()
        return sorted(untouched | self._unread.keys())


def _alike(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Of names that differ by numbers alone the first one, and how many more there are."""
    for alike in by_form(sorted(names)).values():
        yield alike[0], f" (and {len(alike) - 1} more that differ by numbers)" if len(alike) > 1 else ""
