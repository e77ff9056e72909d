"""Protocols of a framework for the executor: tensors, communication, stages, optimizers.

``exec.rank.paddle`` and ``exec.rank.torch`` implement them, and ``exec.rehearse`` over either of these. The executor
uses the methods that all frameworks' tensors share (``detach``, ``clone``, ``contiguous``, ``flatten``, ``reshape``,
ranges of the first dim) and ``Arrays``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.schedule.op_table import Channel
from pipeproof.specs.plan_sections import RunSpec
from pipeproof.stages.common.experts import Used
from pipeproof.stages.common.sequence_splits import ContextCollectives
from pipeproof.stages.common.tensor_parallel import TensorParallelCollectives
from pipeproof.stages.describe.layer_records import LayerWatch
from pipeproof.stages.describe.stage_memory import Kept

Tensor: TypeAlias = Any
Weight: TypeAlias = Any
"""Weight of a stage: a tensor, or a tensor with a separate gradient buffer."""
Value: TypeAlias = tuple[Tensor, ...]
"""Tensors that cross a boundary, in the order of the edge's members."""
Array: TypeAlias = npt.NDArray[Any]


class Arrays(Protocol):
    """Operations on tensors. Types have the names that plans use."""

    def empty(self, shape: Sequence[int], dtype: str) -> Tensor:
        """Return an uninitialized tensor on the device of the run."""

    def zeros(self, shape: Sequence[int], dtype: str) -> Tensor:
        """Return a tensor of zeros on the device of the run."""

    def shaped(self, memory: Tensor, shape: Sequence[int], dtype: str, start: int = 0) -> Tensor:
        """Return a tensor that shares ``memory``, flat and of type uint8, from byte ``start`` on.

        If ``start`` is not 0, it and the size of the memory are multiples of the size of an element.
        """

    def copy_into(self, target: Tensor, source: Tensor) -> Tensor:
        """Copy the values of ``source`` into ``target`` and return ``target``."""

    def numel(self, tensor: Tensor) -> int:
        """Return the number of elements."""

    def dtype(self, tensor: Tensor) -> str:
        """Return the type of the elements."""

    def to_numpy(self, tensor: Tensor) -> Array:
        """Return a copy of the values, for which the host waits. 16-bit floats become float32."""

    def from_bytes(self, content: npt.NDArray[np.uint8], shape: Sequence[int], dtype: str) -> Tensor:
        """Return a tensor of these bytes, in C order, on the device of the run, without any computation."""

    def to_bytes(self, tensor: Tensor) -> npt.NDArray[np.uint8]:
        """Return the bytes of a contiguous tensor without any computation; the host waits for them."""

    def synchronize(self) -> None:
        """Let the host wait for the device of the run; do nothing on a CPU."""

    def want_gradient(self, tensor: Tensor, *, wanted: bool) -> None:
        """Make a tensor a leaf with or without a gradient in backward."""

    def gradient(self, tensor: Tensor) -> Tensor:
        """Return the gradient from the backward."""

    def release(self, tensor: Tensor) -> None:
        """Free the memory of the values; autograd still needs the tensor."""


class Transfer(Protocol):
    """A posted transfer: its buffer, and its times in nanoseconds once it is done."""

    buffer: Tensor
    posted_ns: int
    start_ns: int
    end_ns: int

    def wait(self) -> None:
        """Block the host until the transfer is done; on a GPU block the following computation instead."""


class Channels(Protocol):
    """Ends of all channels on one rank."""

    def post(self, channel: Channel, buffer: Tensor, after: Sequence[Any] = ()) -> Transfer:
        """Start to move a contiguous buffer over this rank's end of ``channel`` after the transfers ``after``."""

    def close(self) -> None:
        """End the threads of the channels, once all transfers are done."""


