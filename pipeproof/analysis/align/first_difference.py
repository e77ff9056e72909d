"""The first tensor that differs between two records, in execution order, and evidence about it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np

from pipeproof.analysis.align.array_digests import (
    FAR,
    Array,
    distance,
    is_fast,
    max_relative,
    max_ulps,
    rounding_bound,
    ulps_between,
)
from pipeproof.analysis.align.likely_cause import (
    Cause,
    CommonFactor,
    Family,
    common_factor,
    guess,
    guess_from_norms,
    missing_reduction,
)
from pipeproof.analysis.align.loss_pairs import Tolerance
from pipeproof.analysis.align.operations import Operation, Surroundings, operation_of
from pipeproof.analysis.align.read_record import Record, Values
from pipeproof.analysis.align.record_format import WHOLE, Recorded, RecordedStep
from pipeproof.analysis.align.record_map import Pair, RecordMap

# --- Evidence of the tensors around the first difference: its producer, and the correct outputs of its layer ---


_MODULE = "mtp."
"""Prefix of the names of modules of multi-token prediction."""


@dataclass(frozen=True, slots=True)
class WeightGradients:
    """The weights of one layer whose gradients in a step are equal on both sides, and the different ones."""

    equal: tuple[str, ...] = ()
    different: tuple[str, ...] = ()

    @property
    def are_conclusive(self) -> bool:
        """True if they narrow down the position: if all of them differ, or none, they give no evidence."""
        return bool(self.equal and self.different)


def giver(tensor: Recorded, layers: Sequence[str]) -> str | None:
    """The layer whose output is the input of another layer in a direction: no layer computes between the two.

    For MTP models a record stores only the main stream, plus each module's own input
    and output. The gradient that enters a module therefore has no recorded producer,
    and the gradient that enters the last block is the sum of two.

    Args:
        tensor: the input of a layer.
        layers: all layers of the record, in the order of the forward direction.
    """
    position, is_module = layers.index(tensor.layer), tensor.layer.startswith(_MODULE)
    if tensor.direction == "backward":
        after = layers[position + 1] if position + 1 < len(layers) else None
        return None if after is None or is_module or after.startswith(_MODULE) else after
    before = [layer for layer in layers[:position] if is_module or not layer.startswith(_MODULE)]
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


def _is_of_one_layer(taken: Recorded, output_tensor: Recorded) -> bool:
    if taken.parameter or output_tensor.parameter:
        return False
    return (taken.layer, taken.direction, taken.micro_batch, taken.piece, taken.side, output_tensor.side) == (
        output_tensor.layer, output_tensor.direction, output_tensor.micro_batch, output_tensor.piece, "input", "output",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that differs.

    ``ranks`` are the ranks whose part differs, if both records have the same
    parts; empty otherwise. ``ulps`` and ``relative`` are the largest over
    elements, None without values; ``place`` is the index of an element that is
    that many ulps off. ``handed_on`` is true if no layer computes between it and
    the equal tensor before it, which is the same tensor before it was passed on.
    ``weights`` are its layer's, with their gradients in that step.
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
    how: str = ""
    """Changes that brought A's tensor into B's terms."""
    operation: Operation | None = None
    bound: float | None = None


@dataclass(slots=True)
class TensorAlignment:
    """Tensors of two records over all common steps.

    ``before`` is the last equal one before ``first``, or, if that was passed
    on, the same tensor before that.
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
    num_on_purpose: int = 0
    """Tensors that have no partner on purpose."""
    num_rounding: int = 0
    first_step: int | None = None
    with_equal_bits: dict[str, None] = field(default_factory=dict)
    """Kinds of tensors (such as a layer's outputs), in order, with equal bits in some tensor of the first step."""
    with_other_bits: dict[str, None] = field(default_factory=dict)
    systematic: tuple[Recorded, CommonFactor] | None = None
    """The first tensor within the bound of rounding whose difference has a direction."""

    @property
    def equal(self) -> bool:
        """True if both have the same tensors, and they are equal, without a systematic difference."""
        return not (self.num_differing or self.only_a or self.only_b or self.systematic)


def paired_steps(
    a: Record, b: Record, report_step: Callable[[int], None]
) -> Iterator[tuple[RecordedStep | None, RecordedStep | None]]:
    """Steps of both by number, in order; None if one side lacks the step."""
    steps_a, steps_b = a.steps(), b.steps()
    next_a, next_b = next(steps_a, None), next(steps_b, None)
    while next_a is not None or next_b is not None:
        step = min(one.step for one in (next_a, next_b) if one is not None)
        pair = tuple(one if one is not None and one.step == step else None for one in (next_a, next_b))
        report_step(step)
        yield pair[0], pair[1]
        next_a = next_a if pair[0] is None else next(steps_a, None)
        next_b = next_b if pair[1] is None else next(steps_b, None)


