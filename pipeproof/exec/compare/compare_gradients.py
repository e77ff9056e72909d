"""Comparison of a step with the single-process reference, gradient by gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from operator import add
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeproof.analysis.align.array_digests import (
    have_same_bits,
    largest,
    largest_difference,
    max_relative,
    md5_of,
    relative_difference,
)
from pipeproof.analysis.align.record_format import Index, Shard
from pipeproof.comm.accumulation_order import Accumulation, accumulation_of
from pipeproof.comm.op_graph import LoweredPlan, index_of, stage_weights
from pipeproof.exec.compare.step_losses import is_finite, json_number
from pipeproof.exec.rank.job_files import Loss, StepOutcome
from pipeproof.stages.describe.gradient_facts import ROUTER_LOSSES, routers
from pipeproof.stages.describe.layer import Parameter
from pipeproof.stages.describe.layers.layer_operations import measured_with
from pipeproof.stages.describe.stage_memory import num_shards, shard_range, shards_weights

# --- Kinds of comparison: bits of the unpartitioned model, bits of the ordered reference, or a bound ---
# The ordered reference adds in the plan's order. PyTorch does not have it: the unpartitioned model then computes every
# step from the ranks' own weights, and the distance is compared with a bound. Over several steps the optimizer would
# turn rounding differences into whole steps.


Array = npt.NDArray[Any]


def needs_ordered_reference(plan: LoweredPlan) -> bool:
    """Return True if the plan adds in another order than the unpartitioned model, which runs micro-batches in order.

    Nondeterministic kernels add in an unknown order.
    """
    topology = plan.spec.topology
    return (
        not plan.spec.run.deterministic
        or max(topology.tp, topology.cp, topology.ep, topology.dp) > 1
        or accumulation_of(plan) is not Accumulation.IN_ORDER
    )


def is_checked_by_bound(plan: LoweredPlan) -> bool:
    """Return True if a bound compares every step with the unpartitioned model's step from the ranks' weights."""
    return plan.spec.run.backend == "torch" and needs_ordered_reference(plan)


def assembled_weights(plan: LoweredPlan, ranks: Mapping[int, Mapping[str, Array]]) -> dict[str, Array]:
    """Assemble the shards of ranks to whole weights; other arrays (biases of routers) are taken as they are.

    If several ranks have the same array or shard, the first rank's is taken. The ranks must have all weights.
    """
    whole = {name: array for _, own in sorted(ranks.items(), reverse=True) for name, array in own.items()}
    for stage, parameter in stage_weights(plan):
        holders = [rank for rank in plan.ranks_of_weight(stage, parameter.name) if rank in ranks]
        assembled = np.empty(parameter.shape, dtype=ranks[holders[0]][parameter.name].dtype)
        for rank in reversed(holders):
            region = tuple(slice(start, stop) for start, stop in index_of(plan, parameter, rank))
            parts = dp_group(plan, rank) if shards_weights(plan.spec) else (rank,)
            own = np.concatenate([ranks[part][parameter.name].reshape(-1) for part in parts])
            assembled[region] = own.reshape(assembled[region].shape)
        whole[parameter.name] = assembled
    return whole


Gradients = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Region:
    """Elements of a gradient that a rank has: a range per dim; with a sharded optimizer, a flat range within them."""

    index: Index
    elements: tuple[int, int] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rank's array."""
        if self.elements is not None:
            return (self.elements[1] - self.elements[0],)
        return tuple(stop - start for start, stop in self.index)

    def of(self, whole: np.ndarray) -> np.ndarray:
        """Return these elements of the whole gradient."""
        block = whole[tuple(slice(start, stop) for start, stop in self.index)]
        return block if self.elements is None else block.reshape(-1)[slice(*self.elements)]


def regions_of(plan: LoweredPlan, stage: int, parameter: Parameter) -> dict[int, Region]:
    """Region of each rank that has a part of a gradient, in the order of the ranks."""
    shards = num_shards(plan.spec)
    regions = {}
    for rank in plan.ranks_of_weight(stage, parameter.name):
        block = Region(index_of(plan, parameter, rank))
        dp_rank = plan.mesh.coords(rank)["dp"]
        elements = None if shards == 1 else shard_range(prod(block.shape), shards, dp_rank)
        regions[rank] = Region(block.index, elements)
    return regions


def dp_group(plan: LoweredPlan, rank: int) -> tuple[int, ...]:
    """Ranks of the dp group of a rank, in order."""
    coords = plan.mesh.coords(rank)
    return tuple(plan.mesh.rank({**coords, "dp": dp}) for dp in range(plan.mesh.size("dp")))


