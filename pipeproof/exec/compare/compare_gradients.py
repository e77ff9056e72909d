"""Comparison of a step with the single-process reference, gradient by gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeproof.comm.op_graph import LoweredPlan, stage_weights
from pipeproof.exec.compare.compare_routers import RouterResult, merged_routers
from pipeproof.exec.compare.exact_values import max_rel_diff, relative_difference
from pipeproof.exec.compare.step_losses import require_finite
from pipeproof.exec.compare.step_part import (
    Index,
    ReferenceGradient,
    Region,
    ShardFacts,
    StepPart,
    compare_part,
    deciding_ranks,
    dp_group,
    gradient_key,
    regions_of,
)
from pipeproof.exec.rank.job_files import Loss, StepOutcome
from pipeproof.stages.describe.layer import Parameter
from pipeproof.stages.describe.stage_memory import num_shards
from pipeproof.verify.subject import Subject

Gradients = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's shard of a gradient; ``index`` is its half-open range in each dim of the whole.

    With a sharded optimizer whose dp group is on several hosts, a rank's shard is only the half-open range ``elements``
    of that region, flattened in C order. ``reference_md5`` is the MD5 of the reference's region, None where the bits
    are equal or the step has no reference.
    """

    rank: int
    md5: str
    index: Index
    elements: tuple[int, int] | None = None
    reference_md5: str | None = None

    def to_json(self, *, with_reference: bool) -> dict[str, Any]:
        """Return the form of the run report, with ``elements`` only where they are used."""
        elements = {} if self.elements is None else {"elements": list(self.elements)}
        reference = {"reference_md5": self.reference_md5} if with_reference and self.reference_md5 is not None else {}
        return {"rank": self.rank, "md5": self.md5, "index": [list(i) for i in self.index], **elements, **reference}


@dataclass(frozen=True, slots=True)
class GradientResult:
    """Comparison of one parameter's gradient in one step with the reference.

    ``md5`` is that of the gathered gradient in the reference's layout and dtype, in C order. ``max_rel_diff`` is
    max|a - b| / max|b|, where b is the gradient of the reference that adds in the plan's order;
    ``unpartitioned_max_rel_diff`` is the same for the unpartitioned model, which computes this step from the same
    weights; there max|b| includes the gradients that ``measured_with`` names. ``replicas_agree`` is True if all ranks
    with the same shard have the same bits.

    ``md5`` is None where the gathered gradient differs from the reference and its shards are on several hosts: nobody
    has it as a whole. In a step without a reference ``reference_md5`` is None, and the differences are NaN.
    """

    step: int
    stage: int
    name: str
    md5: str | None
    reference_md5: str | None
    max_rel_diff: float
    unpartitioned_max_rel_diff: float
    replicas_agree: bool
    shards: tuple[Shard, ...]

    @property
    def bitwise(self) -> bool:
        """True if every bit is the reference's, on every rank that has it."""
        return self.md5 is not None and self.md5 == self.reference_md5 and self.replicas_agree

    @property
    def differing(self) -> tuple[Shard, ...]:
        """Shards with other bits than the reference's region."""
        return tuple(shard for shard in self.shards if shard.reference_md5 is not None)

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
            "shards": [shard.to_json(with_reference=self.md5 is None) for shard in self.shards],
        }


@dataclass(frozen=True, slots=True)
class StepResult:
    """Comparison of one step's losses (in the run's dtype), gradients and router values with the reference.

    With ``is_compared`` False the step has no reference: the reference's losses are NaN, and only equal shards are
    compared with each other.
    """

    step: int
    loss: Loss
    reference_loss: Loss
    unpartitioned_loss: Loss
    gradients: tuple[GradientResult, ...]
    routers: RouterResult | None = None
    is_compared: bool = True

    @property
    def loss_is_bitwise(self) -> bool:
        """True if the loss has the reference's bits."""
        return self.is_compared and self.loss.tobytes() == self.reference_loss.tobytes()

    @property
    def loss_distance(self) -> float:
        """max|a - b| / max|b| of the losses a and the unpartitioned model's losses b; infinite without a reference."""
        return max_rel_diff(np.asarray(self.loss), np.asarray(self.unpartitioned_loss))

    def agrees(self, bound: float) -> bool:
        """Return True if equal shards have equal bits, and losses are within ``bound`` of the unpartitioned model's."""
        is_within = not self.is_compared or self.loss_distance <= bound
        return is_within and all(g.replicas_agree for g in self.gradients)

    @property
    def bitwise(self) -> bool:
        """True if losses, gradients and router values have the reference's bits."""
        routers = self.routers is None or self.routers.bitwise
        return self.loss_is_bitwise and routers and all(g.bitwise for g in self.gradients)


def compare_step(
    plan: LoweredPlan, step: int, ranks: Sequence[StepOutcome], ordered: StepOutcome, unpartitioned: StepOutcome
) -> StepResult:
    """Compare a step of all ranks with both references."""
    return merged_step(plan, [compare_part(plan, step, dict(enumerate(ranks)), ordered, unpartitioned)])


