"""The first tensor that differs between two records, in execution order, and what is known of it."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from pipeproof.analysis.align.align_errors import AlignmentError
from pipeproof.analysis.align.array_digests import FAR, Array, max_relative, max_ulps, ulps_between
from pipeproof.analysis.align.likely_cause import Cause, Family, Values, guess, guess_from_norms, missing_reduction
from pipeproof.analysis.align.loss_pairs import Tolerance
from pipeproof.analysis.align.read_record import RecordFile
from pipeproof.analysis.align.record_format import Recorded, RecordedStep, values_file
from pipeproof.foreign_text import open_foreign

# --- Evidence of the tensors around the first difference: its producer, and the correct outputs of its layer ---


_MODULE = "mtp."
"""With what the names of modules of multi-token prediction begin."""


@dataclass(frozen=True, slots=True)
class WeightGradients:
    """Of the weights of one layer, those whose gradients of a step are equal on both sides, and those that differ."""

    equal: tuple[str, ...] = ()
    different: tuple[str, ...] = ()

    @property
    def are_conclusive(self) -> bool:
        """True if they narrow the position down: if all of them differ, or none, they give no evidence."""
        return bool(self.equal and self.different)


def giver(tensor: Recorded, layers: Sequence[str]) -> str | None:
    """The layer whose output is what another takes, in that direction: no layer computes between the two.

    A record has, of the MTP streams of a model with modules, the main one, and at a
    module what that reads and makes. So what a module takes backward was given by
    none of the record's, and what the last block takes is the sum of two.

    Args:
        tensor: what a layer takes, at its border.
        layers: all layers of the record, in the order of the forward direction.
    """
    place, is_module = layers.index(tensor.layer), tensor.layer.startswith(_MODULE)
    if tensor.direction == "backward":
        after = layers[place + 1] if place + 1 < len(layers) else None
        return None if after is None or is_module or after.startswith(_MODULE) else after
    before = [layer for layer in layers[:place] if is_module or not layer.startswith(_MODULE)]
    return before[-1] if before else None


def placed(cause: Cause, first: Recorded, before: Recorded | None, layers: Sequence[str]) -> Cause:
    """A cause that follows from the position: a layer with equal inputs and a different output."""
    if cause.family is not Family.UNKNOWN or before is None or not _is_of_one_layer(before, first):
        return cause
    forward = first.direction == "forward"
    was_right = "" if forward else ", and forward it is right"
    is_module, has_modules = first.layer.startswith(_MODULE), any(layer.startswith(_MODULE) for layer in layers)
    reads_others = forward and (is_module or (has_modules and first.layer == layers[-1]))
    unrecorded = " (its inputs from other MTP streams are not recorded)" if reads_others else ""
    return Cause(
        Family.COMPUTATION,
        f"{first.layer} has equal inputs{unrecorded} and a different output{was_right}: the difference is made "
        f"in this layer, collectives inside it included; {cause.evidence}",
    )


def _is_of_one_layer(taken: Recorded, given: Recorded) -> bool:
    if taken.parameter or given.parameter:
        return False
    return (taken.layer, taken.direction, taken.micro_batch, taken.piece, taken.side, given.side) == (
        given.layer, given.direction, given.micro_batch, given.piece, "input", "output",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that differs.

    ``ranks`` are those whose part differs, where both records have the same
    parts; empty otherwise. ``ulps`` and ``relative`` are the largest over
    elements, None without values; ``place`` is the index of an element that is
    that many ulps off. ``handed_on`` is true if no layer computes between it and
    the equal tensor before it, which is the same one before it was handed on.
    ``weights`` are those of its layer, with their gradients in that step.
    """

    a: Recorded
    b: Recorded
    ranks: tuple[int, ...]
    ulps: int | None
    relative: float | None
    place: tuple[int, ...] | None
    cause: Cause
    handed_on: bool = False
    weights: WeightGradients = field(default_factory=WeightGradients)