class Collectives(Protocol):
    """Collectives over one group of ranks. Each takes a contiguous tensor and returns a new one."""

    ranks: tuple[int, ...]

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the tensors of all members, joined along ``dim`` in group order."""

    def reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        """Return the ``sum`` or ``max`` over the members."""

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this member's part along ``dim`` of the sum over the members."""

    def exchange(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send ``send[m]`` rows to each member m; return ``receive[m]`` rows of each, joined in group order."""


class BegunCollective(Protocol):
    """A collective that has begun. Its tensors stay allocated as long as it is referenced."""

    def block(self) -> None:
        """Block the host until it has ended; on a GPU block the current stream instead."""

    def wait(self) -> Tensor:
        """Block, and return the result; call this once."""


class AsyncCollectives(Protocol):
    """Collectives over one group that run while the rank computes; the caller waits for each."""

    def all_gather(self, tensor: Tensor, dim: int) -> BegunCollective:
        """Begin ``Collectives.all_gather``."""

    def reduce_scatter(self, tensor: Tensor, dim: int) -> BegunCollective:
        """Begin ``Collectives.reduce_scatter``."""

    def exchange(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> BegunCollective:
        """Begin ``Collectives.exchange``."""


class OverlappedCollectives(Protocol):
    """Collectives that can also be begun, with a later wait."""

    @property
    def begun(self) -> AsyncCollectives:
        """The same collectives, which only begin."""


class World(Protocol):
    """Connected communication of one rank."""

    @property
    def rank(self) -> int:
        """Number of this rank."""

    @property
    def channels(self) -> Channels:
        """Ends of its channels."""

    @property
    def collectives(self) -> Mapping[int, Collectives]:
        """Collectives of the groups that this rank is a member of, by index of the graph's groups."""

    def barrier(self) -> None:
        """Wait until all ranks have called this."""


class StageCollectives(ContextCollectives, TensorParallelCollectives, Protocol):
    """Collectives that layers issue while they compute: over TP, context-parallel and EP ranks."""

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int], *, label: str) -> Tensor:
        """Exchange rows over EP ranks."""

    def announce(
        self, counts: Tensor, sizes: Sequence[int], use: Callable[[Tensor], Used], *, label: str
    ) -> Callable[[], Used]:
        """Exchange counts over EP ranks; return a function that returns ``use`` of the received counts."""

    def all_gather_each(self, tensors: Sequence[Tensor], *, labels: Sequence[str], axis: str) -> Sequence[Tensor]:
        """Return the parts of all EP ranks of each tensor, joined along dim 0."""

    def reduce_scatter_each(self, tensors: Sequence[Tensor], *, labels: Sequence[str], axis: str) -> Sequence[Tensor]:
        """Return this rank's part along dim 0 of the sum of each tensor over EP ranks."""


class WeightGradients(Protocol):
    """Deferred weight gradients of one work item."""

    def accumulate(self) -> None:
        """Compute the weight gradients and add them to the gradients."""


class DeferringStage(Protocol):
    """A stage whose deferred weight gradients can be computed while its backward is under way."""

    def accumulate_deferred(self) -> None:
        """Compute the weight gradients that the running backward has deferred so far."""


class Routers(Protocol):
    """Routers of one stage: the part that the executor uses between steps."""

    def begin(self) -> None:
        """Reset everything except the biases."""

    def biased(self) -> Sequence[str]:
        """Return the experts whose routers have a bias that moves."""

    def load(self, experts: str) -> Tensor:
        """Return the number of tokens that each expert of a router got in the step, int64."""

    def set_load(self, experts: str, load: Tensor) -> None:
        """Replace the load by its sum over ranks."""

    def move_biases(self) -> None:
        """Move each bias towards the mean load, at the end of a step."""

    def bias(self, experts: str) -> Tensor:
        """Return the bias of one router."""

    def put_bias(self, experts: str, bias: Tensor) -> None:
        """Replace the bias of one router."""

    def values(self) -> dict[str, Array]:
        """Return the step's router values for the comparison, by name."""


class RankStage(Protocol):
    """One stage on one rank: its weights and its computations between boundaries."""

    parameters: dict[str, Weight]

    def forward(self, inputs: Value, *, step: int, index: int, split: int, watch: LayerWatch | None) -> Value:
        """Run one work item forward; the caller keeps the result for backward.

        ``inputs`` has the members of the edge before the stage, members with a gradient as leaves; it is empty for the
        first stage. ``step``, ``index`` (of the micro-batch, over all data ranks) and ``split`` (of the sequences)
        identify the work item. The result has the members of the edge after the stage; for the last stage the scalar
        loss, followed by the vector of its reported parts if there are any.
        """

    def backward_input(self, outputs: Value, gradients: Sequence[Tensor | None]) -> WeightGradients:
        """Run one work item backward: set the gradients of the inputs, and return the deferred weight gradients.

        ``gradients`` has one entry for each of ``outputs``, None for members without a gradient and for the loss.
        """

    def return_gradients(self) -> None:
        """Add the gradients of borrowed weights to the gradients of their owners."""


class Stages(Protocol):
    """Factory of a rank's stages."""

    def make(self, number: int, lent: Mapping[str, Weight]) -> RankStage:
        """Return a stage, with the weights that the rank's other stages lend it."""

    def routers(self, stage: RankStage) -> Routers | None:
        """Return the routers of a stage, None if it has none."""

    def load(self, step: int) -> None:
        """Load a step's input data: nothing in the step then waits for the host."""


