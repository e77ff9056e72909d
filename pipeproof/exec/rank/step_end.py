"""End of a step on one rank: gradients and router loads summed over ranks, clipping, optimizer, gathered weights.

The host executes every sum and gather when it reaches it, also on the gradient queue: gloo's collectives block their
host, so nothing computes at the same time. A wait for such an operation finds it done.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.comm.step_end_rows import counted_by, is_reduced, load_sums, num_weights
from pipeproof.exec.rank.child_collectives import ChildCollectives
from pipeproof.exec.rank.framework_protocol import (
    Array,
    Clip,
    Collectives,
    Framework,
    Optimizer,
    RankStage,
    Routers,
    ShardedOptimizer,
    Tensor,
    Weight,
)
from pipeproof.schedule.ops import Op
from pipeproof.stages.describe.gradient_facts import bias_name
from pipeproof.stages.describe.stage_memory import Kept, num_shards


class StepEnd:
    """Gradients and weights of the stages of the rank at ``coords``; ``children`` issues collectives of operations."""

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
        run, shares, self._kept = plan.spec.run, num_shards(plan.spec), Kept.of(plan.spec)
        for number, stage in stages.items():
            if shares > 1:
                self._sharded[number] = framework.sharded_optimizer(
                    run, stage.parameters, shares, coords["dp"], self._kept
                )
            else:
                self._whole[number] = framework.optimizer(run, stage.parameters)
        self._clip = self._make_clip()
        self._borrowers = plan.shared_weights.borrowers(coords["pp"])
        self._returned: set[int] = set()

    def begin(self) -> None:
        """Begin a step: set all gradients to +0.0."""
        self._returned.clear()
        if self._clip is not None:
            self._clip.begin()
        for optimizer in (*self._sharded.values(), *self._whole.values()):
            optimizer.zero_grad()

    def before_backward(self, stage: int) -> None:
        """Make the gradients to which a backward of the stage adds, where none are kept between its backwards."""
        if not self._kept.gradients:
            self._sharded[stage].allocate()

    def reduce(self, op: Op) -> None:
        """Sum the gradients of a stage over ranks; over dp with a sharded optimizer only this rank's shards."""
        self._return_gradients(op.stage)
        axis = str(op.axis)
        for parameter in self._plan.weights_of(op.stage, self._coords["pp"]):
            name = parameter.name
            num_holders = len(self._plan.shared_weights.places(op.stage, name))
            if not (num_holders > 1 if axis == "pp" else is_reduced(parameter, axis)):
                continue
            if axis == "dp" and op.stage in self._sharded:
                optimizer = self._sharded[op.stage]
                optimizer.put_sum(name, self._children.sum_scattered(axis, optimizer.to_scatter(name)))
            else:
                self._sum(op, name)

    def _sum(self, op: Op, name: str) -> None:
        weight = self._stages[op.stage].parameters[name]
        gradient = self._framework.gradient(weight)
        self._framework.put_gradient(weight, self._children.reduce_over(str(op.axis), gradient, "sum", name))

    def sum_norms(self, collectives: Collectives) -> Tensor:
        """Sum the vector of squared norms over some ranks; return this rank's vector before the sum."""
        assert self._clip is not None
        for stage in self._stages:
            self._return_gradients(stage)
        squares = self._clip.squares
        self._clip.squares = collectives.reduce(squares, "sum")
        return squares

    def update(self, stage: int) -> None:
        """Clip the gradients of a stage and step its optimizer."""
        self._return_gradients(stage)
        if self._clip is not None:
            self._clip.clip(self._updated(stage))
        (self._sharded.get(stage) or self._whole[stage]).step()

    def gather(self, op: Op) -> None:
        """Gather the weights of a stage from the shards that dp ranks have updated."""
        optimizer = self._sharded[op.stage]
        for parameter in self._plan.weights_of(op.stage, self._coords["pp"]):
            name = parameter.name
            optimizer.put_whole(name, self._children.gathered(str(op.axis), optimizer.to_gather(name)))

    def release(self, op: Op) -> None:
        """Drop the whole weights of a stage; the rank keeps their shards."""
        self._sharded[op.stage].drop_weights()

    def gradients(self) -> dict[str, Array]:
        """Return the gradients that the optimizer used, by weight; this rank's shard is flat."""
        return {
            name: self._framework.arrays.to_numpy(self._framework.gradient(weight))
            for stage in self._stages
            for name, weight in self._updated(stage).items()
        }

    def weights(self) -> dict[str, Array]:
        """Return this rank's main weights; of sharded ones its shards, which are flat."""
        return {
            name: self._framework.value(weight)
            for number in self._stages
            for name, weight in self._held(number).items()
        }

    def state(self) -> dict[tuple[str, str], Tensor]:
        """Return the weights (by name and an empty slot) and the optimizers' state."""
        state: dict[tuple[str, str], Tensor] = {}
        for number in self._stages:
            state |= {(name, ""): self._framework.main(weight) for name, weight in self._held(number).items()}
            state |= (self._sharded.get(number) or self._whole[number]).state()
        return state

    def restore_state(self, state: Mapping[tuple[str, str], Tensor]) -> None:
        """Resume with the result of ``state``; call before the first step."""
        for number, stage in self._stages.items():
            weights = {name: state[name, ""] for name in stage.parameters if (name, "") in state}
            slots = {key: tensor for key, tensor in state.items() if key[1] and key[0] in weights}
            (self._sharded.get(number) or self._whole[number]).restore_state(weights, slots)

    def _updated(self, stage: int) -> Mapping[str, Weight]:
        """Weights that the optimizer of a stage updates, or this rank's shards of them."""
        sharded = self._sharded.get(stage)
        return self._stages[stage].parameters if sharded is None else sharded.updated

    def _held(self, stage: int) -> Mapping[str, Weight]:
        """Weights of a stage that last from step to step, or this rank's shards of them."""
        return self._stages[stage].parameters if self._kept.weights else self._updated(stage)

    def _return_gradients(self, stage: int) -> None:
        """Before a stage's sums, add the gradients of this rank's borrowers of its weights."""
        for borrower in self._borrowers.get(stage, ()):
            if borrower not in self._returned:
                self._stages[borrower].return_gradients()
                self._returned.add(borrower)

    def _make_clip(self) -> Clip | None:
        run = self._plan.spec.run
        if run.clip_norm is None:
            return None
        counted = {index: self._updated(stage)[name] for index, stage, name in counted_by(self._plan, self._coords)}
        return self._framework.clip(counted, num_weights(self._plan), run.clip_norm, run.weight_dtype)


