"""Expected gradients of a subject: the facts, the ranks' coordinates on the mesh, sizes by name, loss scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from pipeproof.diagnostics.problems import grouped
from pipeproof.schedule.columns import REDUCTIONS
from pipeproof.schedule.derive import BoolColumn
from pipeproof.schedule.op_table import NONE, IntColumn, OpGraph
from pipeproof.schedule.ops import AXES, KIND_CODE, OpKind
from pipeproof.stages.describe.gradient_facts import (
    BATCH_AXES,
    MAIN_LOSS,
    TOKEN_AXES,
    GradientFacts,
    Loss,
    ParameterGradient,
    custom_gradients,
    gpt_gradients,
    with_router_losses,
)
from pipeproof.stages.describe.mtp_streams import with_mtp_losses
from pipeproof.verify.gradients.coefficient import (
    ONE,
    TRAVELLING,
    Coefficient,
    Factors,
    TravellingScales,
    parse_scale,
    single_product,
)
from pipeproof.verify.gradients.gradient_history import (
    Grid,
    guessed_grid,
    mesh_grid,
    micro_batch_places,
    named_parameters,
)

if TYPE_CHECKING:
    from pipeproof.verify.subject import Subject


ADDS = frozenset({OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT})
"""Operations that add a micro-batch's contribution to the gradients of a stage."""