@dataclass(frozen=True, slots=True)
class GradientResult:
    """Comparison of one parameter's gradient in one step with the reference.

    ``md5`` is the MD5 of the gathered gradient in the reference's layout and dtype, in C order. ``max_rel_diff`` is
    max|a - b| / max|b|, where b is the gradient of the reference that adds in the plan's order;
    ``unpartitioned_max_rel_diff`` is the same for the unpartitioned model, which computes this step from the same
    weights; there max|b| includes the gradients that ``measured_with`` names. ``replicas_agree`` is True if all ranks
    with the same shard have the same bits.
    """

    step: int
    stage: int
    name: str
    md5: str
    reference_md5: str
    max_rel_diff: float
    unpartitioned_max_rel_diff: float
    replicas_agree: bool
    shards: tuple[Shard, ...]

    @property
    def bitwise(self) -> bool:
        """True if every bit equals the reference's, on all ranks that have it."""
        return self.md5 == self.reference_md5 and self.replicas_agree

    def to_json(self) -> dict[str, Any]:
        """Return the form of the run report."""
        return {
            "step": self.step,
            "stage": self.stage,
            "name": self.name,
            "md5": self.md5,
            "reference_md5": self.reference_md5,
            "max_rel_diff": self.max_rel_diff,
            "uncut_max_rel_diff": self.unpartitioned_max_rel_diff,
            "replicas_agree": self.replicas_agree,
            "shards": [shard.to_json() for shard in self.shards],
        }


@dataclass(frozen=True, slots=True)
class StepResult:
    """Comparison of one step's losses (in the run's dtype), gradients and router values with the reference."""

    step: int
    loss: Loss
    reference_loss: Loss
    unpartitioned_loss: Loss
    gradients: tuple[GradientResult, ...]
    routers: RouterResult | None = None

    @property
    def loss_is_bitwise(self) -> bool:
        """True if the loss has the reference's bits."""
        return self.loss.tobytes() == self.reference_loss.tobytes()

    @property
    def loss_distance(self) -> float:
        """max|a - b| / max|b| of the losses a and the unpartitioned model's losses b; infinite for NaN."""
        return max_relative(np.asarray(self.loss), np.asarray(self.unpartitioned_loss))

    def agrees(self, bound: float) -> bool:
        """Return True if equal shards have equal bits, and losses are within ``bound`` of the unpartitioned model's."""
        return self.loss_distance <= bound and all(g.replicas_agree for g in self.gradients)

    @property
    def bitwise(self) -> bool:
        """True if losses, gradients and router values have the reference's bits."""
        routers = self.routers is None or self.routers.bitwise
        return self.loss_is_bitwise and routers and all(g.bitwise for g in self.gradients)


def compare_step(
    plan: LoweredPlan, step: int, ranks: Sequence[StepOutcome], ordered: StepOutcome, unpartitioned: StepOutcome
) -> StepResult:
    """Compare a step of all ranks with both references.

    Raises:
        ValueError: a shard has another shape or dtype than the plan states.
    """
    models = _Models(ordered, unpartitioned)
    assert ordered.loss is not None
    assert unpartitioned.loss is not None
    return StepResult(
        step=step,
        loss=_total_loss(plan, ranks),
        reference_loss=ordered.loss,
        unpartitioned_loss=unpartitioned.loss,
        gradients=tuple(
            _GradientComparison(plan, stage, parameter, ranks, models).result(step)
            for stage, parameter in stage_weights(plan)
        ),
        routers=compare_routers(plan, [own.routers for own in ranks], ordered.routers, unpartitioned.routers),
    )


class _Models:
    """Both references of a step, with values that are computed once for each gradient."""

    def __init__(self, ordered: StepOutcome, unpartitioned: StepOutcome) -> None:
        self.ordered, self.unpartitioned = ordered, unpartitioned
        self.are_same = ordered is unpartitioned
        self._md5s: dict[tuple[str, Region | None], str] = {}
        self._scales: dict[tuple[str, bool], float] = {}

    def md5(self, name: str, region: Region | None = None) -> str:
        """MD5 of a region of the ordered reference's gradient; without a region, of the whole."""
        whole = self.ordered.gradients[name]
        if region is not None and region.shape == whole.shape:
            region = None
        if (name, region) not in self._md5s:
            self._md5s[name, region] = md5_of(whole if region is None else region.of(whole))
        return self._md5s[name, region]

    def scale(self, name: str, *, of_ordered: bool) -> float:
        """max|b| of a gradient."""
        key = name, of_ordered or self.are_same
        if key not in self._scales:
            gradients = (self.ordered if key[1] else self.unpartitioned).gradients
            self._scales[key] = largest(gradients[name])
        return self._scales[key]


@dataclass(frozen=True, slots=True)
class _Comparison:
    """One rank's shard compared with the same region of the reference; the differences are max|a - b| in float64."""

    md5: str
    is_equal: bool
    difference: float
    unpartitioned_difference: float