class Verdict(IntEnum):
    """Class of the distance of a tensor from its partner."""

    EQUAL_BITS = 0
    ALLOWED = 1
    """Within the given tolerance."""
    ROUNDING = 2
    """Within the bound of rounding."""
    DIFFERENT = 3


@dataclass(frozen=True, slots=True)
class CheckedPair:
    """A pair, its verdict, and if measured its relative distance and the relative bound of rounding."""

    pair: Pair
    verdict: Verdict
    distance: float | None = None
    bound: float | None = None


class TensorComparison:
    """Comparison of the tensors of two records, step by step.

    Tensors of layers are compared if both records have them: a record without
    `--record-layers` has none.
    """

    def __init__(self, a: Record, b: Record, tolerance: Tolerance, partners: RecordMap) -> None:
        self._tolerance, self._map = tolerance, partners
        self._layers = a.header.layers and b.header.layers
        self._is_program = "program" in (a.header.who, b.header.who)
        self._noise = 0.0
        """Largest relative distance so far that counted as rounding: later tensors are computed from such tensors."""
        self._trained: set[str] = set()
        """B's layers that had gradients of weights in the previous step, all equal."""
        self.found = TensorAlignment()

    def put(self, a: RecordedStep, b: RecordedStep) -> None:
        """Compare one step.

        Raises:
            AlignmentError: a file of values cannot be read.
            AoaError: a statement of the map does not fit.
        """
        alignment = self.found
        paired = self._map.paired(a, b, lambda t: self._layers or bool(t.parameter))
        alignment.num_on_purpose += paired.on_purpose
        for lacking, side in ((paired.only_a, "A"), (paired.only_b, "B")):
            if lacking:
                alignment.example = alignment.example or f"step {a.step}, {lacking[0].title}: only {side} has it"
        alignment.only_a += len(paired.only_a)
        alignment.only_b += len(paired.only_b)
        surroundings = Surroundings(paired.pairs)
        checked = [self._checked(pair, surroundings) for pair in paired.pairs]
        differing = [each for each in checked if self._differs(each)]
        if differing and alignment.first is None:
            located, alignment.before = self._located(differing[0], checked, surroundings)
            alignment.first = _by_optimizer(located) if located.b.layer in self._trained else located
        self._trained = {each.pair[1].recorded.layer for each in checked if each.pair[1].recorded.parameter}
        alignment.num_compared += len(checked)
        alignment.num_differing += len(differing)
        alignment.num_rounding += sum(each.verdict is Verdict.ROUNDING for each in checked)
        for each in checked if alignment.first_step in (None, a.step) else ():
            alignment.first_step, tensor = a.step, each.pair[1].recorded
            names = alignment.with_equal_bits if each.verdict is Verdict.EQUAL_BITS else alignment.with_other_bits
            names.setdefault(tensor.kind, None)
        if alignment.first_step == a.step and self._tolerance.rounding and self._is_program:
            alignment.systematic = _systematic(checked)  # in later steps weights are equal within rounding only
        if differing:
            if not alignment.differing_steps:
                alignment.num_in_first_step, alignment.compared_in_first_step = len(differing), len(checked)
            alignment.differing_steps += 1

    def _differs(self, checked: CheckedPair) -> bool:
        return checked.verdict > (Verdict.ROUNDING if self._tolerance.rounding else Verdict.ALLOWED)

    def _checked(self, pair: Pair, surroundings: Surroundings) -> CheckedPair:
        a, b = (side.recorded for side in pair)
        if _same(a, b):
            return CheckedPair(pair, Verdict.EQUAL_BITS)
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return CheckedPair(pair, Verdict.DIFFERENT)
        x, y = (side.values() for side in pair)
        if x is None or y is None:
            return CheckedPair(pair, self._by_norms(a, b))
        if x.others or y.others:
            return CheckedPair(pair, Verdict.DIFFERENT)
        ulps, relative, bound = distance(
            x.whole, y.whole, a.dtype, self._noise,
            lambda: surroundings.cancellation(b, y.whole) if a.parameter else 1.0,
        )  # fmt: skip
        if ulps == 0 and (not a.md5 or not b.md5 or is_fast(a.md5) != is_fast(b.md5)):
            return CheckedPair(pair, Verdict.EQUAL_BITS)
        if not self._tolerance.bitwise and self._tolerance.allows(ulps, relative):
            return CheckedPair(pair, Verdict.ALLOWED, relative)
        if relative <= bound:
            self._noise = max(self._noise, relative * rounding_bound(a.dtype, self._noise) / bound)
            return CheckedPair(pair, Verdict.ROUNDING, relative, bound)
        return CheckedPair(pair, Verdict.DIFFERENT, relative, bound)

    def _by_norms(self, a: Recorded, b: Recorded) -> Verdict:
        """Norms can only show that tensors are not equal within rounding."""
        if not self._is_program or torn(a) or torn(b):
            return Verdict.DIFFERENT
        largest = max(a.norm, b.norm)
        near = abs(a.norm - b.norm) <= rounding_bound(a.dtype, self._noise) * largest
        return Verdict.ROUNDING if near else Verdict.DIFFERENT

    def _located(
        self, first: CheckedPair, checked: Sequence[CheckedPair], surroundings: Surroundings
    ) -> tuple[TensorDifference, Recorded | None]:
        """The first difference with the evidence of the tensors around it, and the last equal tensor before it."""
        difference = self._difference(first, surroundings)
        position = checked.index(first)
        last = next((each.pair[0].recorded for each in reversed(checked[:position]) if not self._differs(each)), None)
        is_equal = {each.pair[1].recorded.key: not self._differs(each) for each in checked}
        if self._is_program:
            operation = operation_of(first.pair[1].recorded, [each.pair[1].recorded for each in checked], is_equal)
            cause = difference.cause
            if cause.family is Family.ACCUMULATION_ORDER and (factor := _factor(first, _inputs_of_calls(checked))):
                cause = factor.cause
            if cause.family is Family.UNKNOWN and operation.are_inputs_equal:
                cause = Cause(Family.COMPUTATION, f"the inputs are equal, and the result is not; {cause.evidence}")
            if cause.family is Family.SCALE and difference.a.parameter:
                cause = Cause(Family.SCALE, f"{cause.evidence}; {_weights_scaled(checked)}")
            return replace(difference, operation=operation, cause=cause), last
        return self._placed(difference, last, checked, is_equal)

    def _placed(
        self,
        first: TensorDifference,
        last: Recorded | None,
        checked: Sequence[CheckedPair],
        is_equal: Mapping[str, bool],
    ) -> tuple[TensorDifference, Recorded | None]:
        """The first difference in a plan's layers, which follow one another."""
        mine, weights, source = first.a, WeightGradients(), None
        common = [each.pair[0].recorded for each in checked]
        layers = list(dict.fromkeys(a.layer for a in common if a.direction == "forward"))
        if mine.side == "input" and mine.layer in layers:
            outputs = {
                (a.layer, a.direction, a.micro_batch, a.piece): a
                for a in common
                if not a.parameter and a.side == "output"
            }
            source = outputs.get((giver(mine, layers) or "", mine.direction, mine.micro_batch, mine.piece))
        if not mine.parameter:
            of_layer = [(a.parameter, is_equal[a.key]) for a in common if a.parameter and a.layer == mine.layer]
            equal, different = (tuple(name for name, is_equal in of_layer if is_equal is one) for one in (True, False))
            weights = WeightGradients(equal, different)
        cause = placed(first.cause, mine, last, layers)
        if source is not None and cause.family is Family.UNKNOWN:
            cause = self._by_own_values(mine, source, checked) or cause
        return replace(first, cause=cause, handed_on=source is not None, weights=weights), source or last

    def _by_own_values(self, mine: Recorded, source: Recorded, checked: Sequence[CheckedPair]) -> Cause | None:
        """The cause, from A's own tensor before and after it was passed on: these must be equal without rounding."""
        own = {each.pair[0].recorded.key: each.pair[0] for each in checked}
        x, y = own[mine.key].values(), own[source.key].values()
        if x is None or y is None or x.whole.shape != y.whole.shape:
            return None
        cause = guess(Values(x.whole, {}), Values(y.whole, {}), mine, source)
        if cause.family is Family.UNKNOWN:
            return None
        return Cause(cause.family, f"next to what A had before it was handed on, for B: {cause.evidence}")

    def _difference(self, checked: CheckedPair, surroundings: Surroundings) -> TensorDifference:
        a, b = (side.recorded for side in checked.pair)
        how, ranks = checked.pair[0].how, _differing_ranks(a, b)
        blank = TensorDifference(a, b, ranks, None, None, None, Cause(Family.UNKNOWN, ""), how=how, bound=checked.bound)
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            forms = f"A is {a.dtype} {list(a.shape)}, B {b.dtype} {list(b.shape)}"
            return replace(blank, cause=Cause(Family.UNKNOWN, forms))
        x, y = (side.values() for side in checked.pair)
        if x is None or y is None:
            return replace(blank, cause=guess_from_norms(a, b))
        if a.md5 != b.md5 or not (x.others or y.others):
            cause, p, q = guess(x, y, a, b, surroundings), x.whole, y.whole
        else:  # the lowest ranks' parts are equal: another rank's differs
            rank, p, q = _other_part(a, b, x, y)
            apart = guess(Values(p, {}), Values(q, {}), a, b)
            cause = missing_reduction(x, y) or Cause(apart.family, f"on rank {rank}: {apart.evidence}")
        return replace(blank, ulps=max_ulps(p, q), relative=max_relative(p, q), place=_place(p, q), cause=cause)


