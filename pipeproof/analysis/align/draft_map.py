"""A map for tensors of two records without a partner, proposed by shape and order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from pipeproof.analysis.align.read_record import Record
from pipeproof.analysis.align.record_format import Recorded
from pipeproof.analysis.align.record_map import RecordMap

_LAYER = "$LAYER_ID"


def draft_map(a: Record, b: Record, partners: RecordMap) -> str:
    """YAML for `--map`: pairs of names whose tensors have one shape, in one order; the rest as comments.

    Only the first step of both is read.
    """
    first = next(zip(a.steps(), b.steps(), strict=False), None)
    if first is None:
        return "statements: []\n"
    lonely = partners.paired(*first, lambda _: True)
    lines: list[str] = []
    rest: list[str] = []
    for is_weight in (False, True):
        sides = [_one_each(side, is_weight) for side in (lonely.only_a, lonely.only_b)]
        pairs, left = _matched(*sides)
        lines += _with_patterns(pairs)
        rest += [f"# only {side} has {name} {list(shape)}" for side, each in zip("AB", left, strict=True)
                 for name, shape in each.items()]  # fmt: skip
    listed = "".join(f"- {line}\n" for line in lines)
    return "".join(f"{line}\n" for line in rest) + (f"statements:\n{listed}" if lines else "statements: []\n")


def _one_each(tensors: Sequence[Recorded], is_weight: bool) -> dict[str, tuple[int, ...]]:
    """By name the shape of a weight, or of a module's output."""
    if is_weight:
        return {t.parameter: t.shape for t in tensors if t.parameter}
    kept = [t for t in tensors if not t.parameter and t.direction == "forward" and not t.piece and not t.micro_batch]
    made = {t.layer: t.shape for t in kept if t.side == "output"}
    return made or {t.layer: t.shape for t in kept}


def _matched(
    a: dict[str, tuple[int, ...]], b: dict[str, tuple[int, ...]]
) -> tuple[list[tuple[str, str]], tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]]:
    """Pairs of names, and the rest of both sides."""
    sizes = [[tuple(sorted(n for n in shape if n > 1)) for shape in each.values()] for each in (a, b)]
    names = list(a), list(b)
    pairs = [
        (names[0][block.a + i], names[1][block.b + i])
        for block in SequenceMatcher(None, sizes[0], sizes[1], autojunk=False).get_matching_blocks()
        for i in range(block.size)
    ]
    done = {name for pair in pairs for name in pair}
    return pairs, tuple({n: shape for n, shape in each.items() if n not in done} for each in (a, b))  # type: ignore[return-value]


def _with_patterns(pairs: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Statements; statements of several layers that differ by one number are merged."""
    by_pattern: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for pair in pairs:
        numbers = [re.search(r"(?<![\w])\d+(?![\w])", name) for name in pair]
        pattern = pair
        if numbers[0] is not None and numbers[1] is not None and numbers[0][0] == numbers[1][0]:
            pattern = tuple(
                f"{name[: match.start()]}{_LAYER}{name[match.end() :]}"
                for name, match in zip(pair, numbers, strict=True)
                if match is not None
            )  # type: ignore[assignment]
        by_pattern.setdefault(pattern, []).append(pair)
    for pattern, group in by_pattern.items():
        for pair in [pattern] if len(group) > 1 else group:
            if pair[0] != pair[1]:
                yield f"{pair[0]} -> {pair[1]}"
