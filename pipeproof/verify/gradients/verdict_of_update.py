"""Verdict on one parameter's update: the declared sum, or its missing_terms and wrong weights.

Values come first: one more reduction, or a scale in another place, is correct
if every token has its declared weight. Causes are searched only for wrong
sums.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, product
from math import prod

import numpy as np

from pipeproof.schedule.derive import BoolColumn
from pipeproof.schedule.op_table import NONE, IntColumn
from pipeproof.stages.describe.gradient_facts import (
    BATCH_AXES,
    TOKEN_AXES,
    Loss,
    LossPath,
    ParameterGradient,
)
from pipeproof.verify.gradients.coefficient import ONE, ZERO, Coefficient
from pipeproof.verify.gradients.expected_gradients import Model, Site, Sites, of_micro_batch
from pipeproof.verify.gradients.explain_sum import Count, HeldGradient, repeated
from pipeproof.verify.gradients.parameter_view import Change, ChangeKind, State

# --- The rows whose scales make a token's weight wrong: without them, it would be right ---


ScaledRow = tuple[int, Coefficient]
"""A row and its factor of a token's gradient."""

_MOST_TRIED = 10
"""Number of scaled rows up to which all subsets are tried."""


def scales_of_sum(
    model: Model, held: HeldGradient, rank: int, sources: Collection[int], position: int
) -> list[ScaledRow]:
    """The scaled rows that a micro-batch's gradient meets, from the ranks that add it to the rank that reads it."""
    result = dict[int, Coefficient]()
    for source in sources:
        result |= dict(_scales_of_rank(model, held, source, position, whole=source == rank))
    if rank not in sources:
        view = held.views[rank]
        first = next(iter(view.where(ChangeKind.REDUCE)), len(view.changes))
        result |= {int(view.ops[i][0]): _factor(model, view.changes[i]) for i in range(first, len(view.changes))}
    return [(row, factor) for row, factor in result.items() if factor != ONE]


def _scales_of_rank(
    model: Model, held: HeldGradient, source: int, position: int, *, whole: bool
) -> Iterator[tuple[int, Coefficient]]:
    """(row, factor) of the addition of a micro-batch and of later rows; up to the first sum, if not ``whole``."""
    view = held.views[source]
    is_added = False
    for change, ops in zip(view.changes, view.ops, strict=True):
        if change.kind in (ChangeKind.ADD, ChangeKind.OVERWRITE):
            if view.counts[change.addend][position]:
                is_added = True
                yield int(ops[0]), change.factor
        elif is_added and (change.kind is not ChangeKind.REDUCE or change.position in (NONE, position)):
            if change.kind is ChangeKind.REDUCE and not whole:
                return
            yield int(ops[0]), _factor(model, change)


def _factor(model: Model, change: Change) -> Coefficient:
    if not change.average:
        return change.factor
    whole = change.group == NONE
    size = model.grid.size(change.axis or "") if whole else Coefficient.of(model.graph.groups[change.group].size)
    return change.factor * size.inverse


def rows_to_blame(
    scaled: Sequence[ScaledRow], error: Coefficient | None, seen: Callable[[Coefficient], Coefficient] = lambda c: c
) -> tuple[int, ...]:
    """The fewest rows whose scales multiply to the error of a weight; all, if no few of them do.

    ``seen`` is a factor from the token's view.
    """
    if error is not None:
        tried = [(row, seen(factor)) for row, factor in scaled[:_MOST_TRIED]]
        for number in range(1, len(tried) + 1):
            for some in combinations(tried, number):
                if prod((factor for _, factor in some), start=ONE) == error:
                    return tuple(row for row, _ in some)
    return tuple(row for row, _ in scaled)


def rows_to_blame_for_both(
    actual: Coefficient, scaled: Sequence[ScaledRow], like: Coefficient, like_scaled: Sequence[ScaledRow]
) -> tuple[int, ...]:
    """The rows that make two undeclared weights differ."""
    if any(len(factor.terms) != 1 for factor in (like, *(factor for _, factor in like_scaled))):  # zero, or a sum
        return rows_to_blame([*scaled, *like_scaled], None)
    own = [one for one in scaled if one not in like_scaled]
    others = [(row, factor.inverse) for row, factor in like_scaled if (row, factor) not in scaled]
    return rows_to_blame([*own, *others], actual * like.inverse)


_ALL = -2
"""Coordinate that means the whole line of ranks."""

