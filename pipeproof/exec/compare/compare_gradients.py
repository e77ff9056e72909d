"""Comparison of a step with the single-process reference, gradient by gradient."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeproof.comm.lowered_plan import LoweredPlan
from pipeproof.comm.weight_ranges import index_of
from pipeproof.exec.compare.compare_routers import RouterResult
from pipeproof.exec.launch.job_files import Loss
from pipeproof.stages.describe.layer import Parameter
from pipeproof.stages.describe.layers.gradient_units import measured_with
from pipeproof.stages.describe.training_state import num_shards

Gradients = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's shard of a gradient; ``index`` is its half-open range in each dim of the whole."""

    rank: int
    md5: str
    index: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class GradientResult:
    """Comparison of one parameter's gradient in one step with the reference.

    ``md5`` is that of the gathered gradient in the reference's layout and dtype, in C order. ``max_rel_diff`` is
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
        """True if every bit is the reference's, on every rank that has it."""
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
            "shards": [{"rank": s.rank, "md5": s.md5, "index": [list(i) for i in s.index]} for s in self.shards],
        }


@dataclass(frozen=True, slots=True)
class StepResult:
    """Comparison of one step's losses (in the run's dtype), gradients and router values with the reference.

    ``without_gradient`` are the custom layers' weights for which no backward of the step had a gradient.
    """

    step: int
    loss: Loss
    reference_loss: Loss
    unpartitioned_loss: Loss
    gradients: tuple[GradientResult, ...]
    routers: RouterResult | None = None
    without_gradient: tuple[str, ...] = ()

    @property
    def loss_is_bitwise(self) -> bool:
        """True if the loss has the reference's bits."""
        return self.loss.tobytes() == self.reference_loss.tobytes()

    @property
    def loss_distance(self) -> float:
        """max|a - b| / max|b| of the losses a and the unpartitioned model's losses b."""
        return max_rel_diff(np.asarray(self.loss), np.asarray(self.unpartitioned_loss))

    def agrees(self, bound: float) -> bool:
        """Return True if equal shards have equal bits, and losses are within ``bound`` of the unpartitioned model's."""
        return self.loss_distance <= bound and all(g.replicas_agree for g in self.gradients)

    @property
    def bitwise(self) -> bool:
        """True if losses, gradients and router values have the reference's bits."""
        routers = self.routers is None or self.routers.bitwise
        return self.loss_is_bitwise and routers and all(g.bitwise for g in self.gradients)


def compare_step(
    plan: LoweredPlan,
    step: int,
    ranks: Sequence[tuple[Loss | None, Gradients]],
    reference: tuple[Loss, Gradients],
    unpartitioned: tuple[Loss, Gradients],
) -> StepResult:
    """Gather the shards and losses of all ranks and compare them with both references."""
    results = []
    for stage in range(len(plan.stages)):
        for layer in plan.layers_of(stage):
            for parameter in layer.parameters:
                holders = plan.ranks_of_weight(stage, parameter.name)
                shards = {rank: ranks[rank][1][parameter.name] for rank in holders}
                results.append(_compare(plan, step, stage, parameter, shards, reference[1], unpartitioned[1]))
    return StepResult(step, _total_loss(plan, ranks), reference[0], unpartitioned[0], tuple(results))


def _total_loss(plan: LoweredPlan, ranks: Sequence[tuple[Loss | None, Gradients]]) -> Loss:
    """Sum of the last stage's losses over context-, expert- and then data-parallel ranks, in their order.

    The loss is that of the first TP rank. Where the last stage has copies, their losses are added first, in the order
    of their pipeline ranks.
    """

    def of_copy(dp: int, ep: int, cp: int, pp: int) -> Loss:
        loss = ranks[plan.mesh.rank({**plan.mesh.coords(0), "dp": dp, "ep": ep, "cp": cp, "pp": pp})][0]
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