class _GradientComparison:
    """Comparison of the shards of one gradient. Shards with the reference's bits are not hashed."""

    def __init__(
        self, plan: LoweredPlan, stage: int, parameter: Parameter, ranks: Sequence[StepOutcome], models: _Models
    ) -> None:
        self._plan, self._stage, self._parameter, self._models = plan, stage, parameter, models
        self._name = parameter.name
        self._regions = regions_of(plan, stage, parameter)
        self._shards = {rank: ranks[rank].gradients[self._name] for rank in self._regions}

    def result(self, step: int) -> GradientResult:
        """Compare each shard, then the joined and the gathered shards."""
        for rank, shard in self._shards.items():
            self._require_form(rank, shard)
        compared = {rank: self._compared(self._regions[rank], shard) for rank, shard in self._shards.items()}
        by_region: dict[Region, str] = {}
        agree = all(
            by_region.setdefault(region, compared[rank].md5) == compared[rank].md5
            for rank, region in self._regions.items()
        )
        # For each region the last rank that has it: these shards make up the gathered gradient.
        deciding = {region: rank for rank, region in self._regions.items()}
        parts = [compared[rank] for rank in sorted(deciding.values())]
        reference_md5 = self._models.md5(self._name)
        unpartitioned_scale = max(
            self._models.scale(other, of_ordered=False) for other in (self._name, *measured_with(self._name))
        )
        return GradientResult(
            step=step,
            stage=self._stage,
            name=self._name,
            md5=reference_md5 if all(part.is_equal for part in parts) else md5_of(self._gathered(deciding)),
            reference_md5=reference_md5,
            max_rel_diff=relative_difference(
                float(np.max([part.difference for part in parts])), self._models.scale(self._name, of_ordered=True)
            ),
            unpartitioned_max_rel_diff=relative_difference(
                float(np.max([part.unpartitioned_difference for part in parts])), unpartitioned_scale
            ),
            replicas_agree=agree,
            shards=tuple(self._shard(rank, compared) for rank in self._regions),
        )

    def _require_form(self, rank: int, shard: np.ndarray) -> None:
        """Check a shard's shape and dtype: numpy would broadcast and convert silently, and hide a wrong shard."""
        shape, dtype = self._regions[rank].shape, self._models.ordered.gradients[self._name].dtype
        if (shard.shape, shard.dtype) != (shape, dtype):
            raise ValueError(
                f"gradient of {self._name} on rank {rank}: {shard.dtype} {list(shard.shape)}, expected {dtype} "
                f"{list(shape)}"
            )

    def _compared(self, region: Region, shard: np.ndarray) -> _Comparison:
        models = self._models
        ordered, unpartitioned = (
            region.of(model.gradients[self._name]) for model in (models.ordered, models.unpartitioned)
        )
        if have_same_bits(shard, ordered):
            md5, is_equal, difference = models.md5(self._name, region), True, 0.0 if is_finite(shard) else np.nan
        else:
            md5, is_equal, difference = md5_of(shard), False, largest_difference(shard, ordered)
        to_unpartitioned = difference if models.are_same else largest_difference(shard, unpartitioned)
        return _Comparison(md5, is_equal, difference, to_unpartitioned)

    def _shard(self, rank: int, compared: Mapping[int, _Comparison]) -> Shard:
        region = self._regions[rank]
        if region.elements is None:
            return Shard(rank, compared[rank].md5, region.index)
        group = dp_group(self._plan, rank)
        if all(compared[member].is_equal for member in group):
            return Shard(rank, self._models.md5(self._name, Region(region.index)), region.index)
        return Shard(rank, md5_of(np.concatenate([self._shards[member] for member in group])), region.index)

    def _gathered(self, deciding: Mapping[Region, int]) -> np.ndarray:
        gathered = np.empty(self._parameter.shape, dtype=next(iter(self._shards.values())).dtype)
        by_index: dict[Index, list[np.ndarray]] = {}
        for region, rank in sorted(deciding.items(), key=lambda pair: pair[0].elements or (0, 0)):
            by_index.setdefault(region.index, []).append(self._shards[rank].reshape(-1))
        for index, shards in by_index.items():
            block = Region(index)
            block.of(gathered)[...] = np.concatenate(shards).reshape(block.shape)
        return gathered