@dataclass(frozen=True, eq=False)
class Model:
    """Facts, grid and sizes of one subject. ``micro_batches`` are the work items of the step, in rising order."""

    graph: OpGraph
    facts: GradientFacts
    grid: Grid
    micro_batches: IntColumn

    @cached_property
    def parameters_of(self) -> Mapping[int, tuple[int, ...]]:
        """Indices of the parameters that have a copy on each stage, in their order."""
        result = grouped((stage, i) for i, parameter in enumerate(self.facts.parameters) for stage in parameter.stages)
        return {stage: tuple(indices) for stage, indices in result.items()}

    def settled(self, rank: int, stage: int) -> tuple[int, ...]:
        """Indices of the parameters that a rank reduces and updates with a stage.

        A weight that several stages of a rank use exists once, and belongs to the first of them.
        """
        params = self.parameters_of.get(stage, ())
        if not any(len(self.facts.parameters[p].stages) > 1 for p in params):
            return params
        selected = self._stages_of.get(rank, frozenset()) | {stage}
        return tuple(p for p in params if stage == min(selected.intersection(self.facts.parameters[p].stages)))

    @cached_property
    def _stages_of(self) -> Mapping[int, frozenset[int]]:
        computed = self.graph.is_kind(frozenset({OpKind.FORWARD, *ADDS}))
        pairs = np.unique(np.stack([self.graph.rank[computed], self.graph.stage[computed]]), axis=1)
        result: dict[int, set[int]] = {}
        for rank, stage in pairs.T.tolist():
            result.setdefault(rank, set()).add(stage)
        return {rank: frozenset(stages) for rank, stages in result.items()}

    def flat_starts(self, stage: int) -> Mapping[int, int]:
        """By parameter of known size, its first element in the flat buffer of a stage's gradients."""
        at, result = 0, {}
        for p in self.parameters_of.get(stage, ()):
            parameter = self.facts.parameters[p]
            if parameter.numel is None:
                break
            result[p] = at if parameter.flat_start is None else parameter.flat_start
            at = result[p] + parameter.numel
        return result

    def is_reduced(self, parameter: ParameterGradient, axis: str) -> bool:
        """Return True if a reduction over ``axis`` is needed, or, over ``pp``, if there are copies to be summed."""
        if axis == "pp":
            return len(parameter.stages) > 1
        return axis in parameter.partial_axes()

    def partial_axes(self, parameter: ParameterGradient, axes: frozenset[str]) -> tuple[str, ...]:
        """The ``axes`` of the mesh over which the parameter is not sharded, in the grid's order."""
        return tuple(axis for axis in self.grid.axes if axis in axes and axis not in parameter.sharded_over)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step, each counted once however many splits its sequences have."""
        return len(self.micro_batches) // max(1, self.graph.num_splits)

    @cached_property
    def data_ranks(self) -> Coefficient:
        """Ranks with micro-batches of their own."""
        return prod(map(self.grid.size, BATCH_AXES), start=ONE)

    @cached_property
    def fixed_sizes(self) -> Mapping[str, Coefficient]:
        """Sizes that mean the same for every token."""
        return {
            **{axis: self.grid.size(axis) for axis in AXES},
            "num_micro_batches": Coefficient.of(self.num_micro_batches),
            "data_ranks": self.data_ranks,
            "global_tokens": self.block_sizes["global_tokens"],
        }

    @cached_property
    def block_sizes(self) -> Mapping[str, Coefficient]:
        """Numbers of tokens from one token's view: of its micro-batch, of its rank's step, of the whole step."""
        micro_batch = Coefficient.named("micro_batch_tokens")
        num = self.num_micro_batches
        cp = self.grid.size("cp")
        share = Coefficient.named("rank_tokens")
        step = micro_batch if num == 1 else Coefficient.named("step_tokens")
        whole = step if self.data_ranks == ONE else Coefficient.named("global_tokens")
        if self.facts.even_tokens:
            share = micro_batch * cp.inverse
            step = micro_batch * Coefficient.of(num)
            whole = step * self.data_ranks
        return {
            "micro_batch_tokens": micro_batch,
            "rank_tokens": micro_batch if cp == ONE else share,
            "step_tokens": step,
            "global_tokens": whole,
        }

    def rank_sizes(self, micro_batch: int, *, reduced: bool) -> Mapping[str, Coefficient]:
        """Numbers of tokens for a row of one micro-batch, or (``NONE``) of the step.

        After a reduction the gradient also holds other ranks' tokens: the
        rank's own numbers then do not apply to every token in it.
        """
        sizes = dict(self.block_sizes)
        if self.facts.even_tokens:
            return sizes
        if micro_batch == NONE and len(self.micro_batches) > 1:
            del sizes["micro_batch_tokens"], sizes["rank_tokens"]
        elif len(self.micro_batches) > 1:
            sizes = {
                name: Coefficient.named(of_micro_batch(str(size), micro_batch)) if name in _OF_BLOCK else size
                for name, size in sizes.items()
            }
        if reduced and self.data_ranks != ONE:
            sizes |= {
                name: Coefficient.named(f"{size}_of_one_rank") for name, size in sizes.items() if name not in _OF_ALL
            }
        return sizes

    def product(self, factors: Factors, sizes: Mapping[str, Coefficient]) -> Coefficient:
        """The value of a written product.

        Raises:
            ValueError: a name in it is not a size, or has no meaning here.
        """
        all_sizes = {**self.fixed_sizes, **sizes}
        result = ONE
        for factor, exponent in factors:
            if isinstance(factor, str):
                if factor not in all_sizes:
                    raise ValueError(f"`{factor}` is not a size here; there are {', '.join(sorted(all_sizes))}")
                value = all_sizes[factor]
            else:
                value = Coefficient.of(factor)
            result *= value if exponent > 0 else value.inverse
        return result

    def declared(self, loss: Loss) -> Coefficient | None:
        """Declared weight of one token of a loss, in sizes from the token's view; None if not declared.

        Raises:
            ValueError: the facts' own scale cannot be read.
        """
        return None if loss.scale is None else self.product(parse_scale(loss.scale)[""], self.block_sizes)

    def in_numbers(self, coefficient: Coefficient, data_rank: int, position: int) -> Coefficient:
        """The coefficient of the tokens of one micro-batch, with the known numbers of tokens inserted."""
        counts = self.facts.token_counts
        if not counts:
            return coefficient
        own_counts = counts[data_rank]
        values = {
            "micro_batch_tokens": own_counts[position],
            "step_tokens": sum(own_counts),
            "global_tokens": sum(map(sum, counts)),
            **{of_micro_batch("micro_batch_tokens", int(self.micro_batches[i])): n for i, n in enumerate(own_counts)},
        }
        for name in coefficient.names & set(values):
            coefficient = coefficient.where(name, Coefficient.of(values[name]))
        return coefficient


_OF_BLOCK = ("micro_batch_tokens", "rank_tokens")
_OF_ALL = ("global_tokens",)


def of_micro_batch(name: str, micro_batch: int) -> str:
    """The name for the number of tokens of one micro-batch, as a scale of other micro-batches' tokens."""
    return f"{name}[{micro_batch}]"