def _compare(
    plan: LoweredPlan,
    step: int,
    stage: int,
    parameter: Parameter,
    shards: Mapping[int, np.ndarray],
    reference: Gradients,
    unpartitioned: Gradients,
) -> GradientResult:
    gathered = np.empty(parameter.shape, dtype=reference[parameter.name].dtype)
    described: list[Shard] = []
    md5_by_index: dict[tuple[tuple[int, int], ...], str] = {}
    agree = True
    for rank, shard in shards.items():
        index = index_of(plan, parameter, rank)
        _require_form(parameter.name, rank, shard, tuple(b - a for a, b in index), gathered.dtype)
        md5 = _md5(shard)
        agree = agree and md5_by_index.setdefault(index, md5) == md5
        gathered[tuple(slice(a, b) for a, b in index)] = shard
        described.append(Shard(rank, md5, index))
    return GradientResult(
        step=step,
        stage=stage,
        name=parameter.name,
        md5=_md5(gathered),
        reference_md5=_md5(reference[parameter.name]),
        max_rel_diff=max_rel_diff(gathered, reference[parameter.name]),
        unpartitioned_max_rel_diff=max_rel_diff(
            gathered,
            unpartitioned[parameter.name],
            [unpartitioned[name] for name in measured_with(parameter.name)],
        ),
        replicas_agree=agree,
        shards=tuple(described),
    )


def _require_form(name: str, rank: int, shard: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Check a shard's shape and dtype: numpy would broadcast and convert silently, and hide a wrong shard."""
    if (shard.shape, shard.dtype) != (shape, dtype):
        raise ValueError(
            f"gradient of {name} on rank {rank}: {shard.dtype} {list(shard.shape)}, expected {dtype} {list(shape)}"
        )


def _md5(array: np.ndarray) -> str:
    return hashlib.md5(np.ascontiguousarray(array).tobytes(), usedforsecurity=False).hexdigest()


def max_rel_diff(array: np.ndarray, reference: np.ndarray, others: Sequence[np.ndarray] = ()) -> float:
    """max|a - b| / max|b| in float64; 0 if both are zero, infinite if only the reference is zero, or for NaN.

    The maximum of |b| includes the elements of ``others``.
    """
    with np.errstate(invalid="ignore"):  # inf - inf and inf / inf are NaN, and NaN is infinitely far
        difference = np.max(np.abs(array.astype(np.float64) - reference.astype(np.float64)), initial=0.0)
        scale = max(np.max(np.abs(b.astype(np.float64)), initial=0.0) for b in (reference, *others))
        if difference == 0.0:
            return 0.0
        ratio = difference / scale if scale > 0.0 else np.inf
    return float(ratio) if np.isfinite(ratio) else float("inf")


def gather_sharded_gradients(
    plan: LoweredPlan, ranks: Sequence[tuple[Loss | None, Gradients]]
) -> list[tuple[Loss | None, Gradients]]:
    """Assemble gradients of a sharded optimizer: each rank gets the shards of its dp group, in the weights' shapes.

    Raises:
        ValueError: the shards of a gradient together have another number of elements than the weight.
    """
    if num_shards(plan.spec) == 1:
        return list(ranks)
    axes = {axis: plan.mesh.size(axis) for axis in ("tp", "ep")}
    shapes = {weight.name: weight.local_shape(axes) for layer in plan.layers for weight in layer.parameters}
    return [
        (
            loss,
            {
                name: _joined(name, shapes[name], [ranks[dp][1][name] for dp in _dp_group(plan, rank)])
                for name in shards
            },
        )
        for rank, (loss, shards) in enumerate(ranks)
    ]


def _dp_group(plan: LoweredPlan, rank: int) -> list[int]:
    """Ranks of the dp group of a rank."""
    coords = plan.mesh.coords(rank)
    return [plan.mesh.rank({**coords, "dp": dp}) for dp in range(plan.mesh.size("dp"))]


def _joined(name: str, shape: tuple[int, ...], shards: Sequence[np.ndarray]) -> np.ndarray:
    whole = np.concatenate(shards)
    if whole.size != np.prod(shape, dtype=np.int64):
        sizes = [shard.size for shard in shards]
        raise ValueError(f"gradient of {name}: shards of {sizes} elements, expected {list(shape)} in all")
    return whole.reshape(shape)
