"""The end of a step on one rank: gradients summed over ranks, clipped, used by the optimizer; weights gathered.

Every sum and gather is done when the host comes to it. What stands on the
queue of gradients is so carried out at its place in the program, before what
comes after it: gloo's collectives hold their host, and beside this nothing
computes. A wait for it finds it done.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeproof.comm.gradient_norm import counted_by, num_weights
from pipeproof.comm.lowered import LoweredPlan
from pipeproof.comm.step_end import is_reduced
from pipeproof.exec.children import ChildCollectives
from pipeproof.exec.framework import (
    Array,
    Clip,
    Collectives,
    Framework,
    Optimizer,
    RankStage,
    ShardedOptimizer,
    Tensor,
    Weight,
)
from pipeproof.schedule.ops import Op
from pipeproof.stages.describe.shares import num_shares


class StepEnd:
    """Gradients and weights of the stages of the rank at ``coords``; ``children`` issues what is below an operation."""

    def __init__(
        self,
        plan: LoweredPlan,
        coords: Mapping[str, int],
        stages: Mapping[int, RankStage],
        children: ChildCollectives,
        framework: Framework,
    ) -> None:
        self._plan, self._coords, self._stages, self._children = plan, coords, stages, children
        self._framework = framework
        self._sharded: dict[int, ShardedOptimizer] = {}
        self._whole: dict[int, Optimizer] = {}
        run, shares = plan.spec.run, num_shares(plan.spec)
        for number, stage in stages.items():
            if shares > 1:
                self._sharded[number] = framework.sharded_optimizer(run, stage.parameters, shares, coords["dp"])
            else:
                self._whole[number] = framework.optimizer(run, stage.parameters)
        self._clip = self._make_clip()
        self._borrowers = plan.shared_weights.borrowers(coords["pp"])
        self._given_back: set[int] = set()

    def begin(self) -> None:
        """Forget the step before: all gradients are +0.0."""
        self._given_back.clear()
        if self._clip is not None:
            self._clip.begin()
        for optimizer in (*self._sharded.values(), *self._whole.values()):
            optimizer.zero_grad()

    def reduce(self, op: Op) -> None:
        """Sum the gradients of a stage over ranks; over dp, where the optimizer is sharded, this rank's shares."""
        self._give_back(op.stage)
        axis, stage = str(op.axis), self._stages[op.stage]
        for parameter in self._plan.weights_of(op.stage, self._coords["pp"]):
            name = parameter.name
            num_holders = len(self._plan.shared_weights.places(op.stage, name))
            if not (num_holders > 1 if axis == "pp" else is_reduced(parameter, axis)):
                continue
            if axis == "dp" and op.stage in self._sharded:
                optimizer = self._sharded[op.stage]
                optimizer.put_sum(name, self._children.sum_scattered(axis, optimizer.to_scatter(name)))
            else:
                weight = stage.parameters[name]
                own = self._framework.gradient(weight)
                self._framework.put_gradient(weight, self._children.reduce_over(axis, own, "sum", name))

    def sum_norms(self, collectives: Collectives) -> Tensor:
        """Sum the vector of squared norms, as far as it is, over some ranks; what this rank put in."""
        assert self._clip is not None
        for stage in self._stages:
            self._give_back(stage)
        squares = self._clip.squares
        self._clip.squares = collectives.reduce(squares, "sum")
        return squares

    def update(self, stage: int) -> None:
        """Clip and step."""
        self._give_back(stage)
        if self._clip is not None:
            self._clip.clip(self._updated(stage))
        (self._sharded.get(stage) or self._whole[stage]).step()

    def gather(self, op: Op) -> None:
        """Put the weights of a stage together from the shares that dp ranks have updated."""
        optimizer = self._sharded[op.stage]
        for parameter in self._plan.weights_of(op.stage, self._coords["pp"]):
            name = parameter.name
            optimizer.put_whole(name, self._children.gathered(str(op.axis), optimizer.to_gather(name)))

    def gradients(self) -> dict[str, Array]:
        """After a step, by weight, the gradient that the optimizer used, flat where it is this rank's share."""
        return {
            name: self._framework.arrays.to_numpy(self._framework.gradient(weight))
            for stage in self._stages
            for name, weight in self._updated(stage).items()
        }

    def state(self) -> dict[tuple[str, str], Tensor]:
        """What the rank has from step to step: each weight (by its name and an empty slot), what optimizers keep."""
        found: dict[tuple[str, str], Tensor] = {}
        for number, stage in self._stages.items():
            found |= {(name, ""): self._framework.main(weight) for name, weight in stage.parameters.items()}
            found |= (self._sharded.get(number) or self._whole[number]).state()
        return found

    def put_state(self, state: Mapping[tuple[str, str], Tensor]) -> None:
        """Go on with what ``state`` gave; before the first step."""
        for number, stage in self._stages.items():
            weights = {name: state[name, ""] for name in stage.parameters}
            kept = {key: one for key, one in state.items() if key[1] and key[0] in weights}
            (self._sharded.get(number) or self._whole[number]).put_state(weights, kept)

    def _updated(self, stage: int) -> Mapping[str, Weight]:
        """What the optimizer of a stage updates: weights, or this rank's shares of them."""
        sharded = self._sharded.get(stage)
        return self._stages[stage].parameters if sharded is None else sharded.updated

    def _give_back(self, stage: int) -> None:
        """Before a stage's sums: what borrowers on this rank made of its weights is added to its gradients."""
        for borrower in self._borrowers.get(stage, ()):
            if borrower not in self._given_back:
                self._stages[borrower].give_back()
                self._given_back.add(borrower)

    def _make_clip(self) -> Clip | None:
        run = self._plan.spec.run
        if run.clip_norm is None:
            return None
        counted = {place: self._updated(stage)[name] for place, stage, name in counted_by(self._plan, self._coords)}
        return self._framework.clip(counted, num_weights(self._plan), run.clip_norm, run.weight_dtype)
