"""A plan trained through ``PaddleStage`` in one process: any cut into stages, tensor- and data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.layer import Layer, Parameter
from pipeproof.stages.describe.synthetic import micro_batch
from pipeproof.stages.paddle.optimizer import StageOptimizer
from pipeproof.stages.paddle.stage import PaddleStage
from pipeproof.stages.reference.ordered import Orders, run_ordered
from tests.plans import plan_spec
from tests.stages.stage_chain import StageChain

Gradients = dict[str, np.ndarray]


def make_plan(**sections: Any) -> PlanSpec:
    """The tests' base plan with overrides, on one stage unless it says otherwise."""
    topology = {"pp": 1, **sections.pop("topology", {})}
    return plan_spec(topology=topology, **sections)


def same_bits(ours: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> list[str]:
    """Names whose bits differ; both sides must have the same names, shapes and dtypes."""
    assert set(ours) == set(reference)
    for name, array in ours.items():
        assert (array.shape, array.dtype) == (reference[name].shape, reference[name].dtype), name
    return [name for name in ours if ours[name].tobytes() != reference[name].tobytes()]


@dataclass(frozen=True)
class Step:
    """Results of one step."""

    loss: np.generic
    gradients: Gradients


class StagedRun(StageChain):
    """``cut`` lists where stages begin, besides at layer 0; ``layers`` replaces the described ones."""

    def __init__(self, plan: PlanSpec, cut: Sequence[int] = (), layers: Sequence[Layer] | None = None) -> None:
        def make(part: Sequence[Layer], place: int, rank: Any) -> PaddleStage:
            return PaddleStage(plan, part, place, rank)

        super().__init__(plan, cut, paddle, make, _leaf, layers=layers, tp=plan.topology.tp)
        self.optimizers = [StageOptimizer(plan.run, s.parameters) for stages in self.stages for s in stages]

    def steps(self) -> Iterator[Step]:
        """Train the plan's steps."""
        for step in range(self.plan.run.steps):
            ranks = [self._data_parallel_rank(step, rank) for rank in range(self.plan.topology.dp)]
            loss, grads = ranks[0]
            for later_loss, later in ranks[1:]:
                loss = loss + later_loss
                grads = [{n: total[n] + own[n] for n in total} for total, own in zip(grads, later, strict=True)]
            for rank, own in enumerate(grads):
                for name, weight in self._weights(rank).items():
                    weight.grad = own[name]
            yield Step(loss, {p.name: _whole(p, [own[p.name].numpy() for own in grads]) for p in self.parameters})
            for optimizer in self.optimizers:
                optimizer.step()

    def _data_parallel_rank(self, step: int, dp_rank: int) -> tuple[np.generic, list[dict[str, paddle.Tensor]]]:
        """The loss of one data-parallel rank, and per tensor-parallel rank its gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        num = self.plan.schedule.num_micro_batches
        total = None
        for index in range(dp_rank * num, (dp_rank + 1) * num):
            losses = self.world.run(lambda rank, index=index: self._micro_batch(rank, step, index))
            assert len({loss.tobytes() for loss in losses}) == 1, "tensor-parallel ranks disagree about the loss"
            total = losses[0] if total is None else total + losses[0]
        ranks = range(self.plan.topology.tp)
        grads = [{name: w.grad.clone() for name, w in self._weights(rank).items()} for rank in ranks]
        for parameter in self.parameters:
            if parameter.partial_over:
                first, *others = (own[parameter.name] for own in grads)
                for other in others:
                    first = first + other
                for own in grads:
                    own[parameter.name] = first
        return total, grads

    def _micro_batch(self, rank: int, step: int, index: int) -> np.generic:
        """Forward through the stages and back."""
        inputs, outputs, losses = self.forward(rank, micro_batch(self.plan, step, index), step=step, index=index)
        forward = self.take_issued(rank)
        later = self.backward(rank, inputs, outputs)
        self.issued.append((forward, self.take_issued(rank)))
        for gradients in later:
            gradients.accumulate()
        return losses[()]

    def _weights(self, rank: int) -> dict[str, paddle.Tensor]:
        return {name: weight for stage in self.stages[rank] for name, weight in stage.parameters.items()}


def _leaf(activation: paddle.Tensor) -> paddle.Tensor:
    leaf = activation.detach()
    leaf.stop_gradient = False
    return leaf


def _whole(parameter: Parameter, shards: list[np.ndarray]) -> np.ndarray:
    if parameter.tp.dim is not None:
        return np.concatenate(shards, parameter.tp.dim)
    assert len({shard.tobytes() for shard in shards}) == 1, f"ranks disagree about {parameter.name}"
    return shards[0].copy()


def run_in_order(plan):
    """The ordered reference, adding micro-batches in index order."""
    orders = (range(plan.schedule.num_micro_batches),)
    names = [parameter.name for layer in describe_gpt(plan) for parameter in layer.parameters]
    return run_ordered(plan, Orders(orders, dict.fromkeys(names, orders)))
