"""Expansion of patterns to existing names, and checks of the names that statements read, make and remove, in order.

``$LAYER_ID`` and ``$EXPERT_ID`` are replaced together by the numbers of existing names that match the first name to the
left; every other name to the left must exist for the same numbers. ``*`` matches all names, by number. Work grows with
the number of names.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import pairwise

from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.problems import grouped, nearest_name
from pipeproof.state.aoa.statements import IDS, STAR, Name, Program, Statement, count_faults
from pipeproof.state.state_codes import NO_EFFECT, UNKNOWN_TENSOR, AoaError


@dataclass(frozen=True, slots=True)
class Expanded:
    """Statements without patterns. ``result_names`` are the target's weights; the source's ``removed`` are left out."""

    statements: tuple[Statement, ...]
    result_names: tuple[str, ...]
    removed: frozenset[str]
    origins: tuple[int, ...]
    """For each statement the number of its original statement, from 0 on."""


def expand(program: Program, source: AbstractSet[str], target: AbstractSet[str] | None) -> Expanded:
    """Replace all patterns of a program.

    ``target`` has the names to make; None for all tensors that the statements make or leave unchanged.

    Raises:
        AoaError: PP180, PP181 and PP184; for each statement the first of each code.
    """
    run = _NameState(source, target)
    statements: list[Statement] = []
    origins: list[int] = []
    first_findings: dict[tuple[int, str], Finding] = {}
    for number, statement in enumerate(program.statements):
        expanded, findings = run.expanded(statement)
        for expanded_statement in expanded:
            findings += run.apply(expanded_statement, written_many=any(name.may_be_many for name in statement.names))
        statements += expanded
        origins += [number] * len(expanded)
        for finding in findings:
            first_findings.setdefault((number, finding.code), finding)
    if not first_findings:
        first_findings = {(-1 - number, finding.code): finding for number, finding in enumerate(run.final_findings())}
    if first_findings:
        raise AoaError(*first_findings.values())
    return Expanded(tuple(statements), tuple(run.result_names()), frozenset(run.removed & source), tuple(origins))


class _NameState:
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
        combinations, findings = self._number_combinations(statement)
        statements = []
        for ids in combinations:
            expanded_statement, wrong = self._substituted(statement, ids)
            findings += wrong
            if not wrong:
                statements.append(expanded_statement)
        return statements, findings

    def _known(self) -> NameList:
        if self._readable is None:
            self._readable = NameList((self._source - self.removed) | self._assigned.keys())
        return self._readable

    def _number_combinations(self, statement: Statement) -> tuple[list[Ids], list[Finding]]:
        lefts = [name for name in statement.left if not name.is_nothing]
        if not statement.names[0].ids:
            return [()], []
        if not lefts:
            name, names = statement.right[0], self._targets
        else:
            name, names = lefts[0], self._known()
        combinations = names.ids_of(name)
        if not combinations:
            return [], [self._no_match(name, names, "the target" if not lefts else "the source")]
        for other in lefts[1:]:
            other_combinations = set(names.ids_of(other))
            for present, candidates, required in (
                (name, combinations, other_combinations),
                (other, sorted(other_combinations), set(combinations)),
            ):
                ids = next((ids for ids in candidates if ids not in required), None)
                if ids is not None:
                    without = other if present is name else name
                    message = f"`{present.text}` exists for {ids_text(ids)}, and `{without.text}` does not"
                    return [], [UNKNOWN_TENSOR.finding(message, without.location)]
        return combinations, []

    def _substituted(self, statement: Statement, ids: Ids) -> tuple[Statement, list[Finding]]:
        sides: list[tuple[Name, ...]] = []
        findings: list[Finding] = []
        for side, to_the_right in ((statement.left, False), (statement.right, True)):
            names: list[Name] = []
            for name in side:
                text = with_numbers(name.text, ids, to_the_right=to_the_right)
                texts = self._names_of(name, text, findings, to_the_right=to_the_right)
                names += [replace(name, text=expanded_text, numbers=None) for expanded_text in texts]
            sides.append(tuple(names))
        if (OFFSET, 0) in ids:
            message = f"`{statement.left[0].text}` exists for layer 0, which has no previous layer"
            findings.append(UNKNOWN_TENSOR.finding(message, statement.location))
        return replace(statement, left=sides[0], right=sides[1]), findings

    def _names_of(self, name: Name, text: str, findings: list[Finding], *, to_the_right: bool) -> list[str]:
        if name.numbers is not None:
            return [f"{text}_{number}" for number in range(*name.numbers)]
        if STAR not in text:
            return [text]
        if to_the_right and self._target is None:
            message = f"the meaning of `{text}` depends on the target"
            findings.append(UNKNOWN_TENSOR.finding(message, name.location, "give the target: `--to`"))
            return []
        names = self._targets if to_the_right else self._known()
        matches = names.numbered(text)
        if not matches:
            pattern = replace(name, text=text)
            findings.append(self._no_match(pattern, names, "the target" if to_the_right else "the source"))
        gap = gap_in([number for number, _ in matches])
        if gap is not None:
            message = f"`{text}` matches numbers {matches[0][0]} to {matches[-1][0]}, and {gap} is missing"
            fix = "if this is intended, name each tensor"
            findings.append(UNKNOWN_TENSOR.finding(message, name.location, fix))
        return [full for _, full in matches]

    def _no_match(self, name: Name, names: NameList, where: str) -> Finding:
        nearest_text = nearest(name.text.replace(STAR, "0"), names.beginning(""))
        fix = f"did you mean `{nearest_text}`?" if nearest_text else None
        return UNKNOWN_TENSOR.finding(f"`{name.text}` matches no tensor of {where}", name.location, fix)

    def apply(self, statement: Statement, *, written_many: bool) -> list[Finding]:
        """Apply a statement without patterns to the names."""
        findings = list(count_faults(statement, written_many=written_many)) if len(statement.names) > 1 else []
        (left, right), reads = (statement.left, statement.right), set[str]()
        if right[0].is_nothing:
            return [*findings, *self._remove(left[0])]
        for name in left:
            if not name.is_nothing:
                findings += self._check_read(name)
                reads.add(name.text)
        for text in reads:
            self._unread.pop(text, None)
            if text not in self._assigned:
                self._read.add(text)
        for number, name in enumerate(right):
            findings += self._check_assignment(name, reads, [other.text for other in right[:number]])
            if left[0].is_nothing and name.text not in (self._target or ()):
                fix = "give the target: `--to`" if self._target is None else self._suggestion(name, self._target)
                message = f"the target has no `{name.text}`, whose shape an added tensor has"
                findings.append(UNKNOWN_TENSOR.finding(message, name.location, fix))
            self._assigned[name.text] = self._unread[name.text] = statement
            self._readable = None
        return findings

    def _remove(self, name: Name) -> Iterator[Finding]:
        text = name.text
        if text in self._assigned:
            if text not in self._unread:
                message = f"`{text}` was read before, and is removed here"
                yield NO_EFFECT.finding(message, name.location, "remove the statement")
            elif self._target is not None and text in self._target:
                yield NO_EFFECT.finding(f"`{text}` is a tensor of the target, and is removed here", name.location)
            self._unread.pop(text, None)
            self._read.add(text)
            return
        yield from self._check_read(name)
        if text in self._read:
            fix = "a tensor that was read does not keep its old name; remove the statement"
            yield NO_EFFECT.finding(f"`{text}` was read before, and is removed here", name.location, fix)
        self.removed.add(text)
        self._readable = None

    def _check_read(self, name: Name) -> Iterator[Finding]:
        text = name.text
        if text in self.removed and text not in self._assigned:
            yield NO_EFFECT.finding(f"`{text}` was removed before", name.location, "read it first, or keep it")
        elif text not in self._assigned and text not in self._source:
            names = self._source | self._assigned.keys()
            message = f"there is no `{text}`, neither in the source nor as the result of an earlier statement"
            yield UNKNOWN_TENSOR.finding(message, name.location, self._suggestion(name, names))

    def _check_assignment(self, name: Name, reads: AbstractSet[str], before: list[str]) -> Iterator[Finding]:
        text = name.text
        previous = self._assigned.get(text)
        if text in before:
            yield NO_EFFECT.finding(f"`{text}` is assigned twice", name.location)
        elif previous is not None and text not in reads:
            line = "" if previous.location is None else f" in line {previous.location.line}"
            message = f"`{text}` is assigned here, and was assigned before{line}"
            yield NO_EFFECT.finding(message, name.location, "rename one of them")
        elif previous is None and text in self._source and text not in (reads | self._read | self.removed):
            message = f"`{text}` of the source is overwritten here, and nothing has read it"
            yield NO_EFFECT.finding(message, name.location, f"write `{text} -> NAME` before, or `{text} -> _`")

    def _suggestion(self, name: Name, names: AbstractSet[str]) -> str:
        near = nearest(name.text, names)
        return f"did you mean `{near}`?" if near else "`pipeproof state show` shows the tensors of a checkpoint"

    def final_findings(self) -> Iterator[Finding]:
        if self._target is None:
            return
        for text, similar_text in _grouped(text for text in self._unread if text not in self._target):
            location = next(name.location for name in self._unread[text].right if name.text == text)
            fix = nearest(text, self._target - self._assigned.keys())
            message = f"`{text}`{similar_text} is neither a tensor of the target nor read by a later statement"
            yield NO_EFFECT.finding(message, location, f"did you mean `{fix}`?" if fix else f"or write `{text} -> _`")
        available = (self._source - self.removed) | self._assigned.keys()
        for text, similar_text in _grouped(self._target - available):
            why = "removed by a statement" if text in self.removed else "not in the source"
            near = nearest(text, self._source - self._read - self._target)
            fix = f"write `{near} -> {text}`, if this is the tensor" if near else f"write `_ -> {text}` for zeros"
            message = f"nothing makes the target's `{text}`{similar_text}, which is {why}"
            yield UNKNOWN_TENSOR.finding(message, None, fix)

    def result_names(self) -> list[str]:
        if self._target is not None:
            return sorted(self._target)
        untouched = self._source - self._read - self.removed - self._assigned.keys()
        return sorted(untouched | self._unread.keys())


def _grouped(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the first of several names that differ only by numbers, with text on the number of the others."""
    for similar in by_form(sorted(names)).values():
        yield similar[0], f" (and {len(similar) - 1} more that differ by numbers)" if len(similar) > 1 else ""