def _total_loss(plan: LoweredPlan, ranks: Sequence[StepOutcome]) -> Loss:
    """Sum of the last stage's losses over context-, expert- and then data-parallel ranks, in their order.

    The first TP rank's loss is used. If the last stage has copies, their losses are added first, in the order of their
    pipeline ranks.
    """

    def of_copy(dp: int, ep: int, cp: int, pp: int) -> Loss:
        loss = ranks[plan.mesh.rank({**plan.mesh.coords(0), "dp": dp, "ep": ep, "cp": cp, "pp": pp})].loss
        assert loss is not None
        return loss

    def of_rank(dp: int, ep: int) -> Loss:
        cp_ranks = range(plan.mesh.size("cp"))
        return _sum_in_order([_sum_in_order([of_copy(dp, ep, cp, pp) for pp in plan.holders[-1]]) for cp in cp_ranks])

    ep_ranks = range(plan.mesh.size("ep"))
    return _sum_in_order([_sum_in_order([of_rank(dp, ep) for ep in ep_ranks]) for dp in range(plan.mesh.size("dp"))])


def _sum_in_order(losses: Sequence[Loss]) -> Loss:
    return reduce(add, losses)


def gather_sharded_gradients(plan: LoweredPlan, ranks: Sequence[Gradients]) -> list[Gradients]:
    """Assemble gradients of a sharded optimizer: each rank gets the shards of its dp group, in the weights' shapes."""
    if num_shards(plan.spec) == 1:
        return list(ranks)
    axes = {axis: plan.mesh.size(axis) for axis in ("tp", "ep")}
    shapes = {weight.name: weight.local_shape(axes) for layer in plan.layers for weight in layer.parameters}
    return [
        {
            name: np.concatenate([ranks[member][name] for member in dp_group(plan, rank)]).reshape(shapes[name])
            for name in shards
        }
        for rank, shards in enumerate(ranks)
    ]


# --- Routers: their losses, and the biases after a step ---


@dataclass(frozen=True, slots=True)
class RouterResult:
    """Router values of one step; the arrays are by name.

    ``aux`` and ``z`` are the step's losses, scalars of the run's dtype that add the losses of work items in their order
    and then of layers; ``bias/layer.3.mlp`` is the bias after the step. ``differing`` has the names whose bits differ
    from the reference's; single losses are named ``aux/layer.3.mlp/MICRO-BATCH/SPLIT``.
    """

    of_run: Mapping[str, Array]
    reference: Mapping[str, Array]
    unpartitioned: Mapping[str, Array]
    differing: tuple[str, ...]

    @property
    def bitwise(self) -> bool:
        """True if every loss and every bias has the reference's bits, on all ranks that have it."""
        return not self.differing

    @property
    def losses(self) -> tuple[str, ...]:
        """Names of the losses."""
        return tuple(name for name in ROUTER_LOSSES if name in self.reference)

    def mismatch(self) -> str:
        """Clause that states the differences; empty if there are none."""
        if self.bitwise:
            return ""
        return f"; {len(self.differing)} router values differ (first: {self.differing[0]})"

    def to_json(self) -> dict[str, Any]:
        """Return the form of the run report."""
        sides = {"loss": self.of_run, "reference_loss": self.reference, "uncut_loss": self.unpartitioned}
        return {
            "bitwise": self.bitwise,
            "differing": list(self.differing),
            "losses": {name: {key: json_number(side.get(name)) for key, side in sides.items()} for name in self.losses},
        }


def compare_routers(
    plan: LoweredPlan,
    ranks: Sequence[Mapping[str, Array]],
    reference: Mapping[str, Array],
    unpartitioned: Mapping[str, Array],
) -> RouterResult | None:
    """Compare the router values of all ranks with the reference; None if there are no values.

    If several ranks have the same value, the lowest rank's is reported.
    """
    of_run: dict[str, Array] = {}
    for of_rank in ranks:
        for name, array in of_rank.items():
            of_run.setdefault(name, array)
    if not reference and not of_run:
        return None
    differing = {name for name in reference if name not in of_run}
    for of_rank in ranks:
        differing |= {
            name for name, array in of_rank.items() if name not in reference or not _same(array, reference[name])
        }
    sums = [_summed(plan, side) for side in (of_run, reference, unpartitioned)]
    return RouterResult(sums[0], sums[1], sums[2], tuple(sorted(differing)))


def _summed(plan: LoweredPlan, values: Mapping[str, Array]) -> dict[str, Array]:
    """Return the biases, and the sum of each loss over work items and layers."""
    layers = routers(plan.layers)
    sums: dict[str, Array] = {}

    def order(key: str) -> tuple[int, int, int]:
        _, experts, micro_batch, split = key.split("/")
        return int(micro_batch), int(split), layers.index(experts)

    for name in ROUTER_LOSSES:
        for key in sorted((key for key in values if key.startswith(f"{name}/")), key=order):
            sums[name] = sums[name] + values[key] if name in sums else values[key]
    biases = {key: array for key, array in values.items() if key.partition("/")[0] not in ROUTER_LOSSES}
    return {**sums, **biases}


def _same(a: Array, b: Array) -> bool:
    return (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())