Part = tuple[int, tuple[int, ...]]
"""(stage, coordinates on the axes over which the gradient is partial)."""


@dataclass(frozen=True, slots=True)
class Addend:
    """Addends of one rank by micro-batch, and their factor in the end."""

    rank: int
    counts: IntColumn
    factor: Coefficient


Verdict = tuple[Sequence[str], Sequence[Count]] | None
"""Verdict on a sum: None if it is right, else its missing terms, and tokens with another weight."""


@dataclass(frozen=True, slots=True)
class _Sum:
    """A sum that an optimizer reads: its stage, the parameter's name, and the scaled rows that a micro-batch meets."""

    stage: int
    name: str
    scaled: Callable[[int], list[ScaledRow]]


@dataclass(frozen=True, slots=True)
class _Weight:
    """Weight of tokens in the sum of a parameter, and the scaled rows that it comes from."""

    ratio: Coefficient
    tokens: str
    name: str
    scaled: Callable[[], list[ScaledRow]]


@dataclass(eq=False)
class UpdateChecker:
    """Check of the gradients of one model; remembers by loss the weight of tokens that have no declared one."""

    model: Model
    sites: Sites
    _likes: dict[tuple[str, int], _Weight] = field(default_factory=dict)

    def verdict(self, held: HeldGradient, rank: int, state: State) -> Verdict:
        """Verdict on the update of a parameter that ``rank`` makes from ``state``."""
        parameter = held.parameter
        if self.model.facts.guessed and repeated(held.views[rank]):  # the factor is wrong in any case
            return (), ()
        paths: Sequence[LossPath | None] = parameter.losses or (None,)
        missing_terms: dict[str, None] = {}
        counts: list[Count] = []
        for path in paths:
            parts = self._parts(held, path, rank, state)
            if parts is None:
                missing_terms["unexpected"] = None
                continue
            missing_terms |= dict.fromkeys(self._missing_terms(held, path, rank, parts))
            counts += self._counts(held, path, rank, parts)
        return (tuple(missing_terms), counts) if missing_terms or counts else None

    def _parts(
        self, held: HeldGradient, path: LossPath | None, rank: int, state: State
    ) -> dict[Part, list[Addend]] | None:
        """The state from one loss's view, None if it has values outside of the gradient.

        Over an axis where all ranks hold the same, the rank does not matter.
        """
        grid, partial = self.model.grid, self._partial(held.parameter, path)
        cut = [axis for axis in grid.axes if axis in held.parameter.sharded_over]
        equal = [axis for axis in grid.axes if axis not in partial and axis not in cut and axis != "pp"]
        parts: dict[Part, list[Addend]] = {}
        for (source, addend, summed), value in state.items():
            if source == NONE or any(
                axis in summed or (axis not in held.folded and grid.place(source, axis) != grid.place(rank, axis))
                for axis in cut
            ):
                return None
            factor = prod((grid.size(axis) for axis in equal if axis in summed), start=value)
            coordinates = tuple(_ALL if axis in summed else grid.place(source, axis) for axis in partial)
            view = held.views[source]
            parts.setdefault((view.stages[addend], coordinates), []).append(Addend(source, view.counts[addend], factor))
        return parts

    def _partial(self, parameter: ParameterGradient, path: LossPath | None) -> tuple[str, ...]:
        return self.model.partial_axes(parameter, parameter.partial_axes(path))

    def _missing_terms(
        self, held: HeldGradient, path: LossPath | None, rank: int, parts: Mapping[Part, Sequence[Addend]]
    ) -> Iterator[str]:
        """Missing parts of the sum: axes, ``pp`` for another copy's share, ``lost`` for overwritten addends."""
        partial = self._partial(held.parameter, path)
        if not parts:
            if held.views[rank].counts:
                yield "lost"
            return
        yield from self._short(held, partial, parts)
        for (stage, _), addends in parts.items():
            there = np.any([addend.counts > 0 for addend in addends], axis=0)
            if there.all():
                continue
            sources = {addend.rank for addend in addends}
            if (_added(held, sources, stage) & ~there).any():
                yield "lost"
            others = {other for source in sources for other in self.model.grid.line(source, "pp")} - sources
            if not self.model.facts.guessed and (_added(held, others, stage) & ~there).any():
                yield "pp"

    def _short(self, held: HeldGradient, partial: Sequence[str], parts: Mapping[Part, object]) -> Iterator[str]:
        """Axes whose ranks are not all in the sum; ``pp`` if they are, but not with every copy."""
        expected = [self._line(axis, held.folded) for axis in partial]
        everywhere = {coordinates for _, coordinates in parts}
        missing = set(product(*expected)) - everywhere
        if missing:
            short = [axis for i, axis in enumerate(partial) if not set(expected[i]) <= {at[i] for at in everywhere}]
            yield from short or partial
        elif len(parts) < len(everywhere) * len(held.parameter.stages):
            yield "pp"

    def _line(self, axis: str, folded: frozenset[str]) -> Sequence[int]:
        number = self.model.grid.size(axis).number
        return [_ALL] if axis in folded or number is None else range(int(number))

    def _counts(
        self, held: HeldGradient, path: LossPath | None, rank: int, parts: Mapping[Part, Sequence[Addend]]
    ) -> Iterator[Count]:
        """Weights of tokens that differ from the declared ones."""
        parameter = held.parameter
        axes = self._partial(parameter, path)
        for (stage, coordinates), addends in parts.items():
            coords = {axis: p for axis, p in zip(axes, coordinates, strict=True) if p != _ALL}
            read = _Sum(stage, parameter.name, partial(self._scales_of_sum, held, rank, addends))
            for site in self._sites_of(parameter, path, stage):
                for factor, micro_batches in _columns(addends):
                    for code, also in site.seen(self.model, coords):
                        both = np.flatnonzero(micro_batches & also)
                        yield from self._differing(site, code, factor, both, coords, read)

    def _scales_of_sum(
        self, held: HeldGradient, rank: int, addends: Sequence[Addend], position: int
    ) -> list[ScaledRow]:
        sources = {addend.rank for addend in addends if addend.counts[position]}
        return scales_of_sum(self.model, held, rank, sources, position)

    def _sites_of(self, parameter: ParameterGradient, path: LossPath | None, stage: int) -> list[Site]:
        if parameter.losses == ():
            return [unscaled(parameter, stage)]
        return self.sites.reaching(stage, None if path is None else path.loss)

    def evaluation(self) -> Iterator[Count]:
        """Weights of tokens in the losses themselves that differ from the declared ones."""
        for site in self.sites.all:
            for code, micro_batches in site.seen(self.model, {}):
                read = _Sum(site.loss.stage, "", lambda _: [])
                yield from self._differing(site, code, ONE, np.flatnonzero(micro_batches), {}, read)

    def _differing(
        self, site: Site, code: int, factor: Coefficient, places: IntColumn, coords: Mapping[str, int], read: _Sum
    ) -> Iterator[Count]:
        """The first micro-batch of ``places`` whose tokens have another weight than they should."""
        ratio = site.ratios[code] * factor
        loss = site.loss
        if site.declared is None:
            for position in places[:1].tolist():
                yield from self._unlike(site, ratio, code, position, coords, read)
        elif ratio != ONE:
            for position, data_rank in self._blocks(ratio, places, coords):
                error = self._seen_from(ratio, position, data_rank)
                if error != ONE:
                    row = site.forward(self.model, code, position, coords)
                    actual = self.model.in_numbers(ratio * site.declared, data_rank, position)
                    declared = self.model.in_numbers(site.declared, data_rank, position)
                    text = f"{declared} ({loss.scale})" if str(declared) != loss.scale else str(declared)
                    seen_from = partial(self._seen_from, place=position, data_rank=data_rank)
                    ops = rows_to_blame(self._scaled(site, code, position, row, read), error, seen_from)
                    tokens = self._tokens(position, coords, self._named(site, code, row))
                    yield Count(loss.name, loss.stage, tokens, actual, declared, text, ops=ops)
                    return

    def _unlike(
        self, site: Site, ratio: Coefficient, code: int, position: int, coords: Mapping[str, int], read: _Sum
    ) -> Iterator[Count]:
        """The tokens of a micro-batch, if the first seen tokens have another weight."""
        loss = site.loss
        row = site.forward(self.model, code, position, coords)
        tokens = self._tokens(position, coords, self._named(site, code, row))
        own = _Weight(ratio, tokens, read.name, partial(self._scaled, site, code, position, row, read))
        like = self._likes.setdefault((loss.name, loss.stage), own)
        if like.ratio != ratio:
            others = f"{like.tokens} in the update of `{like.name}`" if like.tokens == tokens else like.tokens
            ops = rows_to_blame_for_both(ratio, own.scaled(), like.ratio, like.scaled())
            yield Count(loss.name, loss.stage, tokens, ratio, None, str(like.ratio), others, ops)

    def _scaled(self, site: Site, code: int, position: int, forward: int | None, read: _Sum) -> list[ScaledRow]:
        """The scaled rows that the tokens of a micro-batch meet: between stages, on their gradients, on their loss."""
        result = read.scaled(position)
        if forward is not None:
            travelling = self.sites.travelling
            between = [] if travelling is None else list(travelling.rows(forward, read.stage))
            result = [*between, *result]
            if site.own[code] != ONE and self.model.graph.scale[forward]:
                result.append((forward, site.own[code]))
        return result

    def _named(self, site: Site, code: int, forward: int | None) -> int | None:
        """The forward, if it or the way of its gradient has a scale of its own."""
        has_own = forward is not None and (self.model.graph.scale[forward] or site.own[code] != site.ratios[code])
        return forward if has_own else None

    def _blocks(self, ratio: Coefficient, places: IntColumn, coords: Mapping[str, int]) -> Iterator[tuple[int, int]]:
        """(micro-batch's index, data rank) of tokens for which a ratio may have different values."""
        if not self.model.facts.token_counts:
            named = any("[" in name for name in ratio.names)
            yield from ((position, 0) for position in (places if named else places[:1]).tolist())
            return
        lines = []
        for axis in BATCH_AXES:
            size = int(self.model.grid.size(axis).number or 1)
            lines.append([coords[axis]] if axis in coords else range(size))
        num_inner = int(self.model.grid.size(BATCH_AXES[1]).number or 1)
        for outer, inner in product(*lines):
            yield from ((position, outer * num_inner + inner) for position in places.tolist())

    def _seen_from(self, ratio: Coefficient, place: int, data_rank: int) -> Coefficient:
        """A ratio from the view of a token of one micro-batch."""
        for name in ("micro_batch_tokens", "rank_tokens"):
            own = of_micro_batch(name, int(self.model.micro_batches[place]))
            if own in ratio.names:
                ratio = ratio.where(own, Coefficient.named(name))
        return self.model.in_numbers(ratio, data_rank, place)

    def _tokens(self, position: int, coords: Mapping[str, int], row: int | None) -> str:
        """Text for the tokens at some coordinates, or on the rank of a forward with a scale."""
        grid = self.model.grid
        if row is not None:
            rank = int(self.model.graph.rank[row])
            axes = [axis for axis in grid.axes if axis in TOKEN_AXES and axis not in grid.folded]
            coords = {axis: grid.place(rank, axis) for axis in axes}
        where = "".join(f" on {axis} {at}" for axis, at in coords.items())
        return f"micro-batch {self.model.graph.work_item_text(int(self.model.micro_batches[position]))}{where}"