def model_of(subject: Subject) -> Model:
    """Model from the facts given with the graph, from its plan, or read from the graph itself.

    Raises:
        ValueError: the facts do not fit together.
    """
    graph, declared = subject.graph, subject.facts.gradients
    lowered = subject.lowered
    if lowered is not None:
        stages = [lowered.layers_of(stage) for stage in range(len(lowered.stages))]
        num_ranks = {axis: lowered.mesh.size(axis) for axis in ("tp", "ep")}
        own = gpt_gradients(stages, lowered.spec.loss.normalization, num_ranks)
        if lowered.spec.is_custom:
            facts = declared or custom_gradients(own, lowered.spec.loss.normalization, last_stage=len(stages) - 1)
        else:
            facts = declared or with_mtp_losses(with_router_losses(own, lowered.spec, stages), lowered.spec, stages)
        micro_batches = np.arange(subject.num_work_items)
        return Model(graph, facts, mesh_grid(graph, lowered.mesh), micro_batches)
    computed = graph.is_kind(frozenset({OpKind.FORWARD, *ADDS}))
    micro_batches = np.unique(graph.work_item[computed & (graph.work_item != NONE)])
    if declared is None:
        needed = _axes_reduced(graph)
        grid = guessed_grid(graph, subject.stage_owners, needed)
        return Model(graph, _guess(graph, subject.stage_owners, grid, needed), grid, micro_batches)
    mesh = subject.facts.mesh
    grid = guessed_grid(graph, subject.stage_owners, frozenset()) if mesh is None else mesh_grid(graph, mesh)
    _require_fit(declared, len(micro_batches), grid)
    return Model(graph, declared, grid, micro_batches)


def _require_fit(facts: GradientFacts, num_micro_batches: int, grid: Grid) -> None:
    counts = facts.token_counts
    numbers = [grid.size(axis).number for axis in BATCH_AXES]
    if counts and (
        len(counts) != prod(int(n) for n in numbers if n is not None)
        or any(len(row) != num_micro_batches or min(row) < 1 for row in counts)
    ):
        raise ValueError(
            f"token_counts has {len(counts)} rows, and {sorted({len(row) for row in counts})} entries in a row; "
            f"it needs a row for each data rank, with a positive number for each of {num_micro_batches} micro-batches"
        )


def _axes_reduced(graph: OpGraph) -> frozenset[str]:
    """The token axes over which any gradient of the graph is reduced; an unnamed axis counts as ``dp``."""
    axes = np.unique(graph.axis[graph.kind == KIND_CODE[OpKind.REDUCE_GRAD]]).tolist()
    return frozenset("dp" if axis == NONE else AXES[axis] for axis in axes) & frozenset(TOKEN_AXES)


def changes_gradients(graph: OpGraph) -> bool:
    """Return True if any row reduces, scales, overwrites or uses gradients, or scales a loss."""
    changes = graph.is_kind(frozenset({OpKind.REDUCE_GRAD, OpKind.SCALE_GRAD, OpKind.STEP}))
    changes |= graph.is_kind(frozenset({OpKind.FORWARD, *ADDS, *TRAVELLING})) & (
        (graph.scale != 0) | (graph.reduction == REDUCTIONS.index("overwrite"))
    )
    return bool(changes.any())