class RankRouters:
    """Routers of all stages of one rank; ``children`` issues collectives of the running operation."""

    def __init__(self, plan: LoweredPlan, routers: Mapping[int, Routers], children: ChildCollectives) -> None:
        self._plan, self._routers, self._children = plan, routers, children

    def begin(self) -> None:
        """Begin a step."""
        for routers in self._routers.values():
            routers.begin()

    def sum_loads(self, reduce: Op) -> None:
        """Sum the loads of routers in a ``REDUCE_GRAD``."""
        axis = str(reduce.axis)
        if not load_sums(self._plan, reduce.stage, axis):
            return
        routers = self._routers[reduce.stage]
        for experts in routers.biased():
            total = self._children.reduce_over(axis, routers.load(experts), "sum", bias_name(experts))
            routers.set_load(experts, total)

    def end_step(self, stage: int) -> None:
        """Move the biases of a stage."""
        if stage in self._routers:
            self._routers[stage].move_biases()

    def state(self) -> dict[tuple[str, str], Tensor]:
        """Return each bias by its router and the slot ``bias``."""
        return {(name, "bias"): routers.bias(name) for routers in self._routers.values() for name in routers.biased()}

    def restore_state(self, state: Mapping[tuple[str, str], Tensor]) -> None:
        """Resume with the result of ``state``."""
        for routers in self._routers.values():
            for name in routers.biased():
                routers.put_bias(name, state[name, "bias"])

    def values(self) -> dict[str, Array]:
        """Return the router values of a step for the comparison, by name."""
        return {name: array for routers in self._routers.values() for name, array in routers.values().items()}