def _inputs_of_calls(checked: Sequence[CheckedPair]) -> Mapping[tuple[str, int], list[CheckedPair]]:
    """Inputs of each module without inner ones, by layer and micro-batch."""
    layers = {each.pair[1].recorded.layer for each in checked}
    outer = {name[: dot.start()] for name in layers for dot in re.finditer(r"\.", name)}
    calls: dict[tuple[str, int], list[CheckedPair]] = {}
    for each in checked:
        tensor = each.pair[1].recorded
        is_read = not tensor.parameter and (tensor.direction, tensor.side) == ("forward", "input")
        if is_read and tensor.layer not in outer and (tensor.layer != WHOLE or len(layers) == 1):
            calls.setdefault((tensor.layer, tensor.micro_batch), []).append(each)
    return calls


def _factor(each: CheckedPair, calls: Mapping[tuple[str, int], Sequence[CheckedPair]]) -> CommonFactor | None:
    """The common factor of a module's results from inputs with equal bits.

    Forward only: the gradient of a tensor is a sum over all its readers.
    """
    tensor = each.pair[1].recorded
    reads = calls.get((tensor.layer, tensor.micro_batch), ())
    is_made = not tensor.parameter and (tensor.direction, tensor.side) == ("forward", "output")
    if not is_made or not reads or any(read.verdict is not Verdict.EQUAL_BITS for read in reads):
        return None
    x, y, read = (side.values() for side in (*each.pair, reads[0].pair[1]))
    if x is None or y is None:
        return None
    return common_factor(x.whole, y.whole, None if read is None else read.whole, tensor.dtype)