def _guess(graph: OpGraph, stages: Mapping[int, tuple[int, ...]], grid: Grid, needed: frozenset[str]) -> GradientFacts:
    """Facts read off a graph: all gradients reduced over the axes over which any is, every micro-batch equal.

    A stage has the gradients that its rows name; without names, a single gradient without a name.
    """
    if not changes_gradients(graph) or not stages:
        return GradientFacts((), (), guessed=True)
    others = tuple(axis for axis in grid.axes if axis not in needed and axis != "pp")
    names: dict[int, set[str]] = {}
    for op, of_op in named_parameters(graph).items():
        names.setdefault(int(graph.stage[op]), set()).update(of_op)
    parameters = tuple(
        ParameterGradient(name, (stage,), sharded_over=others)
        for stage in stages
        for name in sorted(names.get(stage, {f"weights of stage {stage}"}))
    )
    return GradientFacts(tuple(_guessed_losses(graph, max(stages))), parameters, guessed=True)


def _guessed_losses(graph: OpGraph, last_stage: int) -> list[Loss]:
    """The main loss on the last stage, and every loss that a forward's scale names, on the forward's stage."""
    pairs = {(last_stage, MAIN_LOSS)}
    scaled = (graph.kind == KIND_CODE[OpKind.FORWARD]) & (graph.scale != 0)
    for stage, scale in np.unique(np.stack([graph.stage[scaled], graph.scale[scaled]], axis=1), axis=0).tolist():
        try:
            pairs |= {(stage, name or MAIN_LOSS) for name in parse_scale(graph.scales[scale])}
        except ValueError:
            continue  # reported as a scale that cannot be read
    return [Loss(name, stage) for stage, name in sorted(pairs)]


@dataclass(frozen=True, eq=False)
class Site:
    """One loss on its stage.

    ``rows`` are the forwards on it, ``place`` the positions of their
    micro-batches and ``code`` their factors of a token's loss, as indices into
    ``ratios``: relative to the declared factor, or as written without one.
    A forward without a scale applies the declared factor. ``own`` are the ratios
    without the scales that gradients meet on the way to an earlier stage.
    """

    loss: Loss
    declared: Coefficient | None
    rows: IntColumn
    place: IntColumn
    code: IntColumn
    ratios: tuple[Coefficient, ...]
    own: tuple[Coefficient, ...]

    def seen(self, model: Model, coords: Mapping[str, int]) -> list[tuple[int, BoolColumn]]:
        """(index of a ratio, its micro-batches) of the tokens at some coordinates; an axis not given matches any."""
        num = len(model.micro_batches)
        if len(self.ratios) == 1:
            return [(0, np.ones(num, dtype=bool))]
        selected = (self.place != NONE) & self._at(model, coords)
        result = []
        for code in range(len(self.ratios)):
            mask = np.zeros(num, dtype=bool)
            mask[self.place[selected & (self.code == code)]] = True
            if mask.any():
                result.append((code, mask))
        return result

    def forward(self, model: Model, code: int, position: int, coords: Mapping[str, int]) -> int | None:
        """The first forward of a micro-batch that applies a ratio, preferably with a scale of its own."""
        matches = self.rows[(self.code == code) & (self.place == position) & self._at(model, coords)]
        named = matches[model.graph.scale[matches] != 0]
        first = named if len(named) else matches
        return int(first[0]) if len(first) else None

    def _at(self, model: Model, coords: Mapping[str, int]) -> BoolColumn:
        mask = np.ones(len(self.rows), dtype=bool)
        for axis, coord in coords.items():
            mask &= model.grid.same(model.graph.rank[self.rows], axis, coord)
        return mask


@dataclass(frozen=True, eq=False)
class Sites:
    """All losses, in the order of the facts. ``unreadable`` has the rows with an invalid scale, and the reason.

    ``travelling`` are the scales between stages, None where no row has one.
    """

    all: tuple[Site, ...]
    unreadable: Mapping[int, str] = field(default_factory=dict)
    travelling: TravellingScales | None = None
    _arrived: dict[tuple[int, int], Site] = field(default_factory=dict)

    def reaching(self, stage: int, name: str | None) -> list[Site]:
        """The losses on a stage or after it, of one name or of any, with the ratios that reach that stage."""
        return [
            self._at(i, stage)
            for i, site in enumerate(self.all)
            if site.loss.stage >= stage and name in (None, site.loss.name)
        ]

    def _at(self, index: int, stage: int) -> Site:
        site = self.all[index]
        if self.travelling is None or not len(site.rows):
            return site
        if (index, stage) not in self._arrived:
            way, products = self.travelling.at(site.rows, stage)
            self._arrived[index, stage] = site if set(products) == {ONE} else _scaled(site, way, products)
        return self._arrived[index, stage]