def unscaled(parameter: ParameterGradient, stage: int) -> Site:
    """The site of a sum that no loss scales: each contribution counts once."""
    nothing = np.empty(0, dtype=np.int64)
    return Site(Loss(parameter.name, stage, "1"), ONE, nothing, nothing, nothing, (ONE,), (ONE,))


def _added(held: HeldGradient, ranks: set[int], stage: int) -> BoolColumn:
    """Mask of the micro-batches that any of the ranks adds to the gradient of a stage's copy, lost or not."""
    columns = [
        counts > 0
        for rank in sorted(ranks & held.views.keys())
        for counts, of_stage in zip(held.views[rank].counts, held.views[rank].stages, strict=True)
        if of_stage == stage
    ]
    return np.any(columns, axis=0) if columns else np.zeros(1, dtype=bool)


def _columns(addends: Sequence[Addend]) -> Iterator[tuple[Coefficient, BoolColumn]]:
    """(factor, micro-batches that have it) for all added micro-batches."""
    if len(addends) == 1 and (addends[0].counts == 1).all():
        yield addends[0].factor, np.ones(len(addends[0].counts), dtype=bool)
        return
    table = np.stack([addend.counts for addend in addends])
    if (table == table[:, :1]).all():
        columns, which = table[:, :1], np.zeros(table.shape[1], dtype=np.int64)
    else:
        columns, which = np.unique(table, axis=1, return_inverse=True)
        which = which.ravel()
    for i, column in enumerate(columns.T.tolist()):
        if any(column):
            shares = (addend.factor * Coefficient.of(n) for n, addend in zip(column, addends, strict=True) if n)
            yield sum(shares, ZERO), which == i