def _systematic(checked: Sequence[CheckedPair]) -> tuple[Recorded, CommonFactor] | None:
    calls = _inputs_of_calls(checked)
    rounded = [each for each in checked if each.verdict is Verdict.ROUNDING]
    factors = ((each.pair[1].recorded, _factor(each, calls)) for each in rounded)
    return next(((tensor, factor) for tensor, factor in factors if factor is not None), None)


def _by_optimizer(difference: TensorDifference) -> TensorDifference:
    """The difference; blamed on the optimizer if a layer with trained weights makes it in the next forward."""
    tensor, cause, operation = difference.b, difference.cause, difference.operation
    is_made_here = operation.are_inputs_equal if operation else cause.family is Family.COMPUTATION
    has_cause = cause.family not in (Family.COMPUTATION, Family.SCALE)
    if has_cause or not is_made_here or (tensor.direction, tensor.side, tensor.parameter) != ("forward", "output", ""):
        return difference
    named = operation and replace(operation, name=f"the optimizer, which wrote the weights of {operation.name}")
    evidence = (
        f"all of the step before was equal, gradients included, and since then only the weights of {tensor.layer} have "
        f"changed: by other settings of the optimizer, or not at all; {cause.evidence}"
    )
    return replace(difference, operation=named, cause=Cause(Family.OPTIMIZER, evidence))


def _weights_scaled(checked: Sequence[CheckedPair]) -> str:
    """Number of weights' gradients whose norms have the ratio of the first one that differs."""
    pairs = [each.pair for each in checked if each.pair[0].recorded.parameter]
    norms = [(a.recorded.norm, b.recorded.norm) for a, b in pairs]
    ratios = [x / y for x, y in norms if y > 0.0 and math.isfinite(x)]
    first = next((ratio for ratio in ratios if abs(ratio - 1.0) > _NORM_ROUNDING), 1.0)
    same = sum(abs(ratio / first - 1.0) <= _NORM_ROUNDING for ratio in ratios)
    everywhere = ", as by the loss's scale, a mean over micro-batches or ranks, or clipping on one side only"
    return f"the gradients of {same} of {len(ratios)} weights have that ratio{everywhere * (same == len(ratios) > 1)}"


_NORM_ROUNDING = 1e-4


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
    return parts_a == parts_b if parts_a.keys() == parts_b.keys() else not (torn(a) or torn(b))


def torn(recorded: Recorded) -> bool:
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