_NUMBER = "(0|[1-9][0-9]*)"
_DIGITS = re.compile("[0-9]+")
_COUNTED = re.compile(r"(?:^|(?<=\.))[0-9]+(?=\.|$)", re.ASCII)
"""Numbers between dots: numbers of layers and experts, not the 1 in `w1`."""
_LAST = chr(0x10FFFF)
OFFSET = "$LAYER_ID_OFFSET"

Ids = tuple[tuple[str, int], ...]
"""Numbers by placeholder, in the order of ``IDS``."""


class NameList:
    """Sorted names, in which names with a common prefix are found without a scan."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted(names)

    def beginning(self, prefix: str) -> Sequence[str]:
        """Return all names with a prefix."""
        return self._names[bisect_left(self._names, prefix) : bisect_left(self._names, prefix + _LAST)]

    def ids_of(self, name: Name) -> list[Ids]:
        """Return the numbers for which matching names exist, in numeric order."""
        combinations = set()
        tags = name.ids
        text = name.text if name.numbers is None else f"{name.text}_{name.numbers[0]}"
        pattern = _regex(text)
        places = [index for index, tag in enumerate(_tags(text)) if tag != STAR]
        for candidate in self.beginning(_prefix(text)):
            match = pattern.fullmatch(candidate)
            if match is not None:
                numbers = dict(zip(tags, (int(match.groups()[position]) for position in places), strict=True))
                combinations.add(tuple((tag, numbers[tag]) for tag in IDS if tag in numbers))
        return sorted(combinations, key=lambda ids: [number for _, number in ids])

    def numbered(self, text: str) -> list[tuple[int, str]]:
        """Return the names that match ``text`` with its ``*``, by number."""
        pattern = _regex(text)
        matches = ((pattern.fullmatch(candidate), candidate) for candidate in self.beginning(_prefix(text)))
        return sorted((int(match[1]), candidate) for match, candidate in matches if match is not None)


def with_numbers(text: str, ids: Ids, *, to_the_right: bool) -> str:
    """Return a name with its placeholders replaced by numbers."""
    for tag, number in ids:  # the longer tags come first
        text = text.replace(tag, str(number - 1 if to_the_right and tag == OFFSET else number))
    return text


def ids_text(ids: Ids) -> str:
    """``$LAYER_ID=3, $EXPERT_ID=0``."""
    return ", ".join(f"{tag}={number}" for tag, number in ids)


def by_form(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names that differ by numbers only."""
    return grouped((_COUNTED.sub("0", name), name) for name in names)


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the known name that was probably meant. Names that differ by numbers only are compared once."""
    forms = by_form(names)
    near = nearest_name(_COUNTED.sub("0", name), forms)
    if near is None:
        return None
    numbers = _DIGITS.findall(name)
    return min(forms[near], key=lambda other: (_differing(numbers, _DIGITS.findall(other)), len(other), other))


def _differing(one: Sequence[str], other: Sequence[str]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=False)) + abs(len(one) - len(other))


def _regex(text: str) -> re.Pattern[str]:
    return re.compile("".join(_NUMBER if part in (*IDS, STAR) else re.escape(part) for part in _parts(text)), re.ASCII)


def _prefix(text: str) -> str:
    return re.split(r"[*$]", text, maxsplit=1)[0]


def _parts(text: str) -> list[str]:
    return re.split("(" + "|".join(re.escape(tag) for tag in (*IDS, STAR)) + ")", text)


def _tags(text: str) -> Iterator[str]:
    return (part for part in _parts(text) if part in (*IDS, STAR))


def gap_in(numbers: Sequence[int]) -> int | None:
    """Return the first missing number between the first and the last."""
    return next((a + 1 for a, b in pairwise(numbers) if b != a + 1), None)