def merged_step(plan: LoweredPlan, parts: Sequence[StepPart]) -> StepResult:
    """Return the comparison of all ranks from its parts, which together have each rank once.

    The result is that of one part with all ranks, but ``GradientResult.md5`` is None where the gathered gradient
    differs from the reference and no part has all of it. References of the parts that differ are not found here; see
    ``host_part.reference_findings``. If a part has no reference for the step, the result has none.

    Raises:
        ValueError: a rank is in no part or in several, or the parts are of different steps.
    """
    by_rank = {rank: part for part in parts for rank in part.ranks}
    if sorted(rank for part in parts for rank in part.ranks) != list(range(plan.mesh.num_ranks)):
        raise ValueError(f"the parts have the ranks {sorted(by_rank)}, expected each of {plan.mesh.num_ranks} once")
    if len({part.step for part in parts}) != 1:
        raise ValueError(f"the parts are of the steps {sorted({part.step for part in parts})}")
    references = [part.reference for part in parts if part.reference is not None]
    reference = references[0] if len(references) == len(parts) else None
    gradients = tuple(
        _merged_gradient(plan, stage, parameter, by_rank, None if reference is None else reference.gradients)
        for stage, parameter in stage_weights(plan)
    )
    loss = _total_loss(plan, {rank: part.loss(rank) for rank, part in by_rank.items()})
    if reference is None:
        none = loss * loss.dtype.type(np.nan)
        return StepResult(parts[0].step, loss, none, none, gradients, is_compared=False)
    routers, unpartitioned_routers = (
        {name: value.array() for name, value in of_model.items()}
        for of_model in (reference.routers, reference.unpartitioned_routers)
    )
    return StepResult(
        step=parts[0].step,
        loss=loss,
        reference_loss=reference.loss.loss(),
        unpartitioned_loss=reference.unpartitioned_loss.loss(),
        gradients=gradients,
        routers=merged_routers(plan, [part.routers for part in parts], routers, unpartitioned_routers),
    )


def require_finite_step(subject: Subject, parts: Sequence[StepPart]) -> None:
    """Refuse to continue training with a loss or gradient that is not finite, in parts of all ranks.

    Raises:
        NotFiniteError: a loss or a gradient of a rank is NaN or infinite.
    """
    by_rank = {rank: part for part in parts for rank in part.ranks}
    names = {key.partition("/")[2] for part in parts for key, own in part.gradients.items() if own.shards}
    facts = [part.finite for part in parts]
    require_finite(subject.graph, parts[0].step, facts, lambda rank: by_rank[rank].loss(rank), len(names))


def _merged_gradient(
    plan: LoweredPlan,
    stage: int,
    parameter: Parameter,
    by_rank: Mapping[int, StepPart],
    references: Mapping[str, ReferenceGradient] | None,
) -> GradientResult:
    regions = regions_of(plan, stage, parameter)
    parts = {rank: by_rank[rank].gradients[gradient_key(stage, parameter.name)] for rank in regions}
    facts = {rank: part.shards[rank] for rank, part in parts.items()}
    md5_by_region: dict[Region, str] = {}
    agree = all(
        md5_by_region.setdefault(region, facts[rank].md5) == facts[rank].md5 for rank, region in regions.items()
    )
    deciding = [facts[rank] for rank in sorted(deciding_ranks(regions))]
    gathered = next((part.md5 for part in parts.values() if part.md5 is not None), None)
    shards = tuple(_shard(rank, region, facts[rank]) for rank, region in regions.items())
    step = next(iter(by_rank.values())).step
    if references is None:
        return GradientResult(step, stage, parameter.name, gathered, None, np.nan, np.nan, agree, shards)
    reference = references[parameter.name]
    return GradientResult(
        step=step,
        stage=stage,
        name=parameter.name,
        md5=reference.md5 if all(shard.reference_md5 is None for shard in deciding) else gathered,
        reference_md5=reference.md5,
        max_rel_diff=relative_difference(_maximum([shard.difference for shard in deciding]), reference.scale),
        unpartitioned_max_rel_diff=relative_difference(
            _maximum([shard.unpartitioned_difference for shard in deciding]), reference.unpartitioned_scale
        ),
        replicas_agree=agree,
        shards=shards,
    )


def _maximum(differences: Sequence[float]) -> float:
    """Largest of some differences; NaN if one is NaN, wherever it is."""
    return float(np.max(differences))


def _shard(rank: int, region: Region, facts: ShardFacts) -> Shard:
    if facts.joined is not None:
        return Shard(rank, facts.joined[0], region.index, None, facts.joined[1])
    return Shard(rank, facts.md5, region.index, region.elements, facts.reference_md5)


def _total_loss(plan: LoweredPlan, losses: Mapping[int, Loss | None]) -> Loss:
    """Sum of the last stage's losses over context-, expert- and then data-parallel ranks, in their order.

    The loss is that of the first TP rank. Where the last stage has copies, their losses are added first, in the order
    of their pipeline ranks.
    """

    def of_copy(dp: int, ep: int, cp: int, pp: int) -> Loss:
        loss = losses[plan.mesh.rank({**plan.mesh.coords(0), "dp": dp, "ep": ep, "cp": cp, "pp": pp})]
        assert loss is not None
        return loss

    def of_rank(dp: int, ep: int) -> Loss:
        cp_ranks = range(plan.mesh.size("cp"))
        return _sum_in_order([_sum_in_order([of_copy(dp, ep, cp, pp) for pp in plan.holders[-1]]) for cp in cp_ranks])

    ep_ranks = range(plan.mesh.size("ep"))
    return _sum_in_order([_sum_in_order([of_rank(dp, ep) for ep in ep_ranks]) for dp in range(plan.mesh.size("dp"))])


def _sum_in_order(losses: Sequence[Loss]) -> Loss:
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    return total


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
