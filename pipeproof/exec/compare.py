"""Compares what the ranks computed with the single-process reference, gradient by gradient."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeproof.comm.held import index_of
from pipeproof.comm.lowered import LoweredPlan
from pipeproof.exec.compare_routers import RouterResult
from pipeproof.exec.jobs import Loss
from pipeproof.stages.describe.layers import Parameter
from pipeproof.stages.describe.streams import measured_with

Gradients = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a gradient: the half-open range it covers in each dim of the whole."""

    rank: int
    md5: str
    index: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class GradientResult:
    """One parameter's gradient in one step, against the reference.

    ``md5`` is of the gathered gradient in the reference's layout and dtype, C
    order. ``max_rel_diff`` is max|a - b| / max|b| against the reference that
    adds in the plan's order; ``uncut_max_rel_diff`` against the uncut one, which
    takes this step from the same weights; there b are also the gradients that
    ``measured_with`` names.
    ``replicas_agree`` says whether all ranks that hold the same part hold the
    same bits.
    """

    step: int
    stage: int
    name: str
    md5: str
    reference_md5: str
    max_rel_diff: float
    uncut_max_rel_diff: float
    replicas_agree: bool
    shards: tuple[Shard, ...]

    @property
    def bitwise(self) -> bool:
        """Whether every bit is the reference's, on every rank that holds it."""
        return self.md5 == self.reference_md5 and self.replicas_agree

    def to_json(self) -> dict[str, Any]:
        """As the run report shows it."""
        return {
            "step": self.step,
            "stage": self.stage,
            "name": self.name,
            "md5": self.md5,
            "reference_md5": self.reference_md5,
            "max_rel_diff": self.max_rel_diff,
            "uncut_max_rel_diff": self.uncut_max_rel_diff,
            "replicas_agree": self.replicas_agree,
            "shards": [{"rank": s.rank, "md5": s.md5, "index": [list(i) for i in s.index]} for s in self.shards],
        }


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step's loss and gradients against the reference. Losses are of the run's dtype.

    ``routers`` is what they have beside gradients, if there is anything.
    """

    step: int
    loss: Loss
    reference_loss: Loss
    uncut_loss: Loss
    gradients: tuple[GradientResult, ...]
    routers: RouterResult | None = None

    @property
    def loss_is_bitwise(self) -> bool:
        """Whether the loss has the reference's bits."""
        return self.loss.tobytes() == self.reference_loss.tobytes()

    @property
    def loss_distance(self) -> float:
        """max|a - b| / max|b| of the losses against the uncut model's."""
        return max_rel_diff(np.asarray(self.loss), np.asarray(self.uncut_loss))

    def agrees(self, bound: float) -> bool:
        """Whether ranks that hold the same part hold the same bits, and losses are within the bound of the uncut."""
        return self.loss_distance <= bound and all(g.replicas_agree for g in self.gradients)

    @property
    def bitwise(self) -> bool:
        """Whether the losses, all gradients and what routers have beside them have the reference's bits."""
        routers = self.routers is None or self.routers.bitwise
        return self.loss_is_bitwise and routers and all(g.bitwise for g in self.gradients)


def compare_step(
    plan: LoweredPlan,
    step: int,
    ranks: Sequence[tuple[Loss | None, Gradients]],
    reference: tuple[Loss, Gradients],
    uncut: tuple[Loss, Gradients],
) -> StepResult:
    """Gather each rank's shards and losses and hold them against both references."""
    results = []
    for stage in range(len(plan.stages)):
        for layer in plan.layers_of(stage):
            for parameter in layer.parameters:
                holders = plan.ranks_of_weight(stage, parameter.name)
                shards = {rank: ranks[rank][1][parameter.name] for rank in holders}
                results.append(_compare(plan, step, stage, parameter, shards, reference[1], uncut[1]))
    return StepResult(step, _total_loss(plan, ranks), reference[0], uncut[0], tuple(results))


def _total_loss(plan: LoweredPlan, ranks: Sequence[tuple[Loss | None, Gradients]]) -> Loss:
    """The sum over context-, expert- and then data-parallel ranks, in their order, of losses of the last stage.

    Those are of its first TP rank. Where the last stage has copies, theirs are added first, in the order of their
    pipeline ranks.
    """

    def of_copy(dp: int, ep: int, cp: int, pp: int) -> Loss:
        loss = ranks[plan.mesh.rank({**plan.mesh.coords(0), "dp": dp, "ep": ep, "cp": cp, "pp": pp})][0]
        assert loss is not None
        return loss

    def of_rank(dp: int, ep: int) -> Loss:
        parts = range(plan.mesh.size("cp"))
        return _in_order([_in_order([of_copy(dp, ep, cp, pp) for pp in plan.holders[-1]]) for cp in parts])

    experts = range(plan.mesh.size("ep"))
    return _in_order([_in_order([of_rank(dp, ep) for ep in experts]) for dp in range(plan.mesh.size("dp"))])


def _in_order(losses: Sequence[Loss]) -> Loss:
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
    uncut: Gradients,
) -> GradientResult:
    gathered = np.empty(parameter.shape, dtype=reference[parameter.name].dtype)
    described: list[Shard] = []
    written: dict[tuple[tuple[int, int], ...], str] = {}
    agree = True
    for rank, shard in shards.items():
        index = index_of(plan, parameter, rank)
        _require_form(parameter.name, rank, shard, tuple(b - a for a, b in index), gathered.dtype)
        md5 = _md5(shard)
        agree = agree and written.setdefault(index, md5) == md5
        gathered[tuple(slice(a, b) for a, b in index)] = shard
        described.append(Shard(rank, md5, index))
    return GradientResult(
        step=step,
        stage=stage,
        name=parameter.name,
        md5=_md5(gathered),
        reference_md5=_md5(reference[parameter.name]),
        max_rel_diff=max_rel_diff(gathered, reference[parameter.name]),
        uncut_max_rel_diff=max_rel_diff(
            gathered, uncut[parameter.name], [uncut[name] for name in measured_with(parameter.name)]
        ),
        replicas_agree=agree,
        shards=tuple(described),
    )


def _require_form(name: str, rank: int, shard: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Numpy would broadcast and convert without a word, and a wrong shard could come to look right."""
    if (shard.shape, shard.dtype) != (shape, dtype):
        raise ValueError(
            f"gradient of {name} on rank {rank}: {shard.dtype} {list(shard.shape)}, expected {dtype} {list(shape)}"
        )


def _md5(array: np.ndarray) -> str:
    return hashlib.md5(np.ascontiguousarray(array).tobytes(), usedforsecurity=False).hexdigest()


def max_rel_diff(ours: np.ndarray, reference: np.ndarray, beside: Sequence[np.ndarray] = ()) -> float:
    """max|a - b| / max|b| in float64; 0 where both are zero, infinite where only the reference is or on NaN.

    The largest element is also looked for in arrays ``beside`` the reference.
    """
    with np.errstate(invalid="ignore"):  # inf - inf and inf / inf are NaN, and NaN is infinitely far
        difference = np.max(np.abs(ours.astype(np.float64) - reference.astype(np.float64)), initial=0.0)
        scale = max(np.max(np.abs(one.astype(np.float64)), initial=0.0) for one in (reference, *beside))
        if difference == 0.0:
            return 0.0
        ratio = difference / scale if scale > 0.0 else np.inf
    return float(ratio) if np.isfinite(ratio) else float("inf")