class Optimizer(Protocol):
    """Optimizer of one stage on one rank."""

    def zero_grad(self) -> None:
        """Set every gradient to +0.0."""

    def step(self) -> None:
        """Update every weight from its gradient."""

    def state(self) -> dict[tuple[str, str], Tensor]:
        """Return the optimizer state by weight and slot (``state.state_layout``); it exists after the first step."""

    def restore_state(self, weights: Mapping[str, Tensor], slots: Mapping[tuple[str, str], Tensor]) -> None:
        """Resume with these main weights and with the result of ``state``; call before the first step."""


class ShardedOptimizer(Optimizer, Protocol):
    """Optimizer that updates only this rank's shard of each weight, see ``stages.describe.stage_memory``."""

    updated: dict[str, Weight]

    def allocate(self) -> None:
        """Make whole gradients of +0.0 for a backward, where they are dropped after each sum."""

    def to_scatter(self, name: str) -> Tensor:
        """Return the gradient of a weight, flat and padded with zeros to equal shards."""

    def put_sum(self, name: str, part: Tensor) -> None:
        """Take this rank's shard of the summed gradient; with sharded gradients add it, and drop the whole one."""

    def to_gather(self, name: str) -> Tensor:
        """Return this rank's shard of a weight, padded with zeros."""

    def put_whole(self, name: str, shares: Tensor) -> None:
        """Take the joined shards of all ranks."""

    def drop_weights(self) -> None:
        """Drop whole weights, also in what a forward has kept, until they are put again."""


class Clip(Protocol):
    """Clipping of gradients by their global norm."""

    squares: Tensor
    """Vector of squared norms, summed over the ranks so far."""

    def begin(self) -> None:
        """Begin a step."""

    def clip(self, weights: Mapping[str, Weight]) -> None:
        """Scale the gradients down to the limit."""


class ThreadedFramework(Protocol):
    """A framework with which two threads of a rank alternate."""

    def as_this_thread(self) -> Callable[[], None]:
        """Return a function that a new thread calls to compute as this thread does now: same device, same bits."""


class SideStream(Protocol):
    """A second stream of a rank's device, for work that must not wait for another computation's launches.

    Without a device its methods do nothing.
    """

    def follow(self) -> None:
        """Let its next work wait for all work that the current stream has launched so far."""

    def launching(self) -> AbstractContextManager[object]:
        """Within the context work is launched on it."""

    def keep(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor, which was made within the context, until the current stream does not read it."""


class OverlappingFramework(ThreadedFramework, Protocol):
    """A framework with which overlapped pairs alternate at the rows of the graph."""

    @property
    def side_stream(self) -> SideStream:
        """The side stream of this rank."""


class Framework(Protocol):
    """A framework that has been started in this process."""

    @property
    def has_values(self) -> bool:
        """True if its tensors have values; tensors of a rehearsal have none."""

    @property
    def arrays(self) -> Arrays:
        """Operations on its tensors."""

    def num_threads(self) -> int:
        """Return the largest number of threads that it computes with."""

    def connect(self, rank: int, plan: LoweredPlan, progress: Callable[[str], None]) -> World:
        """Join the other ranks by the process's environment; every rank must call this."""

    def stages(self, plan: LoweredPlan, coords: Mapping[str, int], collectives: StageCollectives) -> Stages:
        """Return the factory of the stages of the rank at ``coords``."""

    def optimizer(self, run: RunSpec, weights: Mapping[str, Weight]) -> Optimizer:
        """Return the optimizer that the plan's ``run`` names."""

    def sharded_optimizer(
        self, run: RunSpec, weights: Mapping[str, Weight], num_shards: int, index: int, kept: Kept
    ) -> ShardedOptimizer:
        """Return the optimizer of the ``index``-th of ``num_shards`` shards of each weight.

        ``kept`` is what of them exists for a whole step.
        """

    def clip(self, counted: Mapping[int, Weight], num_weights: int, limit: float, dtype: str) -> Clip:
        """Return the clip of a rank whose norm counts the weights ``counted``, by their index among all weights."""

    def gradient(self, weight: Weight) -> Tensor:
        """Return the gradient of a weight or of a shard of a weight."""

    def put_gradient(self, weight: Weight, gradient: Tensor) -> None:
        """Replace the gradient of a weight."""

    def main(self, weight: Weight) -> Tensor:
        """Return the main weight, which the optimizer updates."""

    def value(self, weight: Weight) -> np.ndarray:
        """Return a copy of the main weight."""