def _scaled(site: Site, way: IntColumn, products: Sequence[Coefficient]) -> Site:
    """A site whose ratios are multiplied by a product for each forward."""
    pairs, code = np.unique(np.stack([site.code, way], axis=1), axis=0, return_inverse=True)
    own = tuple(site.ratios[first] for first, _ in pairs.tolist())
    ratios = tuple(site.ratios[first] * products[second] for first, second in pairs.tolist())
    return replace(site, code=code.ravel(), ratios=ratios, own=own)


def read_sites(model: Model) -> Sites:
    """The losses of the facts with the scales of the graph's forwards and of their gradients' ways.

    Raises:
        ValueError: the facts declare a scale that cannot be read, or zero.
    """
    graph = model.graph
    forwards = np.flatnonzero(graph.is_kind(frozenset({OpKind.FORWARD})) & (graph.work_item != NONE))
    losses = model.facts.losses
    names_at: dict[int, set[str]] = {}
    for loss in losses:
        names_at.setdefault(loss.stage, set()).add(loss.name)
    unreadable: dict[int, str] = {}
    values = _values(model, forwards, names_at, unreadable)
    sites = []
    for loss in losses:
        declared = model.declared(loss)
        if declared is not None and not declared.terms:
            raise ValueError(f"the loss {loss.name!r} on stage {loss.stage} is declared to count zero: leave it out")
        rows = forwards[graph.stage[forwards] == loss.stage]
        texts, code = np.unique(graph.scale[rows], return_inverse=True)
        written = [values.get(text, {}).get(loss.name) for text in texts.tolist()]
        apply = ONE if declared is None else declared.inverse
        ratios = tuple(ONE if value is None else value * apply for value in written) or (ONE,)
        position = micro_batch_places(model.micro_batches, graph.work_item[rows])
        sites.append(Site(loss, declared, rows, position, code, ratios, ratios))
    return Sites(tuple(sites), unreadable, _travelling(model, unreadable))


def _travelling(model: Model, unreadable: dict[int, str]) -> TravellingScales | None:
    """The scales between stages; None if there are none."""
    graph = model.graph
    scaled = np.flatnonzero((graph.scale != 0) & graph.is_kind(TRAVELLING))
    if not len(scaled):
        return None
    values = {}
    for code, at in zip(*(one.tolist() for one in np.unique(graph.scale[scaled], return_index=True)), strict=True):
        try:
            values[code] = model.product(single_product(graph.scales[code]), model.block_sizes)
        except ValueError as error:
            unreadable[int(scaled[at])] = str(error)
    return TravellingScales(graph, values)


def _values(
    model: Model, forwards: IntColumn, names_at: Mapping[int, set[str]], unreadable: dict[int, str]
) -> dict[int, dict[str, Coefficient]]:
    """By scale code of the graph, the written factor of each loss."""
    graph = model.graph
    values: dict[int, dict[str, Coefficient]] = {}
    scaled = forwards[graph.scale[forwards] != 0]
    pairs, first = np.unique(np.stack([graph.stage[scaled], graph.scale[scaled]], axis=1), axis=0, return_index=True)
    for (stage, code), at in zip(pairs.tolist(), first.tolist(), strict=True):
        loss_names = names_at.get(stage, set())
        try:
            written = {name or MAIN_LOSS: factors for name, factors in parse_scale(graph.scales[code]).items()}
            values[code] = {name: model.product(factors, model.block_sizes) for name, factors in written.items()}
            if not written.keys() <= loss_names:
                unknown = ", ".join(sorted(written.keys() - loss_names))
                choices = ", ".join(sorted(loss_names)) or "none"
                raise ValueError(f"stage {stage} has no loss `{unknown}`; it has {choices}")  # noqa: TRY301
        except ValueError as error:
            unreadable[int(scaled[at])] = str(error)
    return values