@dataclass(slots=True)
class TensorAlignment:
    """Tensors of two records over all common steps.

    ``before`` is the last equal one before ``first``, or, where that was handed
    on, the same one before it was.
    """

    num_compared: int = 0
    num_differing: int = 0
    differing_steps: int = 0
    num_in_first_step: int = 0
    compared_in_first_step: int = 0
    first: TensorDifference | None = None
    before: Recorded | None = None
    only_a: int = 0
    only_b: int = 0
    example: str = ""
    """A tensor that one side lacks."""

    @property
    def equal(self) -> bool:
        """True if both have the same tensors, and they are equal."""
        return not (self.num_differing or self.only_a or self.only_b)


def paired_steps(
    a: RecordFile, b: RecordFile, report_step: Callable[[int], None]
) -> Iterator[tuple[RecordedStep | None, RecordedStep | None]]:
    """Steps of both by number, as they come; None where one side has no such step."""
    steps_a, steps_b = a.steps(), b.steps()
    next_a, next_b = next(steps_a, None), next(steps_b, None)
    while next_a is not None or next_b is not None:
        step = min(one.step for one in (next_a, next_b) if one is not None)
        pair = tuple(one if one is not None and one.step == step else None for one in (next_a, next_b))
        report_step(step)
        yield pair[0], pair[1]
        next_a = next_a if pair[0] is None else next(steps_a, None)
        next_b = next_b if pair[1] is None else next(steps_b, None)


class TensorComparison:
    """Comparison of the tensors of two records, step by step.

    Of layers' tensors those are compared that both have: a record without
    `--record-layers` has none.
    """

    def __init__(self, a: RecordFile, b: RecordFile, tolerance: Tolerance) -> None:
        self._a, self._b, self._tolerance = a, b, tolerance
        self._layers = a.header.layers and b.header.layers
        self._values = a.header.values and b.header.values
        self.found = TensorAlignment()

    def put(self, a: RecordedStep, b: RecordedStep) -> None:
        """Compare one step.

        Raises:
            AlignmentError: a file of values cannot be read.
        """
        ours, theirs = ({t.key: t for t in step.tensors if self._layers or t.parameter} for step in (a, b))
        found = self.found
        for mine, other, side in ((ours, theirs, "A"), (theirs, ours, "B")):
            lacking = [t for key, t in mine.items() if key not in other]
            if lacking:
                found.example = found.example or f"step {a.step}, {lacking[0].title}: only {side} has it"
            if side == "A":
                found.only_a += len(lacking)
            else:
                found.only_b += len(lacking)
        last: Recorded | None = None
        differing = 0
        common = [(t, theirs[key]) for key, t in ours.items() if key in theirs]
        for mine_, other_ in common:
            if self._equal(mine_, other_):
                last = mine_
                continue
            differing += 1
            if found.first is None:
                found.first, found.before = self._located(self._difference(mine_, other_), last, common)
        found.num_compared += len(common)
        found.num_differing += differing
        if differing:
            if not found.differing_steps:
                found.num_in_first_step, found.compared_in_first_step = differing, len(common)
            found.differing_steps += 1

    def _located(
        self, first: TensorDifference, last: Recorded | None, common: Sequence[tuple[Recorded, Recorded]]
    ) -> tuple[TensorDifference, Recorded | None]:
        """The first difference with the evidence of the tensors around it, and the last equal tensor before it."""
        mine, weights, source = first.a, WeightGradients(), None
        layers = list(dict.fromkeys(a.layer for a, _ in common if a.direction == "forward"))
        if mine.side == "input" and mine.layer in layers:
            given = {
                (a.layer, a.direction, a.micro_batch, a.piece): a
                for a, _ in common
                if not a.parameter and a.side == "output"
            }
            source = given.get((giver(mine, layers) or "", mine.direction, mine.micro_batch, mine.piece))
        if not mine.parameter:
            of_layer = [(a.parameter, self._equal(a, b)) for a, b in common if a.parameter and a.layer == mine.layer]
            equal, different = (tuple(name for name, is_equal in of_layer if is_equal is one) for one in (True, False))
            weights = WeightGradients(equal, different)
        cause = placed(first.cause, mine, last, layers)
        return replace(first, cause=cause, handed_on=source is not None, weights=weights), source or last

    def _equal(self, a: Recorded, b: Recorded) -> bool:
        return _same(a, b) or self._close(a, b)

    def _close(self, a: Recorded, b: Recorded) -> bool:
        if self._tolerance.bitwise or not self._values or (a.shape, a.dtype) != (b.shape, b.dtype):
            return False
        x, y = _values(self._a, a), _values(self._b, b)
        if x.others or y.others:
            return False
        return self._tolerance.allows(max_ulps(x.whole, y.whole), max_relative(x.whole, y.whole))

    def _difference(self, a: Recorded, b: Recorded) -> TensorDifference:
        ranks = _differing_ranks(a, b)
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            forms = f"A is {a.dtype} {list(a.shape)}, B {b.dtype} {list(b.shape)}"
            return TensorDifference(a, b, ranks, None, None, None, Cause(Family.UNKNOWN, forms))
        if not self._values:
            return TensorDifference(a, b, ranks, None, None, None, guess_from_norms(a, b))
        x, y = _values(self._a, a), _values(self._b, b)
        if a.md5 != b.md5:
            cause, p, q = guess(x, y, a, b), x.whole, y.whole
        else:  # what the lowest ranks hold is equal: it is what another one does
            rank, p, q = _other_part(a, b, x, y)
            apart = guess(Values(p, {}), Values(q, {}), a, b)
            cause = missing_reduction(x, y) or Cause(apart.family, f"on rank {rank}: {apart.evidence}")
        return TensorDifference(a, b, ranks, max_ulps(p, q), max_relative(p, q), _place(p, q), cause)


