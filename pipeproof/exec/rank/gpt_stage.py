"""A stage of the plan's GPT on one rank between its boundaries, and its routers, of either framework.

The tensors between stages are tuples, one tensor per member of the edge, in the order of the edge's members.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.exec.rank.boundary_members import activation_index
from pipeproof.exec.rank.framework_protocol import Array, Tensor, Value, Weight, WeightGradients
from pipeproof.stages.describe.boundary import Boundary
from pipeproof.stages.describe.layer_records import LayerWatch


class GptStage(ABC):
    """A ``RankStage`` around the framework's ``stage``; the frameworks hold work items in their own ways."""

    def __init__(self, plan: LoweredPlan, number: int, coords: Mapping[str, int], stage: Any) -> None:
        self._plan, self._number, self._stage, self._tp = plan, number, stage, coords["tp"]
        self._cp_rank = coords["cp"] if plan.spec.topology.cp > 1 else None
        self.parameters: dict[str, Weight] = stage.parameters
        self.balance = stage.balance

    def forward(self, inputs: Value, *, step: int, index: int, split: int, watch: LayerWatch | None) -> Value:
        """Run one work item on the stage's micro-batch; received members of the edge replace the stage's own values."""
        members, after = self._members(self._number - 1, index, split), self._members(self._number, index, split)
        split = split if self._cp_rank is None else self._cp_rank
        work_item, activation = self._work_item(step, index, split), None
        shards: dict[str, Tensor] = {}
        if members:
            position = activation_index(members)
            activation = self._as(inputs[position], self._plan.spec.run.dtype)
            for member, received in zip(members, inputs, strict=True):
                if member is members[position]:
                    continue
                if member.placement(at_sender=False, gradient=False).dim is None:
                    work_item = self._with_member(work_item, split, member, received)
                else:  # this stage only sends its shard on
                    shards[member.member] = received
        output = self._stage.forward(activation, work_item, step=step, index=index, split=split, watch=watch)
        if not after:
            losses = self._stage.losses
            return (output,) if losses is None or not losses.shape else (output, self._reported(losses))
        position = activation_index(after)
        return tuple(
            self._as(output, member.dtype)
            if member is after[position]
            else shards[member.member].clone()
            if member.member in shards
            else self._outgoing(work_item, split, member)
            for member in after
        )

    def backward_input(self, outputs: Value, gradients: Sequence[Tensor | None]) -> WeightGradients:
        """Run one work item backward to the activation."""
        position = next((index for index, gradient in enumerate(gradients) if gradient is not None), 0)
        deferred: WeightGradients = self._stage.backward_input(outputs[position], gradients[position])
        return deferred

    def return_gradients(self) -> None:
        """Return the gradients of borrowed weights, see ``stages.common.stage.Stage.return_gradients``."""
        self._stage.return_gradients()

    def _members(self, edge: int, index: int, split: int) -> tuple[Boundary, ...]:
        """Members of an edge for one work item; empty before the first stage and after the last."""
        schedule = self._plan.spec.schedule
        work_item = index % schedule.num_micro_batches * schedule.num_sequence_splits + split
        return self._plan.edges[edge].members(work_item) if 0 <= edge < len(self._plan.edges) else ()

    @abstractmethod
    def _work_item(self, step: int, index: int, split: int) -> Any:
        """Return the work item as ``stage`` takes it."""

    @abstractmethod
    def _with_member(self, work_item: Any, split: int, member: Boundary, received: Tensor) -> Any:
        """Return the work item with a received member, whole, in place of its own values."""

    @abstractmethod
    def _outgoing(self, work_item: Any, split: int, member: Boundary) -> Tensor:
        """Return a copy of this rank's part of a member that comes from the micro-batch; sent tensors are freed."""

    @abstractmethod
    def _as(self, tensor: Tensor, dtype: str) -> Tensor:
        """Cast a tensor to the type of its message or of the computation."""

    def _reported(self, losses: Any) -> Tensor:
        """Return the vector of losses as a tensor."""
        return losses


class GptRouters:
    """Routers of one stage, as far as both frameworks count in the same way; the rest of a ``Routers`` is theirs."""

    def __init__(self, balance: Any) -> None:
        self._balance = balance
        self.begin, self.move_biases = balance.begin, balance.move_biases

    def biased(self) -> Sequence[str]:
        """Return the experts whose routers have a bias that moves."""
        return list(self._balance.biases)

    def values(self) -> dict[str, Array]:
        """Return the router values, see ``Balance.values``."""
        values: dict[str, Array] = self._balance.values()
        return values
