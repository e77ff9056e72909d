"""The picture of the main losses of two records or logs, with their largest difference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import groupby
from math import isfinite
from pathlib import Path

from pipeproof.analysis.align.compare_records import loss_of, record_at
from pipeproof.analysis.align.loss_pairs import Key
from pipeproof.analysis.align.read_record import ContinuedRecord, parts_of
from pipeproof.analysis.align.record_format import AlignmentError
from pipeproof.analysis.align.training_logs import LogForm, Observed, log_parts
from pipeproof.views.loss_svg import LossPart, loss_svg

_ANCHOR = "final_loss"
"""Used if a side lacks a step's own loss."""


def loss_picture(a: Path, b: Path, forms: tuple[LogForm, LogForm], factor: Fraction = Fraction(1)) -> str:
    """Draw the losses of two sides as in ``align``, A's times ``factor``, as SVG.

    If a log has a loss several times in a step, by rank and micro-batch, the mean is drawn.

    Raises:
        AlignmentError: a side cannot be read or has no loss, or no step has one on both sides.
    """
    sides = [[list(part) for part in _parts(path, form)] for path, form in zip((a, b), forms, strict=True)]
    for path, parts in zip((a, b), sides, strict=True):
        if not any(parts):
            raise AlignmentError(f"{path} has no value of the main loss in any step: there is nothing to plot")
    kinds = [{one.what for part in parts for one in part} for parts in sides]
    what = "loss" if all("loss" in kind for kind in kinds) else _ANCHOR
    by_key = [{one.key: one for part in parts for one in part if one.what == what} for parts in sides]
    common = [key for key in by_key[0] if key in by_key[1]]
    if not common:
        raise AlignmentError(f"{a} and {b} have no main loss of one step and kind in common: there is nothing to plot")
    pairs = [(by_key[0][key], by_key[1][key]) for key in common]
    trainings = [
        [
            LossPart(f"{side}: {label}", losses)
            for label, part in zip(parts_of(path), parts, strict=True)
            if (losses := tuple(_by_step(part, what, scale)))
        ]
        for side, path, parts, scale in zip("AB", (a, b), sides, (factor, Fraction(1)), strict=True)
    ]
    return loss_svg(f"Losses of A and B: {_verdict(pairs, by_key, float(factor))}", trainings)


def _parts(path: Path, form: LogForm) -> Iterator[Iterator[Observed]]:
    """The main losses with a value of each part of a side."""
    record = record_at(path)
    if record is None:
        parts = log_parts(path, form)
    else:
        steps = record.parts() if isinstance(record, ContinuedRecord) else [record.steps()]
        parts = (map(loss_of, part) for part in steps)
    return ((one for one in part if one.loss == "main" and one.value is not None) for part in parts)


def _by_step(part: Sequence[Observed], what: str, factor: Fraction) -> Iterator[tuple[int, float]]:
    ordered = sorted((one for one in part if one.what == what), key=lambda one: one.step)
    for step, group in groupby(ordered, lambda one: one.step):
        losses = [_value(one) * float(factor) for one in group]
        yield step, sum(losses) / len(losses)


def _value(observed: Observed) -> float:
    return float(observed.value or "nan")


def _verdict(pairs: Sequence[tuple[Observed, Observed]], by_key: Sequence[dict[Key, Observed]], factor: float) -> str:
    """The largest difference with its step, or the equality of bits."""
    have_bits = factor == 1 and all(a.md5 is not None and b.md5 is not None for a, b in pairs)
    scaled = [(_value(a) * factor, _value(b), a, b) for a, b in pairs]
    if have_bits:
        different = [one for one in scaled if one[2].md5 != one[3].md5]
    else:
        different = [one for one in scaled if one[0] != one[1] and not (one[0] != one[0] and one[1] != one[1])]
    steps = {a.step for a, _ in pairs}
    number = f"{len(steps)} step{'' if len(steps) == 1 else 's'}"
    lonely = [len({key[0] for key in of_side} - steps) for of_side in by_key]
    alone = "".join(f"; {many} of {side} alone" for side, many in zip("AB", lonely, strict=True) if many)
    if not different:
        return f"{'bits equal' if have_bits else 'equal in every printed digit'} in {number}{alone}"
    x, y, a, _ = max(different, key=lambda one: abs(one[0] - one[1]) if isfinite(one[0] - one[1]) else float("inf"))
    far = f"{abs(x - y):.6g}" if isfinite(x - y) else f"not finite (A {x:g}, B {y:g})"
    where = f"{len({one[2].step for one in different})} of {number} differ"
    return f"largest difference {far} at step {a.step}; {where}{alone}"