def _other_part(a: Recorded, b: Recorded, x: Values, y: Values) -> tuple[int, Array, Array]:
    """The first rank whose part differs from the whole tensor on one side, and its part on both."""
    rank = min((*x.others, *y.others))
    shards = next(shards for shards, values in ((a.shards, x), (b.shards, y)) if rank in values.others)
    index = next(tuple(slice(*ends) for ends in shard.index) for shard in shards if shard.rank == rank)
    return rank, x.others.get(rank, x.whole[index]), y.others.get(rank, y.whole[index])


def _same(a: Recorded, b: Recorded) -> bool:
    if (a.md5, a.shape, a.dtype) != (b.md5, b.shape, b.dtype):
        return False
    parts_a, parts_b = ({(s.rank, s.index): s.md5 for s in one.shards} for one in (a, b))
    return parts_a == parts_b if parts_a.keys() == parts_b.keys() else not (_torn(a) or _torn(b))


def _torn(recorded: Recorded) -> bool:
    """True if ranks hold different values of one part."""
    return len({(s.index, s.md5) for s in recorded.shards}) != len({s.index for s in recorded.shards})


def _differing_ranks(a: Recorded, b: Recorded) -> tuple[int, ...]:
    parts_a, parts_b = ({(s.rank, s.index): s.md5 for s in one.shards} for one in (a, b))
    if parts_a.keys() != parts_b.keys():
        return ()
    return tuple(sorted({rank for (rank, index), md5 in parts_a.items() if parts_b[rank, index] != md5}))


def _place(x: Array, y: Array) -> tuple[int, ...] | None:
    distances = ulps_between(x, y)
    if distances.size == 0 or x.shape != y.shape:
        return None
    worst = distances == FAR if bool((distances == FAR).any()) else distances
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(worst)), distances.shape))


def _values(record: RecordFile, recorded: Recorded) -> Values:
    file = values_file(record.directory, recorded.step)
    try:
        with open_foreign(file) as stream, np.load(stream) as arrays:
            others = {
                int(name.rpartition("@")[2]): arrays[name]
                for name in arrays.files
                if name.rpartition("@")[0] == recorded.key
            }
            whole = arrays[recorded.key]
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise AlignmentError(f"{file}: no values of {recorded.title}: {_reason(file, error)}") from error
    if (tuple(whole.shape), whole.dtype.name) != (recorded.shape, recorded.dtype):
        raise AlignmentError(
            f"{file}: {recorded.title} is {whole.dtype} {list(whole.shape)} there, not as in the record"
        )
    return Values(whole, others)


def _reason(file: Path, error: Exception) -> str:
    return str(error) if file.exists() else "the file is not there; copy the whole directory"
